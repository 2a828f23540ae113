"""A replica of which a rank has some stages: the modules between two cuts, and no more."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.replica.flat import FlatModule, Layout, layout_of
from sparkdl.replica.live import LiveReplica
from sparkdl.replica.recipe import Recipe
from sparkdl.step.compute import autocasting
from sparkdl.train.mesh import Mesh
from sparkdl.train.stages import Items, bounds_of, chain_of
from sparkdl.train.strategy import Pipeline


class Stage(nn.Module):
    """Some modules of the chain, one after another."""

    def __init__(self, items: Items, live: LiveReplica) -> None:
        super().__init__()
        self.chain = nn.ModuleList(item for _, item in items)
        self._autocasting = lambda: autocasting(live)

    def forward(self, *values: Any) -> Any:
        """What comes out; several values are the tuple that the module before put out."""
        value = values[0] if len(values) == 1 else values
        with self._autocasting():
            for item in self.chain:
                value = item(value)
        return value


@dataclass(frozen=True)
class Seats:
    """Who has what: ``count`` stages, stage s at the rank of place s % ``mesh.pipe`` of each copy of
    the pipeline. ``places``: for each segment of the model's layout, the place of its stage."""

    count: int
    mesh: Mesh
    places: tuple[int, ...]

    def stages(self, rank: int) -> range:
        return range(self.mesh.place(rank, "pipe"), self.count, self.mesh.pipe)

    def numbers(self, rank: int) -> list[int]:
        """Of the segments of its stages."""
        return [n for n, p in enumerate(self.places) if p == self.mesh.place(rank, "pipe")]


@dataclass(frozen=True)
class Staged:
    """The replica with this rank's stages in its flat vector, where other stages' parameters are empty;
    its stages; the layout of the whole."""

    live: LiveReplica
    stages: list[Stage]
    whole: Layout
    seats: Seats


def staged(
    recipe: Recipe, strategy: Pipeline, mesh: Mesh, rank: int, device: torch.device
) -> Staged:
    """Build the replica, and let go of what other ranks have. ``strategy``: with every cut named."""
    module = recipe.build()
    whole, items = layout_of(module), chain_of(module)
    bounds = bounds_of(strategy, items)
    cuts = list(itertools.pairwise(bounds))
    stage_of = {
        id(tensor): stage
        for stage, (start, stop) in enumerate(cuts)
        for _, item in items[start:stop]
        for tensor in itertools.chain(item.parameters(), item.buffers())
    }
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    places = tuple(stage_of[id(tensors[segment.name])] % mesh.pipe for segment in whole.segments)
    seats = Seats(len(cuts), mesh, places)
    mine = seats.stages(rank)
    for parameter in module.parameters():
        if stage_of[id(parameter)] not in mine:
            parameter.data = parameter.data.new_empty((0, *parameter.shape[1:]))
    live = LiveReplica.around(recipe, FlatModule(module, device))
    return Staged(live, [Stage(items[slice(*cuts[s])], live) for s in mine], whole, seats)

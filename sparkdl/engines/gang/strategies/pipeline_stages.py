"""A replica of which a rank has some stages: the modules between two cuts, and no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.engines.gang.build_turn import Turn
from sparkdl.engines.gang.groups import Groups
from sparkdl.engines.gang.strategies.fsdp import cut_units
from sparkdl.engines.gang.strategies.tensor import parallelise
from sparkdl.model.flat import FlatModule, Layout, layout_of
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.chain import chain_of
from sparkdl.parallel.fsdp import units_of
from sparkdl.parallel.mesh import Mesh
from sparkdl.parallel.pipeline import bounds_of
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.parallel.trace import Items, TracedStage
from sparkdl.replica.compute import autocasting, to_tensors


class StageModule(nn.Module):
    """Some modules of the chain, one after another. ``live``: set before it is called. ``copies``: what
    comes in from another stage, where the first of them writes to it, as ``nn.ReLU(inplace=True)``
    does: to torch it is a leaf, which may not be written to."""

    def __init__(self, items: Items) -> None:
        super().__init__()
        self.chain = nn.ModuleList(item for _, item in items)
        self.live: LiveReplica | None = None
        self.copies = False

    def forward(self, *values: Any) -> Any:
        """What comes out; several values are the tuple that the module before put out."""
        assert self.live is not None
        if self.copies:
            values = tuple(tensor.clone() for tensor in values)
        value = values[0] if len(values) == 1 else values
        with autocasting(self.live):
            for item in self.chain:
                value = item(value)
        return value


@dataclass(frozen=True)
class StagePlacement:
    """Who has what: ``count`` stages, stage s at the ranks of place s % ``mesh.pipe``. ``places``: for
    each segment of the model's layout, the place of its stage."""

    count: int
    mesh: Mesh
    places: tuple[int, ...]

    def stages(self, rank: int) -> range:
        return range(self.mesh.place(rank, "pipe"), self.count, self.mesh.pipe)

    def numbers(self, rank: int) -> frozenset[int]:
        """Of the segments of its stages."""
        place = self.mesh.place(rank, "pipe")
        return frozenset(n for n, p in enumerate(self.places) if p == place)


@dataclass(frozen=True)
class PipelineBuild:
    """The replica with this rank's stages in its flat vector, where other stages' parameters are empty;
    its stages; the layout of the whole."""

    live: LiveReplica
    stages: list[StageModule]
    whole: Layout
    seats: StagePlacement


def staged(
    recipe: Recipe,
    module: nn.Module,
    parallel: ParallelPlan,
    groups: Groups,
    rank: int,
    spare: Batch,
    device: torch.device,
    turn: Turn,
) -> PipelineBuild:
    """Make the replica of ``module``, which has just been built, and let go of what other ranks have.
    ``parallel``: with every cut named."""
    strategy, mesh = parallel.pipeline, parallel.mesh
    assert strategy is not None
    whole = layout_of(module)
    items = chain_of(module, strategy.split, to_tensors(spare.inputs, torch.device("cpu")))
    units = [] if parallel.fsdp is None else units_of(module, parallel.fsdp.units)
    if parallel.tensor is not None:
        parallelise(recipe, module, parallel.tensor, groups.mesh("tensor"), spare, device, turn)
    cuts = list(itertools.pairwise(bounds_of(strategy, items)))
    stage_of = {
        id(tensor): stage
        for stage, (start, stop) in enumerate(cuts)
        for _, item in items[start:stop]
        for tensor in itertools.chain(item.parameters(), item.buffers())
    }
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    stages_of = [stage_of.get(id(tensors[segment.name]), 0) for segment in whole.segments]
    places = tuple(stage % mesh.pipe for stage in stages_of)
    seats = StagePlacement(len(cuts), mesh, places)
    mine = seats.stages(rank)
    for owner, name, parameter in _parameters(module):
        if stage_of.get(id(parameter), 0) not in mine:  # what is never called is of the first
            _empty(owner, name, parameter)
    stages = [StageModule(items[slice(*cuts[s])]) for s in mine]
    if parallel.fsdp is not None:
        for stage in stages:
            inside = {id(child) for child in stage.modules()}
            own = [unit for unit in units if id(unit) in inside]
            cut_units(own, stage, parallel, groups.mesh("shard"), recipe.policy)
            for piece in stage.chain:
                if isinstance(piece, TracedStage):
                    piece.hand_back()
    live = LiveReplica.around(recipe, FlatModule(module, device))
    for stage in stages:
        stage.live = live
    return PipelineBuild(live, stages, whole, seats)


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """In every place."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            yield child, name, parameter


def _empty(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Leave nothing of a parameter but its name and kind."""
    nothing = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype)
    if hasattr(parameter, "to_local"):  # it is in one place, and cannot be made another kind
        setattr(owner, name, nn.Parameter(nothing, parameter.requires_grad))
    else:
        parameter.data = nothing

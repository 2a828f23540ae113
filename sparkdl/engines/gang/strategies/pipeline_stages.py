"""Replicas of which a rank has only some pipeline stages: the modules between two cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.engines.gang.build_turn import Turn
from sparkdl.engines.gang.model_group import Groups
from sparkdl.engines.gang.rank_messages import receive, send
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
from sparkdl.replica.compute import autocasting, evaluating, to_tensors


class StageModule(nn.Module):
    """A sequence of modules of the chain: one pipeline stage.

    Attributes:
        live: The replica, which is set before the stage is called.
        copies: Whether the stage copies its inputs. That is necessary if its first module writes to
            them, as ``nn.ReLU(inplace=True)`` does: an input from another stage is a leaf to torch,
            and leaves must not be written to.
    """

    def __init__(self, items: Items) -> None:
        super().__init__()
        self.chain = nn.ModuleList(item for _, item in items)
        self.live: LiveReplica | None = None
        self.copies = False

    def forward(self, *values: Any) -> Any:
        """Return the output. Several arguments are the tuple that the previous stage has returned."""
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
    """The placement of pipeline stages and parameters on ranks.

    Attributes:
        count: The number of stages. Stage s is on the ranks with place s % ``mesh.pipe``.
        mesh: The arrangement of the ranks.
        places: For each segment of the model's layout, the place of its stage.
    """

    count: int
    mesh: Mesh
    places: tuple[int, ...]

    def stages(self, rank: int) -> range:
        return range(self.mesh.place(rank, "pipe"), self.count, self.mesh.pipe)

    def numbers(self, rank: int) -> frozenset[int]:
        """Return the numbers of the segments in the stages of a rank."""
        place = self.mesh.place(rank, "pipe")
        return frozenset(n for n, p in enumerate(self.places) if p == place)


@dataclass(frozen=True)
class PipelineBuild:
    """The result of splitting a model into pipeline stages.

    Attributes:
        live: The replica with this rank's stages in its flat vector. The parameters of other stages
            are empty.
        stages: The stages of this rank.
        whole: The layout of the whole model.
        seats: The placement of all stages.
    """

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
    """Split a module into pipeline stages, and free what other ranks hold.

    Args:
        recipe: The recipe of the module.
        module: The module, which has just been built.
        parallel: The strategies, with every cut of the pipeline named.
        groups: The process groups of this rank.
        rank: This rank.
        spare: A few rows, with which the forward is traced and split layers are tried.
        device: The device of this rank.
        turn: The turn of this rank to build, which ends when layers are split.
    """
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
        if stage_of.get(id(parameter), 0) not in mine:  # the first stage has what is never called
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
    """Yield every parameter with each module and name that it has."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            yield child, name, parameter


def _empty(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Remove the values of a parameter, but keep its name and kind."""
    nothing = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype)
    if hasattr(parameter, "to_local"):  # a DTensor, whose data cannot become a plain tensor
        setattr(owner, name, nn.Parameter(nothing, parameter.requires_grad))
    else:
        parameter.data = nothing


class StageRelay:
    """The transfer of values through the pipeline stages in turn, for validation and to find shapes.

    If layers are split too, every stage is on several ranks, and values move between ranks with the
    same parts.

    Args:
        seats: The placement of the stages.
        stages: The stages of this rank, by number.
        rank: This rank.
        group: The process group of the ranks whose samples go through the same weights.
        live: The replica of this rank.
    """

    def __init__(
        self,
        seats: StagePlacement,
        stages: Mapping[int, StageModule],
        rank: int,
        group: dist.ProcessGroup | None,
        live: LiveReplica,
    ) -> None:
        mesh = seats.mesh
        self._seats, self._stages, self._rank = seats, stages, rank
        self._group, self._live = group, live
        self._ranks, self._column = mesh.model_group(rank), mesh.along(rank, "pipe")
        live.flat.module.forward = self._there_and_back

    def scored(
        self,
        counts: Sequence[int],
        score: Callable[[], Any],
        most: int,
        spare: tuple[torch.Tensor, ...],
    ) -> Any:
        """See :meth:`sparkdl.engines.gang.model_group.ModelGroup.scored`."""
        result = None
        for member in self._ranks:
            if member == self._rank:
                result = score()
            else:
                with evaluating(self._live.flat.module):
                    for _ in range(counts[member]):
                        self._passed(member, None)
        for _ in range(most - sum(counts[r] for r in self._ranks)):
            with evaluating(self._live.flat.module):
                self._passed(self._ranks[0], spare)
        return result

    def _there_and_back(self, *inputs: Any) -> Any:
        """Return the model's output for this rank's inputs."""
        return self._passed(self._rank, inputs)

    def _passed(self, source: int, value: Any) -> Any:
        """Send a value of rank ``source`` through all stages, and return the output on that rank."""
        mesh, column = self._seats.mesh, self._column
        for head in mesh.along(self._ranks[0], "tensor"):
            value = self.moved(value, source, head)
        before = column[0]
        for number in range(self._seats.count):
            here = column[number % len(column)]
            value = self.moved(value, before, here)
            if self._rank == here:
                value = (self._stages[number](*value),)
            before = here
        value = self.moved(value, mesh.along(source, "pipe")[-1], source)
        return value[0] if self._rank == source else None

    def moved(self, value: Any, source: int, to: int) -> Any:
        """Return the ``value`` of rank ``source`` on rank ``to``; other ranks return their argument."""
        if source == to or self._rank not in (source, to):
            return value
        device = self._live.device
        if self._rank == source:
            send(value, to, self._group, device)
            return value
        return receive(source, self._group, device)

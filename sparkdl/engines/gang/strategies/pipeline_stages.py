"""Replicas of which a rank has only some pipeline stages: the modules between two cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparkdl.engines.gang.rank_messages import receive, send
from sparkdl.model.live_replica import LiveReplica
from sparkdl.parallel.mesh import Mesh
from sparkdl.parallel.trace import Items
from sparkdl.replica.compute import autocasting, evaluating


class StageModule(nn.Module):
    """A sequence of modules of the chain: one pipeline stage.

    ``_copies`` says whether the stage copies its inputs. That is necessary if its first module writes
    to them, as ``nn.ReLU(inplace=True)`` does: an input from another stage is a leaf to torch, and
    leaves must not be written to.
    """

    def __init__(self, items: Items) -> None:
        super().__init__()
        self.chain = nn.ModuleList(item for _, item in items)
        self._live: LiveReplica | None = None
        self._copies = False

    def compute_as(self, live: LiveReplica) -> None:
        """Compute with the precision of the replica ``live``, before the stage is called."""
        self._live = live

    def forward(self, *values: Any) -> Any:
        """Return the output. Several arguments are the tuple that the previous stage has returned."""
        assert self._live is not None
        if self._copies:
            values = tuple(tensor.clone() for tensor in values)
        value = values[0] if len(values) == 1 else values
        with autocasting(self._live):
            for item in self.chain:
                value = item(value)
        return value

    def try_inputs(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the output. If the stage fails, let it copy its inputs from now on and try again."""
        try:
            return self(*inputs)
        except RuntimeError:
            if self._copies:
                raise
        self._copies = True
        return self(*inputs)


@dataclass(frozen=True)
class StagePlacement:
    """The placement of pipeline stages and parameters on ranks."""

    count: int  # stage s is on the ranks with place s % mesh.pipe
    mesh: Mesh
    places: tuple[int, ...]  # of the stage of each segment of the layout

    def stages(self, rank: int) -> range:
        return range(self.mesh.place(rank, "pipe"), self.count, self.mesh.pipe)

    def numbers(self, rank: int) -> frozenset[int]:
        """Return the numbers of the segments in the stages of a rank."""
        place = self.mesh.place(rank, "pipe")
        return frozenset(n for n, p in enumerate(self.places) if p == place)


@dataclass(frozen=True)
class PipelineBuild:
    """The result of splitting a model into pipeline stages."""

    live: LiveReplica  # parameters of other ranks' stages are empty
    stages: list[StageModule]
    placement: StagePlacement


class StageRelay:
    """The transfer of values through the pipeline stages in turn, for validation and to find shapes.

    If layers are split too, every stage is on several ranks, and values move between ranks with the
    same parts.
    """

    def __init__(
        self,
        placement: StagePlacement,
        stages: Mapping[int, StageModule],
        rank: int,
        group: dist.ProcessGroup | None,
        live: LiveReplica,
    ) -> None:
        mesh = placement.mesh
        self._placement, self._stages, self._rank = placement, stages, rank
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
        mesh, column = self._placement.mesh, self._column
        for head in mesh.along(self._ranks[0], "tensor"):
            value = self.moved(value, source, head)
        before = column[0]
        for number in range(self._placement.count):
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

"""A value's way through the stages of a pipeline and back, for validation: one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.engines.gang.rank_messages import receive, send
from sparkdl.engines.gang.strategies.pipeline_stages import StageModule, StagePlacement
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compute import evaluating


class StageRelay:
    """What rank ``rank`` does of it. ``stages``: its own, by number; ``group``: of the ranks whose
    samples go through the same weights. Where layers are cut too, every stage is on several ranks, and
    a value goes on between those with the same parts."""

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
        """The model's output for this rank's inputs."""
        return self._passed(self._rank, inputs)

    def _passed(self, source: int, value: Any) -> Any:
        """Through all stages, from rank ``source`` and back to it."""
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
        """``value`` of rank ``source`` at rank ``to``; elsewhere as it was."""
        if source == to or self._rank not in (source, to):
            return value
        device = self._live.device
        if self._rank == source:
            send(value, to, self._group, device)
            return value
        return receive(source, self._group, device)

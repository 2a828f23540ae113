"""Torch's schedules for the pipeline stages of a rank, for micro-batches of any size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from sparkdl.engines.gang.strategies.fsdp import let_go
from sparkdl.engines.gang.strategies.pipeline_stages import StageModule, StagePlacement, StageRelay
from sparkdl.model.live_replica import LiveReplica
from sparkdl.parallel.pipeline import Pipeline
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept

MAX_SCHEDULES = 8
"""The number of schedules, each for a number of rows and of micro-batches, that a rank caches."""
MAX_SHAPES = 64
Shapes: TypeAlias = list[tuple[int, tuple[Any, ...], tuple[Any, ...]]]
"""The number, the inputs and the outputs of each pipeline stage of a rank."""


class Schedules:
    """The schedules for the pipeline stages of this rank."""

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        placement: StagePlacement,
        strategy: Pipeline,
        members: Sequence[int],
        rank: int,
        pipe: dist.ProcessGroup | None,
        in_turn: StageRelay,
        live: LiveReplica,
        like: Sequence[torch.Tensor],
        loss: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> None:
        self._stages, self._placement, self._strategy = stages, placement, strategy
        self._members, self._rank, self._pipe = members, rank, pipe
        self._in_turn, self._live, self._like, self._loss = in_turn, live, like, loss
        self._made: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._known: OrderedDict[int, Shapes] = OrderedDict()

    def of(self, each: int, many: int) -> Any:
        """Return torch's schedule for ``many`` micro-batches of ``each`` rows."""
        key = each, many
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        placement, device = self._placement, self._live.device
        stages = [
            PipelineStage(
                self._stages[number],
                number,
                placement.count,
                device,
                input_args=inputs,
                output_args=outputs,
                group=self._pipe,
            )
            for number, inputs, outputs in self._shapes_of(each)
        ]
        how: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        early = self._strategy.schedule == "1f1b"
        if len(stages) == 1:
            single = Schedule1F1B if early and many >= placement.count else ScheduleGPipe
            made: Any = single(stages[0], many, **how)
        else:
            even = many % max(1, many // placement.mesh.pipe) == 0
            several = ScheduleInterleaved1F1B if early and even else ScheduleLoopedBFS
            made = several(stages, many, **how)  # type: ignore[arg-type]
        self._made[key] = made
        while len(self._made) > MAX_SCHEDULES:
            self._made.popitem(last=False)
        return made

    def prepare(self, sizes: set[int]) -> None:
        """Try micro-batches of these sizes, unless that was done before."""
        for size in sorted(sizes):
            self._shapes_of(size)

    def _shapes_of(self, rows: int) -> Shapes:
        """Return the cached result of :meth:`_shapes`."""
        if rows not in self._known:
            self._known[rows] = self._shapes(rows)
            while len(self._known) > MAX_SHAPES:
                self._known.popitem(last=False)
        return self._known[rows]

    def _shapes(self, rows: int) -> Shapes:
        """Return the number, the inputs and the outputs of each stage of this rank, for this many rows.

        Inputs and outputs are tensors without values. They are found by running the stage, which
        leaves no traces.
        """
        found = []
        # contiguous, as mini-batches are: some versions of torch compare the strides
        value: Any = tuple(t[:1].expand(rows, *t.shape[1:]).contiguous() for t in self._like)
        with buffers_kept(self._live.flat.module), seeded(0), torch.enable_grad():
            for number in range(self._placement.count):
                here = self._members[number % len(self._members)]
                if number:
                    before = self._members[(number - 1) % len(self._members)]
                    value = self._in_turn.moved(value, before, here)
                if self._rank == here:
                    inputs = tuple(map(self._made_up, value)) if number else value
                    outputs = as_tuple(self._stages[number].try_inputs(inputs))
                    value = tuple((tuple(t.shape), str(t.dtype), t.requires_grad) for t in outputs)
                    found.append((number, _bare(inputs), _bare(outputs)))
        for stage in self._stages.values():
            let_go(stage)
        return found

    def _made_up(self, known: tuple[tuple[int, ...], str, bool]) -> torch.Tensor:
        shape, dtype, requires_grad = known
        kind = getattr(torch, dtype.removeprefix("torch."))
        tensor = torch.zeros(shape, dtype=kind, device=self._live.device)
        return tensor.requires_grad_(requires_grad)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the output of a stage, one value or a tuple, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def _bare(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors with the same shapes and dtypes, but without values."""
    return tuple(
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta").requires_grad_(
            t.requires_grad
        )
        for t in tensors
    )

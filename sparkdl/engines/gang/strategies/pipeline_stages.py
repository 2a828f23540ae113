"""Replicas of which a rank has only some pipeline stages: the modules between two cuts.

Torch's schedules for the pipeline stages of a rank, for micro-batches of any size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from sparkdl.engines.gang.rank_messages import receive, send
from sparkdl.engines.gang.strategies.fsdp import let_go
from sparkdl.model.recipe import LiveReplica
from sparkdl.parallel.base import Mesh
from sparkdl.parallel.pipeline import Pipeline
from sparkdl.parallel.trace import Items
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import autocasting, buffers_kept, evaluating


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

"""One replica, one mini-batch: forward, loss, backward. Plain torch, no Spark."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from sparkdl.model.flat import local
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.loss import loss_of
from sparkdl.model.model_loss import called
from sparkdl.model.options import TrainingOptions
from sparkdl.process.determinism import seeded
from sparkdl.replica.division import Division
from sparkdl.replica.iteration import Clock
from sparkdl.slices.section import SparseRows


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of a batch as tensors on ``device``; signed integers of any width become int64.

    To a GPU they are copied from pinned memory, while this thread goes on.
    """
    here = [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    there = _copied(here, device) if device.type == "cuda" else [t.to(device) for t in here]
    return [
        tensor.long() if array.dtype.kind == "i" else tensor
        for array, tensor in zip(arrays, there, strict=True)
    ]


def _copied(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """On a GPU, by a stream of copies, beside what the GPU has still to do; what is computed with them
    waits for them there."""
    copies, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        found = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copies)
    for tensor in found:  # let go of, its memory is the copies' again, once it is computed with
        tensor.record_stream(computing)
    return found


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class MiniBatch:
    """Tensors of some samples: model inputs, labels, and the weight of each (None: all equal).

    ``masses``: what the loss takes of each sample, see :func:`sparkdl.model.loss.masses_of`.
    """

    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    weights: torch.Tensor | None = None
    masses: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def weight(self) -> float:
        """What this mini-batch counts for: its samples, each times its weight and its mass."""
        if self.weights is None:
            return float(len(self) if self.masses is None else self.masses.sum())
        weights = self.weights.double()
        return float(weights.sum() if self.masses is None else self.masses @ weights.cpu())

    def rows(self, cut: slice) -> MiniBatch:
        """Some of the samples."""
        return MiniBatch(
            [t[cut] for t in self.inputs],
            [t[cut] for t in self.targets],
            None if self.weights is None else self.weights[cut],
            None if self.masses is None else self.masses[cut],
        )

    def parts(self, count: int) -> Iterator[MiniBatch]:
        """Cut into ``count`` micro-batches of nearly equal size (fewer where there are fewer rows)."""
        rows = len(self)
        for i in range(min(count, rows)):
            yield self.rows(slice(rows * i // min(count, rows), rows * (i + 1) // min(count, rows)))


class Spare(MiniBatch):
    """A few rows for a pass in which a process has none of its own: they go through together, as some
    layers take no single row."""

    def parts(self, count: int) -> Iterator[MiniBatch]:
        """All of them, however many micro-batches others have."""
        yield self


def weigh(
    targets: Sequence[torch.Tensor], weights: torch.Tensor | None, policy: TrainingOptions
) -> torch.Tensor | None:
    """The weight of each sample: its own, times that of its class."""
    if policy.class_weights is None:
        return weights
    table = torch.tensor(policy.class_weights, dtype=torch.float64, device=targets[0].device)
    of_class = table[targets[0].clamp(0, len(table) - 1)]  # what is no class may be ignored
    return of_class if weights is None else weights.double() * of_class


Sink = Callable[[int, torch.Tensor], None]
"""Takes the number and the gradient of a parameter."""


class Passed(NamedTuple):
    """What a mini-batch came to: its mean loss, and what it counts for in the average."""

    loss: float
    weight: float


def forward_backward(
    replica: LiveReplica,
    batch: MiniBatch,
    seed: int,
    scale: float,
    clock: Clock,
    sink: Sink | None = None,
    share: float = 1.0,
    parts: int = 0,
    by_rows: bool = False,
) -> Passed:
    """Leave the gradient of the mini-batch's mean loss in the parameters' ``grad``; that mean.

    Random draws inside the model (dropout) follow ``seed``. ``scale`` multiplies the loss before
    backward, against underflow in fp16, and is taken out of the gradients again. With
    ``accumulate`` the mini-batch goes through in parts, and the gradients add up. ``sink`` takes each
    gradient as soon as it is complete; what it was not given stays in ``grad``. ``share``: what the
    gradient is to be multiplied by. ``parts``: go forward and backward that often at least, and leave
    out nothing, since other processes do so at the same time. ``by_rows``: see
    :class:`sparkdl.replica.division.Division`.
    """
    policy = replica.recipe.policy
    replica.train()
    replica.clear_gradients()
    total, values = batch.weight, list[tuple[torch.Tensor, float]]()
    cut = [(p, p.weight / total if total else 0.0) for p in batch.parts(policy.accumulate)]
    if not parts:
        cut = [(part, own) for part, own in cut if own]
    idle = max(0, parts - len(cut))
    division = Division(scale, share, total, by_rows)

    def take(number: int, gradient: torch.Tensor) -> None:
        clock.lap("backward")
        if sink is not None:
            undo = division.undo
            sink(number, gradient if undo == 1.0 else gradient.div_(undo))
        clock.lap("publish")

    with seeded(seed):
        for i, (part, own) in enumerate(cut):
            last = i == len(cut) - 1
            replica.give_gradients(take if sink is not None and last else None)
            try:
                with replica.apart() if replica.apart and not last else contextlib.nullcontext():
                    value, count = _loss(replica, part)
                    clock.lap("forward")
                    factor = division.factor(own, count)
                    goes_back = by_rows or count != 0
                    if goes_back:
                        (value if factor == 1.0 else value * factor).backward()
            finally:
                replica.give_gradients(None)
            if own and goes_back:
                values.append((value.detach(), own if count is None else 1.0))
            clock.lap("backward")
    if idle:
        _keep_pace(replica, cut[-1][0], idle)
    if division.undo != 1.0:
        with torch.no_grad():
            for _, parameter in replica.flat.parameters:
                if parameter.grad is not None:
                    local(parameter.grad).div_(division.undo)
    # a GPU is awaited here, and not before, unless its loss counts
    loss = sum((float(value) * own for value, own in values), 0.0)
    if division.counted is None:
        return Passed(loss, total)
    return Passed(loss / (division.counted or 1.0), division.counted)


def _keep_pace(replica: LiveReplica, part: MiniBatch, times: int) -> None:
    """Go forward and backward without effect: gradients of zero, buffers as they were."""
    with buffers_kept(replica.flat.module):
        for _ in range(times):
            (_loss(replica, part)[0] * 0.0).backward()


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """After the block they are as they were, also where forward puts others in their place."""
    kept = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    try:
        yield
    finally:
        for owner, name, buffer, content in kept:
            owner._buffers[name] = buffer
            if buffer is not None and content is not None:
                buffer.copy_(content)


def _loss(replica: LiveReplica, part: MiniBatch) -> tuple[torch.Tensor, float | None]:
    """The loss of a micro-batch, see :func:`sparkdl.model.loss.loss_of`."""
    with autocasting(replica):
        call = replica.recipe.signature.bound(replica.call)
        output = called(replica.loss, call, part.inputs, part.targets)
    return loss_of_output(replica, output, part)


def loss_of_output(
    replica: LiveReplica, output: object, part: MiniBatch
) -> tuple[torch.Tensor, float | None]:
    """Likewise, of what the model returned for ``part``."""
    with autocasting(replica):
        given = replica.recipe.signature.for_loss(replica.loss, output)
        return loss_of(replica.loss, given, part.targets, part.weights, part.masses)


_AS_IT_IS = contextlib.nullcontext()


def autocasting(replica: LiveReplica) -> AbstractContextManager[None]:
    """Lower precision inside the block where the policy asks for it; the weights stay as they are."""
    dtype = replica.recipe.policy.autocast_dtype
    return _AS_IT_IS if dtype is None else torch.autocast(replica.device.type, dtype=dtype)


@dataclass(frozen=True)
class Gradients:
    """By parameter number: dense gradients (None: none, or elsewhere), rows of sparse tables.

    ``written``: those that lie in the sections already; ``not_finite``: those of them with an inf or
    a NaN, or None where nobody has looked yet.
    """

    dense: list[torch.Tensor | None]
    tables: dict[int, SparseRows]
    written: frozenset[int] = frozenset()
    not_finite: frozenset[int] | None = None

    @property
    def absent(self) -> frozenset[int]:
        elsewhere = self.written | self.tables.keys()
        return frozenset(n for n, g in enumerate(self.dense) if g is None and n not in elsewhere)


@torch.no_grad()
def take_gradients(replica: LiveReplica) -> Gradients:
    """The gradients that backward left in the parameters, which let go of them."""
    dense: list[torch.Tensor | None] = []
    tables: dict[int, SparseRows] = {}
    for number, (segment, parameter) in enumerate(replica.flat.parameters):
        gradient = None if parameter.grad is None else local(parameter.grad)
        if gradient is None:
            dense.append(None)
        elif segment.sparse:
            dense.append(None)
            tables[number] = _rows(gradient)
        else:
            dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
    replica.clear_gradients()
    return Gradients(dense, tables)


def _rows(gradient: torch.Tensor) -> SparseRows:
    """Of a table's gradient: the touched rows (ascending) and their values, on the CPU."""
    if not gradient.is_sparse:  # the table is used densely elsewhere in the model too
        return torch.arange(len(gradient)), gradient.cpu()
    gradient = gradient.coalesce()
    return gradient.indices()[0].cpu(), gradient.values().cpu()


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """The module in evaluation mode and without gradients inside the block. Not in inference mode:
    what a model keeps of its passes would be of no use in training afterwards."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield module
    finally:
        module.train(was_training)

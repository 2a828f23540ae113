"""One replica, one mini-batch: forward, loss, backward. Plain torch, no Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from sparkdl.model.layout import local, one_place_each
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.loss import loss_of
from sparkdl.model.preparation import modes_kept
from sparkdl.model.step import named_losses
from sparkdl.process.determinism import seeded
from sparkdl.replica.early_stop import EarlyStop
from sparkdl.replica.iteration import Clock, PassedParts
from sparkdl.replica.mini_batch import MiniBatch


class Spare(MiniBatch):
    """A few rows for a pass of a process that has none itself. They are not divided, because some
    layers reject a single row."""

    def parts(self, count: int) -> Iterator[MiniBatch]:
        """Yield all rows at once, however many micro-batches others have."""
        yield self


Losses = Mapping[str, tuple[float, float]]
"""The type of the named losses of a step: sum and count by name."""


def added_up(many: Iterable[Losses]) -> Losses:
    """Return the sums and counts of the losses over several mini-batches, by name."""
    result: dict[str, tuple[float, float]] = {}
    for losses in many:
        for name, (total, count) in losses.items():
            before = result.get(name, (0.0, 0.0))
            result[name] = before[0] + total, before[1] + count
    return result


Sink = Callable[[int, torch.Tensor], None]
"""The type of a function that takes the number and the gradient of a parameter."""


class Passed(NamedTuple):
    """The result of a mini-batch: its mean loss, its weight in the average, and named losses."""

    loss: float
    weight: float
    losses: Losses


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
    stops: EarlyStop | None = None,
) -> Passed:
    """Compute the gradient of the mini-batch's mean loss, and leave it in the parameters' ``grad``.

    With ``accumulate`` the mini-batch goes through in micro-batches, and the gradients add up.
    ``scale`` multiplies the loss before backward, and the gradients are divided by it again.
    ``sink`` takes each dense gradient as soon as it is complete; others stay in ``grad``. ``parts``
    is the least number of passes; if it is not 0, no part is left out, because other processes make
    their passes at the same time.
    """
    options = replica.recipe.options
    replica.train()
    replica.clear_gradients()
    total, values = batch.weight, list[tuple[torch.Tensor, float]]()
    named: list[dict[str, tuple[torch.Tensor, float]]] = []
    cut = [(p, p.weight / total if total else 0.0) for p in batch.parts(options.accumulate)]
    if not parts:
        cut = [(part, own) for part, own in cut if own]
    idle, left = max(0, parts - len(cut)), list[tuple[MiniBatch, float]]()
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
                    value, count, told = _loss(replica, part)
                    clock.lap("forward")
                    factor = division.factor(own, count)
                    goes_back = by_rows or count != 0
                    if goes_back:
                        (value if factor == 1.0 else value * factor).backward()
            finally:
                replica.give_gradients(None)
            if own and goes_back:
                values.append((value.detach(), own if count is None else 1.0))
            if own:
                named.append(told)
            clock.lap("backward")
            if stops is not None and not last and stops(i + 1):
                left = cut[i + 1 :]
                division.leave_out_rest(sum(own for _, own in cut[: i + 1]))
                break
    if idle:
        _keep_pace(replica, cut[-1][0], idle)
    if division.undo != 1.0:
        with torch.no_grad():
            for _, parameter in replica.flat.parameters:
                if parameter.grad is not None:
                    local(parameter.grad).div_(division.undo)
    # the first wait for a GPU is here, unless the loss returns a count
    loss = sum((float(value) * own for value, own in values), 0.0)
    losses = added_up({name: (float(s), c) for name, (s, c) in told.items()} for told in named)
    if stops is not None:
        missed = sum(len(part) for part, _ in left)
        stops.finish(PassedParts(len(cut) - len(left), len(cut), missed))
    if division.counted is None:
        return Passed(loss / division.done, total * division.done, losses)
    return Passed(loss / (division.counted or 1.0), division.counted, losses)


def _keep_pace(replica: LiveReplica, part: MiniBatch, times: int) -> None:
    """Run forward and backward without effect: gradients of zero, buffers unchanged."""
    with buffers_kept(replica.flat.module):
        for _ in range(times):
            (_loss(replica, part)[0] * 0.0).backward()


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore all buffers after the block, also those that forward replaces with other tensors."""
    places = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    # torch lets nobody write to an expanded buffer, so its content stays
    written = [buffer for _, _, buffer in places if buffer is not None and one_place_each(buffer)]
    contents = [buffer.clone() for buffer in written]
    try:
        yield
    finally:
        for owner, name, buffer in places:
            owner._buffers[name] = buffer
        for buffer, content in zip(written, contents, strict=True):
            buffer.copy_(content)


def _loss(
    replica: LiveReplica, part: MiniBatch
) -> tuple[torch.Tensor, float | None, dict[str, tuple[torch.Tensor, float]]]:
    """Return the loss of a micro-batch, see :func:`sparkdl.model.loss.loss_of`, and named losses."""
    signature = replica.recipe.signature
    with autocasting(replica):
        output = signature.call_for_loss(replica.loss, replica.call, part.inputs, part.targets)
    return *loss_of_output(replica, output, part), named_losses(output, part.weight)


def loss_of_output(
    replica: LiveReplica, output: object, part: MiniBatch
) -> tuple[torch.Tensor, float | None]:
    """Return the loss for an output of the model, see :func:`sparkdl.model.loss.loss_of`."""
    with autocasting(replica):
        given = replica.recipe.signature.for_loss(replica.loss, output)
        return loss_of(replica.loss, given, part.targets, part.weights, part.masses)


_AS_IT_IS = contextlib.nullcontext()


def autocasting(replica: LiveReplica) -> AbstractContextManager[None]:
    """Return a context with lower precision, if the options ask for it. The weights are not
    converted."""
    dtype = replica.recipe.options.autocast_dtype
    return _AS_IT_IS if dtype is None else torch.autocast(replica.device.type, dtype=dtype)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[nn.Module]:
    """Put the module in evaluation mode, without gradients, inside the block.

    This is not inference mode: tensors that a model caches in a pass would be unusable in training
    afterwards.
    """
    with modes_kept(module), torch.no_grad():
        yield module.eval()


@dataclass
class Division:
    """The factors of losses before backward, and the divisor of gradients afterwards.

    [Note: sums are divided twice] If a loss returns ``(sum, count)``, its count is known after its
    forward pass, and the count of all parts (micro-batches) after the last part's forward pass. So
    the sum of each part is divided by the count of the first part before backward, which keeps
    gradients as large as those of a mean, for fp16. The gradients are then divided by ``scale`` and
    by the ratio of the count of all parts to that of the first. In a gang (``by_rows``) the
    gradients of all ranks are summed while they are computed. There, sums are divided by the rows,
    as if they were means over the rows. The sum over the ranks is multiplied by rows / count before
    it is clipped; the ranks exchange these numbers after the pass.
    """

    scale: float
    share: float
    rows: float
    by_rows: bool
    counted: float | None = None  # the count of the parts so far; None: the loss returns means
    unit: float = 0.0
    done: float = 1.0  # the share of the rows whose parts were not left out

    def factor(self, own: float, count: float | None) -> float:
        """Return the factor of the loss of the next part.

        ``own`` is the part's share of the rows' mean; ``count`` is the count of a sum, or None for
        a mean.
        """
        if count is None:
            return own * self.share * self.scale
        self.counted, self.unit = count + (self.counted or 0.0), self.unit or count
        if self.by_rows:
            return self.share * self.scale / (self.rows or 1.0)
        return self.scale / (self.unit or 1.0)

    def leave_out_rest(self, done: float) -> None:
        """Note that only parts with the share ``done`` of the rows take part."""
        self.done = done

    @property
    def undo(self) -> float:
        """Return the divisor of gradients. It is valid once the last part has passed forward."""
        if self.counted is None or self.by_rows or not self.unit:
            return self.scale * self.done
        return self.scale * (self.counted / self.unit)

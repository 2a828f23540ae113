"""One replica, one mini-batch: forward, loss, backward. Plain torch, no Spark.

The tensors of some samples, on a replica's device. Plain torch, no Spark.

Passes that all ranks of a gang make at the same time.

torch communicates between ranks during a pass. So a rank without samples goes forward and backward
when the others do, with rows that count for nothing. A step can ask for the rows of all ranks, for
losses in which the rows of the global batch meet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from sparkdl.data.ragged import RowLengths
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import local, one_place_each
from sparkdl.model.loss import loss_of, named_losses
from sparkdl.model.preparation import modes_kept
from sparkdl.model.recipe import LiveReplica
from sparkdl.process.determinism import seeded
from sparkdl.replica.iteration import Clock, EarlyStop, PassedParts

CPU = torch.device("cpu")


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device = CPU) -> list[torch.Tensor]:
    """Return the arrays of a batch as tensors on ``device``; signed integers of any width become
    int64.

    They are copied to a GPU from pinned memory, while this thread continues.
    """
    here = [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    there = _copied(here, device) if device.type == "cuda" else [t.to(device) for t in here]
    return [
        tensor.long() if array.dtype.kind == "i" else tensor
        for array, tensor in zip(arrays, there, strict=True)
    ]


def _copied(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors to a GPU in a stream of copies, which overlaps with the GPU's pending work.

    Work that is launched afterwards waits on the GPU for the copies.
    """
    copies, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        found = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copies)
    for tensor in found:  # its memory returns to the copy stream only after the computation
        tensor.record_stream(computing)
    return found


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class MiniBatch:
    """The tensors of some samples."""

    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    weights: torch.Tensor | None = None  # of each sample; None: all are equal
    masses: torch.Tensor | None = None  # see sparkdl.model.loss.masses_of
    lengths: Sequence[RowLengths | None] = ()  # see sparkdl.data.batches.Batch.lengths

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def weight(self) -> float:
        """Return the weight of this mini-batch: the sum over its samples of weight times mass."""
        if self.weights is None:
            return float(len(self) if self.masses is None else self.masses.sum())
        weights = self.weights.double()
        return float(weights.sum() if self.masses is None else self.masses @ weights.cpu())

    def rows(self, cut: slice | np.ndarray) -> MiniBatch:
        """Return some of the samples, padded to the longest of them."""
        lengths = [None if known is None else known.of_rows(cut) for known in self.lengths]
        tensors = [
            tensor[cut] if known is None else _shortened(tensor[cut], known)
            for tensor, known in itertools.zip_longest([*self.inputs, *self.targets], lengths)
        ]
        return MiniBatch(
            tensors[: len(self.inputs)],
            tensors[len(self.inputs) :],
            None if self.weights is None else self.weights[cut],
            None if self.masses is None else self.masses[cut],
            lengths,
        )

    def parts(self, count: int) -> Iterator[MiniBatch]:
        """Yield up to ``count`` micro-batches of nearly equal size, none of them empty."""
        rows = len(self)
        for i in range(min(count, rows)):
            yield self.rows(slice(rows * i // min(count, rows), rows * (i + 1) // min(count, rows)))


def _shortened(tensor: torch.Tensor, lengths: RowLengths) -> torch.Tensor:
    """Return padded rows without the columns that are padding in all of them."""
    return tensor[:, lengths.places(tensor.shape[1])].contiguous()


def weigh(
    targets: Sequence[torch.Tensor], weights: torch.Tensor | None, options: TrainingOptions
) -> torch.Tensor | None:
    """Return the weight of each sample: its own times that of its class, the first label."""
    if options.class_weights is None:
        return weights
    table = torch.tensor(options.class_weights, dtype=torch.float64, device=targets[0].device)
    # clamped, because a label that is no class may be one that the loss ignores
    of_class = table[targets[0].clamp(0, len(table) - 1)]
    return of_class if weights is None else weights.double() * of_class


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
    their passes at the same time, but one without weight has no effect.
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
            apart = replica.apart() if replica.apart and not last else contextlib.nullcontext()
            unseen = contextlib.nullcontext() if own else buffers_kept(replica.flat.module)
            try:
                with apart, unseen:
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


_idle = False


def idle() -> bool:
    """Return whether the current pass counts for nothing."""
    return _idle


@contextlib.contextmanager
def padding_pass(idle: bool = True) -> Iterator[None]:
    """Mark the passes inside the block as counting for nothing, if ``idle``."""
    global _idle
    before, _idle = _idle, idle
    try:
        yield
    finally:
        _idle = before


_together = False


@contextlib.contextmanager
def passes_together(yes: bool) -> Iterator[None]:
    """Mark that inside the block, if ``yes``, all ranks make the same pass at the same time."""
    global _together
    before, _together = _together, yes
    try:
        yield
    finally:
        _together = before


def all_rows(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the rows that all ranks of a gang have of a tensor, and the place of this rank's first.

    It is for a step in :class:`sparkdl.PerReplica`, such as a contrastive loss: each rank computes
    the mean loss of its own rows, against those of all. The gradient is that of the mean over the
    global batch. In engines other than a gang, in validations, and with ``accumulate``,
    ``compression``, DiLoCo or gossip, there are only the replica's own rows.

    Args:
        rows: A tensor whose first dimension is the rows of the batch.
    """
    if not _together:
        return rows, 0
    own = 0 if idle() else len(rows)
    mine = torch.tensor([own], device=rows.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    counts = [int(count) for count in found]
    everything: torch.Tensor = _Gathered.apply(rows, counts)
    if idle():  # rows that do not count are nobody's but this rank's
        return torch.cat([everything, rows]), len(everything)
    return everything, sum(counts[: dist.get_rank()])


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, in rank order; backward sums the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.counts, ctx.shape = counts, rows.shape
        rank, longest = dist.get_rank(), max(counts)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: counts[rank]] = rows[: counts[rank]]
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        summed, rank = gradient.contiguous().clone(), dist.get_rank()
        dist.all_reduce(summed)
        first, count = sum(ctx.counts[:rank]), ctx.counts[rank]
        own = summed.new_zeros(ctx.shape)
        own[:count] = summed[first : first + count]
        return own, None

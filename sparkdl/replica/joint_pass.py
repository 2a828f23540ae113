"""Passes that all ranks of a gang make at the same time.

torch communicates between ranks during a pass. So a rank without samples goes forward and backward
when the others do, with rows that count for nothing. A step can ask for the rows of all ranks, for
losses in which the rows of the global batch meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

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

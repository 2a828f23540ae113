"""Sums over ranks in one round of messages or two, where Gloo carries them.

[Note: sums in one round] Gloo sums around a ring, piece by piece, and scatters sums as the parts of one
that is made everywhere: one message waits for another, and each wakes a thread of a rank that
computes. Here every rank sends each other one what that needs, all at once, and adds up what comes.
No more bytes travel than around a ring: for a scattered sum each of N ranks sends P (N - 1) / N, half
of what Gloo has it send, and for a sum on all twice that. Values are added in the order of ranks, those
of 16 bits in float32, and rounded once. NCCL does better by itself: what is on GPUs is left to torch.
So are groups of more ranks than this was measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_torchs = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name
MOST_RANKS, MOST_BYTES = 4, 3 << 20
"""Each rank speaks to all others at once: measured up to so many, and for a sum on all up to so large a
tensor, see docs/internals/engine-notes.md."""


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum over the ranks of ``group``, in place: a contiguous tensor of floating-point numbers."""
    size = dist.get_world_size(group)
    if not suits(tensor, size) or tensor.nbytes > MOST_BYTES:
        dist.all_reduce(tensor, group=group)
        return
    flat, rank = tensor.view(-1), dist.get_rank(group)
    if size == 2:
        _add(_of_all([flat, flat], group), flat)
        return
    parts = flat.tensor_split(size)
    _add(_of_all(parts, group), parts[rank])
    exchange_all([parts[rank]] * size, parts, group)


def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Sum ``tensor`` over the ranks of ``group``; ``output`` gets this rank's part of N equal ones."""
    size = dist.get_world_size(group)
    if suits(tensor, size):
        _add(_of_all(tensor.view(-1).chunk(size), group), output.view(-1))
    else:
        _torchs(output, tensor, group=group)


def suits(tensor: torch.Tensor, size: int) -> bool:
    """Whether messages of our own are faster than torch's collective."""
    return tensor.device.type == "cpu" and 1 < size <= MOST_RANKS and tensor.numel() >= size


def exchange_all(
    parts: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """``parts[r]`` to rank r of ``group``, from all to all; what rank r sends here to ``arriving[r]``.
    Nothing travels that is empty, or a rank's own."""
    rank, size = dist.get_rank(group), len(parts)
    under_way = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        if parts[to].numel():
            under_way.append(dist.isend(parts[to], group=group, group_dst=to))
        if arriving[source].numel():
            under_way.append(dist.irecv(arriving[source], group=group, group_src=source))
    for work in under_way:
        assert work is not None
        work.wait()


def _of_all(
    parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> Sequence[torch.Tensor]:
    """This rank's part as each rank has it, by rank."""
    rank = dist.get_rank(group)
    arriving = [
        part if r == rank else torch.empty_like(parts[rank]) for r, part in enumerate(parts)
    ]
    exchange_all(parts, arriving, group)
    return arriving


def _add(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Their sum, from the first to the last, into ``output``, which may be one of them."""
    narrow = output.dtype.itemsize < 4
    if len(parts) == 2 and not narrow:
        torch.add(parts[0], parts[1], out=output)
        return
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total += part
    output.copy_(total)


class DirectReduceScatter:
    """For ``FSDPModule.set_custom_reduce_scatter``.

    ``nothing``: says whether what this rank sums now counts for nothing.
    """

    def __init__(self, nothing: Callable[[], bool] = lambda: False) -> None:
        self._nothing = nothing

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory of its own for each call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """A sum, which is there when this returns."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        if self._nothing():  # zero times what is not finite is not zero
            input_tensor.zero_()
        reduce_scatter(output_tensor, input_tensor, group)

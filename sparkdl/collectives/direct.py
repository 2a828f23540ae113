"""Sums over ranks in one or two rounds of messages, for groups that use Gloo.

[Note: sums in one round] Gloo sums around a ring, piece by piece, and computes a scattered sum as
parts of a sum on all ranks. One message waits for another, and each wakes a thread of a rank that
computes. Here every rank sends each other rank what that one needs, all at once, and adds up what
arrives. No more bytes are sent than around a ring. For a scattered sum of P bytes, each of N ranks
sends P (N - 1) / N, half of what it sends with Gloo, and for a sum on all ranks twice as much.
Values are added in rank order; 16-bit values are added in float32 and rounded once. NCCL does
better by itself, so GPU tensors are left to torch. So are groups of more ranks than this was
measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_torchs = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its newer name
MOST_RANKS, MOST_BYTES = 4, 3 << 20
"""The limits up to which sending to all other ranks at once was measured to be faster: the number of
ranks and, for a sum on all ranks, the bytes of the tensor. See docs/internals/engine-notes.md."""


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a contiguous floating-point tensor over the ranks of ``group``, in place."""
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
    """Sum a tensor over ranks and scatter the sum, in N equal parts."""
    size = dist.get_world_size(group)
    if suits(tensor, size):
        _add(_of_all(tensor.view(-1).chunk(size), group), output.view(-1))
    else:
        _torchs(output, tensor, group=group)


def suits(tensor: torch.Tensor, size: int) -> bool:
    """Return whether these messages are faster than torch's collective."""
    return tensor.device.type == "cpu" and 1 < size <= MOST_RANKS and tensor.numel() >= size


def exchange_all(
    parts: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send ``parts[r]`` to rank r, for all r, and receive ``arriving[r]`` from it.

    Empty tensors, and a rank's own, are not sent.
    """
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
    """Return this rank's part as each rank has it, by rank."""
    rank = dist.get_rank(group)
    arriving = [
        part if r == rank else torch.empty_like(parts[rank]) for r, part in enumerate(parts)
    ]
    exchange_all(parts, arriving, group)
    return arriving


def _add(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Write the sum of ``parts``, added in order, to ``output``, which may be one of them."""
    narrow = output.dtype.itemsize < 4
    if len(parts) == 2 and not narrow:
        torch.add(parts[0], parts[1], out=output)
        return
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total += part
    output.copy_(total)


class DirectReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``.

    ``nothing`` returns whether what this rank sums now has no weight.
    """

    def __init__(self, nothing: Callable[[], bool] = lambda: False) -> None:
        self._nothing = nothing

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate new memory for each call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Compute the sum, which is complete when this returns."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        if self._nothing():  # multiplying by zero would not do: zero times inf or NaN is NaN
            input_tensor.zero_()
        reduce_scatter(output_tensor, input_tensor, group)

"""Recursive halving and doubling: as few bytes as a ring, in a logarithmic number of steps.

In every step a rank exchanges blocks with a partner. *Halving* sends the half of the rank's blocks
that the partner's side will own, and sums what arrives for the other half, so the blocks get fewer:
a reduce-scatter. *Doubling* goes the same way back with finished blocks: an all-gather. One after
the other they are Rabenseifner's all-reduce. With a single root, the halves only travel away from
it (scatter) or towards it (gather): a scatter followed by doubling is van de Geijn's broadcast,
halving followed by a gather is Rabenseifner's reduce.

Partners need a power of two. With other numbers of ranks, each of the first ``p - power`` odd ranks
leaves its vector to the even rank before it, waits, and gets the result: up to two more steps of up
to ``n`` bytes. In reduce_scatter and all_gather the even rank then handles the blocks of both. This
is how MPICH does it [1, section 3], with the roles of even and odd ranks swapped, so that rank 0,
the root, always takes part.

[1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
MPICH", Int. J. High Performance Computing Applications 19(1), 2005.
[2] R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparkdl.collectives.link import Link, SubgroupLink

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""A function ``combine(into, received)`` that changes ``into`` to the sum of both, the maximum, ..."""


def even_bounds(length: int, blocks: int) -> list[int]:
    """Return the bounds of ``blocks`` blocks; the first ``length % blocks`` have one more element."""
    return [i * (length // blocks) + min(i, length % blocks) for i in range(blocks + 1)]


def power_below(size: int) -> int:
    """Return the largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


def all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """All-reduce by halving and doubling: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [2]"""
    fold(link, flat, combine)
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        halve(core, flat, bounds, combine)
        double(core, flat, bounds)
    unfold(link, flat)


def reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce by halving and a gather on rank 0: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [2]"""
    fold(link, flat, combine)
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        halve(core, flat, bounds, combine)
        gather(core, flat, bounds)


def broadcast(link: Link, flat: torch.Tensor) -> None:
    """Broadcast by a scatter and doubling: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [1]"""
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        scatter(core, flat, bounds)
        double(core, flat, bounds)
    unfold(link, flat)


def reduce_scatter(link: Link, flat: torch.Tensor, bounds: Sequence[int], combine: Combine) -> None:
    """Reduce-scatter by halving: ``log2 p`` steps, ``n (p - 1) / p`` bytes. [1]"""
    fold(link, flat, combine)
    if core := _core(link):
        halve(core, flat, _core_bounds(link, bounds), combine)
    if (pair := _pair(link)) is not None:
        theirs = flat[bounds[pair + 1] : bounds[pair + 2]]
        if link.rank == pair:
            link.send(theirs, pair + 1)
        else:
            link.receive(theirs, pair)


def all_gather(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """All-gather by doubling: ``log2 p`` steps, ``n (p - 1) / p`` bytes. [1]"""
    if (pair := _pair(link)) is not None:
        theirs = flat[bounds[pair + 1] : bounds[pair + 2]]
        if link.rank == pair:
            link.receive(theirs, pair + 1)
        else:
            link.send(theirs, pair)
    if core := _core(link):
        double(core, flat, _core_bounds(link, bounds))
    unfold(link, flat)


def halve(link: Link, flat: torch.Tensor, bounds: Sequence[int], combine: Combine) -> None:
    """Reduce-scatter among a power of two ranks, with partners at distance p/2, p/4, ..., 1."""
    low, high = 0, link.size
    while high - low > 1:
        half = (high - low) // 2
        lower, upper = (low, low + half), (low + half, high)
        mine, theirs, partner = (
            (lower, upper, link.rank + half)
            if link.rank < low + half
            else (upper, lower, link.rank - half)
        )
        keep = _span(flat, bounds, *mine)
        received = torch.empty_like(keep)
        link.exchange(_span(flat, bounds, *theirs), partner, received, partner)
        combine(keep, received)
        low, high = mine


def double(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """All-gather among a power of two ranks, with partners at distance 1, 2, ..., p/2."""
    width = 1
    while width < link.size:
        partner = link.rank ^ width
        low, other = link.rank // width * width, partner // width * width
        mine = _span(flat, bounds, low, low + width)
        link.exchange(mine, partner, _span(flat, bounds, other, other + width), partner)
        width *= 2


def scatter(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """Scatter from rank 0: each rank with several blocks sends the upper half of them."""
    width = link.size // 2
    while width:
        place = link.rank % (2 * width)
        if place == 0:
            upper = _span(flat, bounds, link.rank + width, link.rank + 2 * width)
            link.send(upper, link.rank + width)
        elif place == width:
            mine = _span(flat, bounds, link.rank, link.rank + width)
            link.receive(mine, link.rank - width)
        width //= 2


def gather(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """Gather on rank 0: :func:`scatter` backwards."""
    width = 1
    while width < link.size:
        place = link.rank % (2 * width)
        if place == 0:
            upper = _span(flat, bounds, link.rank + width, link.rank + 2 * width)
            link.receive(upper, link.rank + width)
        elif place == width:
            mine = _span(flat, bounds, link.rank, link.rank + width)
            link.send(mine, link.rank - width)
        width *= 2


def fold(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Send the vector of a pair's second rank to its first rank, which combines both."""
    if (pair := _pair(link)) is None:
        return
    if link.rank == pair:
        received = torch.empty_like(flat)
        link.receive(received, pair + 1)
        combine(flat, received)
    else:
        link.send(flat, pair)


def unfold(link: Link, flat: torch.Tensor) -> None:
    """Send the result from a pair's first rank to its second rank."""
    if (pair := _pair(link)) is None:
        return
    if link.rank == pair:
        link.send(flat, pair + 1)
    else:
        link.receive(flat, pair)


def _pair(link: Link) -> int | None:
    """Return the first rank of this rank's pair, or None if it takes part by itself."""
    even = link.rank // 2 * 2
    return even if even < 2 * (link.size - power_below(link.size)) else None


def _core_members(size: int) -> list[int]:
    pairs = size - power_below(size)
    return [*range(0, 2 * pairs, 2), *range(2 * pairs, size)]


def _core(link: Link) -> Link | None:
    """Return the link among the ranks that make up a power of two, or None on the others."""
    members = _core_members(link.size)
    return SubgroupLink(link, members) if link.rank in members else None


def _core_bounds(link: Link, bounds: Sequence[int]) -> list[int]:
    """Return the bounds of the core's blocks. A rank that stands for a pair has the blocks of both."""
    return [bounds[rank] for rank in _core_members(link.size)] + [bounds[-1]]


def _span(flat: torch.Tensor, bounds: Sequence[int], low: int, high: int) -> torch.Tensor:
    """Return blocks ``low`` up to but not including ``high``."""
    return flat[bounds[low] : bounds[high]]

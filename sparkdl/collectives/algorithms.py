"""Collectives written as sends and receives: what a library does, to be read and measured.

All ranks of a link call a function at the same time, with flat contiguous tensors, which it changes in
place:

=================  ================================  ===========================================
operation          before                            after
=================  ================================  ===========================================
broadcast          rank 0 has the vector             all ranks have it
reduce             each rank has a vector            rank 0 has the sum; others are overwritten
all_reduce         each rank has a vector            all ranks have the sum
reduce_scatter     each rank has a vector            rank ``i`` has block ``i`` of the sum
all_gather         rank ``i`` has block ``i``        all ranks have all blocks
=================  ================================  ===========================================

"Sum" stands for any commutative ``combine(into, received)``, which changes ``into``. The order of
combination depends only on the algorithm and the number of ranks, so the same inputs give the same
bits. Each element is combined on one rank and copied from there, so all ranks have the same bits.
``bounds`` are the ends of the blocks: block ``i`` is ``flat[bounds[i]:bounds[i + 1]]``. Blocks may
differ in size and be empty. The root is rank 0; :class:`~sparkdl.collectives.algorithms.SubgroupLink`
makes any rank the root.

The algorithms:

``linear``
    The root communicates with one rank after another.
``tree``
    A binomial tree, for broadcast and reduce of small vectors. [1, 2]
``ring``
    Blocks go around a ring, and every rank sends and receives in every step: all_gather,
    reduce_scatter, and all_reduce as both. No algorithm sends fewer bytes. [1, 2, 3] broadcast and
    reduce send the blocks down a chain, as a pipeline. [4]
``halving-doubling``
    As few bytes as the ring, in a logarithmic number of steps.

[1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
MPICH", Int. J. High Performance Computing Applications 19(1), 2005.
[2] E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation: Practice and Experience 19(13), 2007.
[3] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel and Distributed Computing 69(2), 2009.
[4] J. Watts, R. van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel Processing
Letters 5(2), 1995.
[5] R. Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.

In every step of the last a rank exchanges blocks with a partner. *Halving* sends the half of the
rank's blocks that the partner's side will own, and sums what arrives for the other half, so the blocks
get fewer: a reduce-scatter. *Doubling* goes the same way back with finished blocks: an all-gather. One
after the other they are Rabenseifner's all-reduce. With a single root, the halves only travel away from
it (scatter) or towards it (gather): a scatter followed by doubling is van de Geijn's broadcast, halving
followed by a gather is Rabenseifner's reduce.

Partners need a power of two. With other numbers of ranks, each of the first ``p - power`` odd ranks
leaves its vector to the even rank before it, waits, and gets the result: up to two more steps of up
to ``n`` bytes. In reduce_scatter and all_gather the even rank then handles the blocks of both. This
is how MPICH does it [1, section 3], with the roles of even and odd ranks swapped, so that rank 0,
the root, always takes part.

The costs follow the usual model of a network. A message of ``n`` bytes takes ``alpha + n * beta``
seconds between any two ranks. A rank sends one message and receives one at a time, and does both at
once. Summing ``n`` bytes into ``n`` others takes ``n * gamma``. This is the model of Thakur,
Rabenseifner and Gropp (2005) and of Chan et al. (2007), whose formulas these are, for any number of
ranks. They are exact if the vector divides evenly among the ranks.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

TAG = 1 << 30
"""The tag of the messages of collectives. Users' messages have smaller tags."""


class Sent(NamedTuple):
    """The number of messages and bytes that a rank has sent."""

    messages: int
    bytes: int


Buffer = torch.Tensor | None
"""The tensor that is sent or received; None stands for nothing."""


class Link(ABC):
    """The end of ``rank`` among ``size`` ranks, which are numbered from 0."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, out: Buffer, to: int | None, into: Buffer, source: int | None) -> None:
        """Send to one rank and, at the same time, receive from another. Return when both are done.

        The tensors are contiguous. Both ends know their sizes, so nothing is sent for an empty one.
        """

    def send(self, out: torch.Tensor, to: int) -> None:
        """Send only."""
        self.exchange(out, to, None, None)

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Receive only."""
        self.exchange(None, None, into, source)


class SubgroupLink(Link):
    """The link among a few ranks of ``link``, or among all of them in another order.

    Rank ``i`` here is ``members[i]`` there. So an algorithm that is written for root 0 can run for
    any root, and one that is written for a power of two can run on ranks that make up one.
    """

    def __init__(self, link: Link, members: Sequence[int]) -> None:
        self.link, self.members = link, members
        self.rank, self.size = members.index(link.rank), len(members)

    @classmethod
    def rooted(cls, link: Link, root: int) -> Link:
        """Return a link among all ranks with ``root`` as rank 0, and the others in ring order."""
        return cls(link, [(root + i) % link.size for i in range(link.size)]) if root else link

    def exchange(self, out: Buffer, to: int | None, into: Buffer, source: int | None) -> None:
        there = None if to is None else self.members[to]
        here = None if source is None else self.members[source]
        self.link.exchange(out, there, into, here)


class GroupLink(Link):
    """The link of a process group, through ``torch.distributed``'s isend and irecv.

    Both are passed as one batch. NCCL runs an exchange only in this way, and to Gloo it makes no
    difference.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = Sent(0, 0)

    def exchange(self, out: Buffer, to: int | None, into: Buffer, source: int | None) -> None:
        both = []
        if out is not None and to is not None and out.numel():
            both.append(dist.P2POp(dist.isend, out, group=self.group, tag=TAG, group_peer=to))
            self.sent = Sent(self.sent.messages + 1, self.sent.bytes + out.nbytes)
        if into is not None and source is not None and into.numel():
            both.append(dist.P2POp(dist.irecv, into, group=self.group, tag=TAG, group_peer=source))
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait()


Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""A function ``combine(into, received)`` that changes ``into`` to the sum of both, the maximum, ..."""


def even_bounds(length: int, blocks: int) -> list[int]:
    """Return the bounds of ``blocks`` blocks; the first ``length % blocks`` have one more element."""
    return [i * (length // blocks) + min(i, length % blocks) for i in range(blocks + 1)]


def power_below(size: int) -> int:
    """Return the largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


def all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """All-reduce by halving and doubling: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [5]"""
    _halved(link, flat, combine, double)
    unfold(link, flat)


def reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce by halving and a gather on rank 0: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [5]"""
    _halved(link, flat, combine, gather)


def _halved(link: Link, flat: torch.Tensor, combine: Combine, then: Callable[..., None]) -> None:
    fold(link, flat, combine)
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        halve(core, flat, bounds, combine)
        then(core, flat, bounds)


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


def linear_broadcast(link: Link, flat: torch.Tensor) -> None:
    """Broadcast in ``p - 1`` steps of ``n`` bytes, all from the root."""
    if link.rank:
        link.receive(flat, 0)
    else:
        for rank in range(1, link.size):
            link.send(flat, rank)


def linear_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce in ``p - 1`` steps of ``n`` bytes, all to the root, which combines in rank order."""
    if link.rank:
        link.send(flat, 0)
    else:
        received = torch.empty_like(flat)
        for rank in range(1, link.size):
            link.receive(received, rank)
            combine(flat, received)


def linear_all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Run a linear reduce, then a linear broadcast."""
    linear_reduce(link, flat, combine)
    linear_broadcast(link, flat)


def tree_broadcast(link: Link, flat: torch.Tensor) -> None:
    """Broadcast along a binomial tree: in each step, all ranks that have the vector send it.

    There are ``ceil(log2 p)`` steps of ``n`` bytes, in each of which the root sends.
    """
    for width in reversed(_widths(link.size)):
        place = link.rank % (2 * width)
        if place == 0 and link.rank + width < link.size:
            link.send(flat, link.rank + width)
        elif place == width:
            link.receive(flat, link.rank - width)


def tree_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce along the same tree backwards: half of the ranks send in the first step, and are done."""
    received = torch.empty_like(flat)
    for width in _widths(link.size):
        place = link.rank % (2 * width)
        if place == 0 and link.rank + width < link.size:
            link.receive(received, link.rank + width)
            combine(flat, received)
        elif place == width:
            link.send(flat, link.rank - width)


def tree_all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce up the tree and broadcast down again.

    Apart from halving-doubling this has the fewest steps, but it sends the most bytes.
    """
    tree_reduce(link, flat, combine)
    tree_broadcast(link, flat)


def ring_broadcast(link: Link, flat: torch.Tensor) -> None:
    """Broadcast ``p`` blocks down a chain, each of which is forwarded while the next one arrives.

    There are ``2 (p - 1)`` steps of ``n / p`` bytes. More and smaller blocks would suit long
    vectors better, but their number cannot be set here.
    """
    before = link.rank - 1 if link.rank else None
    behind = link.rank + 1 if link.rank + 1 < link.size else None
    _relay(link, flat, before, behind, None)


def ring_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce along the same chain backwards, and combine on every rank."""
    before = link.rank + 1 if link.rank + 1 < link.size else None
    behind = link.rank - 1 if link.rank else None
    _relay(link, flat, before, behind, combine)


def ring_all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce-scatter and all-gather on the ring: ``2 (p - 1)`` steps of ``n / p`` bytes."""
    bounds = even_bounds(flat.numel(), link.size)
    ring_reduce_scatter(link, flat, bounds, combine)
    ring_all_gather(link, flat, bounds)


def ring_reduce_scatter(
    link: Link, flat: torch.Tensor, bounds: Sequence[int], combine: Combine
) -> None:
    """Reduce-scatter on the ring: ``p - 1`` steps of ``n / p`` bytes.

    A rank combines its own values with the block that arrives and forwards it. A block starts at
    the rank after its owner, so a rank sends every block but its own.
    """
    blocks, behind, before = _ring(link, flat, bounds)
    for step in range(1, link.size):
        out, into = blocks[link.rank - step], blocks[link.rank - step - 1]
        received = torch.empty_like(into)
        link.exchange(out, behind, received, before)
        combine(into, received)


def ring_all_gather(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """All-gather on the ring: ``p - 1`` steps of ``n / p`` bytes.

    A rank forwards what it has received in the previous step.
    """
    blocks, behind, before = _ring(link, flat, bounds)
    for step in range(link.size - 1):
        out, into = blocks[link.rank - step], blocks[link.rank - step - 1]
        link.exchange(out, behind, into, before)


ALGORITHMS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "broadcast": {
        "linear": linear_broadcast,
        "tree": tree_broadcast,
        "ring": ring_broadcast,
        "halving-doubling": broadcast,
    },
    "reduce": {
        "linear": linear_reduce,
        "tree": tree_reduce,
        "ring": ring_reduce,
        "halving-doubling": reduce,
    },
    "all_reduce": {
        "linear": linear_all_reduce,
        "tree": tree_all_reduce,
        "ring": ring_all_reduce,
        "halving-doubling": all_reduce,
    },
    "reduce_scatter": {"ring": ring_reduce_scatter, "halving-doubling": reduce_scatter},
    "all_gather": {"ring": ring_all_gather, "halving-doubling": all_gather},
}
"""The algorithms for each operation. Their arguments are (link, flat), then the bounds if blocks have
owners, then ``combine`` if there is something to sum."""


def _widths(size: int) -> list[int]:
    """Return the distances in a binomial tree: the powers of two below ``size``."""
    return [1 << i for i in range((size - 1).bit_length())]


def _ring(
    link: Link, flat: torch.Tensor, bounds: Sequence[int]
) -> tuple[list[torch.Tensor], int, int]:
    """Return the blocks, and the ranks after and before this one."""
    blocks = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
    return blocks, (link.rank + 1) % link.size, (link.rank - 1) % link.size


def _relay(
    link: Link, flat: torch.Tensor, before: int | None, behind: int | None, combine: Combine | None
) -> None:
    """Receive blocks from ``before`` and forward each to ``behind`` while the next one arrives.

    ``before`` and ``behind`` are None at the ends of the chain.
    """
    ready: torch.Tensor | None = None
    for begin, end in itertools.pairwise(even_bounds(flat.numel(), link.size)):
        block = flat[begin:end]
        received = torch.empty_like(block) if combine else block
        link.exchange(ready, behind, received, before)
        if combine and before is not None:
            combine(block, received)
        ready = block
    link.exchange(ready, behind, None, None)


@dataclass(frozen=True)
class Terms:
    """The costs of the critical path."""

    steps: int  # messages, one after another
    volume: float  # their bytes, as a multiple of the vector's
    summed: float  # the bytes that are summed, likewise

    def __add__(self, then: Terms) -> Terms:
        return Terms(self.steps + then.steps, self.volume + then.volume, self.summed + then.summed)


def cost(
    algorithm: str,
    operation: str,
    nbytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
) -> float:
    """Return the seconds of an operation on a whole vector of ``nbytes``.

    A message takes ``alpha`` seconds, a byte ``beta`` to send and ``gamma`` to sum.
    """
    found = terms(algorithm, operation, ranks)
    return found.steps * alpha + nbytes * (found.volume * beta + found.summed * gamma)


def terms(algorithm: str, operation: str, ranks: int) -> Terms:
    """Return the factors of alpha, ``n * beta`` and ``n * gamma``. See :func:`cost`."""
    ALGORITHMS[operation][algorithm]
    if ranks == 1:
        return Terms(0, 0.0, 0.0)
    if algorithm == "halving-doubling":
        return _halving_doubling(operation, ranks)
    if operation == "all_reduce":
        parts = ("reduce_scatter", "all_gather") if algorithm == "ring" else ("reduce", "broadcast")
        first, then = (terms(algorithm, part, ranks) for part in parts)
        return first + then
    sums = operation in ("reduce", "reduce_scatter")
    if algorithm == "ring":
        chain = operation in ("reduce", "broadcast")
        steps = 2 * (ranks - 1) if chain else ranks - 1
        return Terms(steps, steps / ranks, sums * steps / ranks)
    steps = ranks - 1 if algorithm == "linear" else (ranks - 1).bit_length()
    return Terms(steps, float(steps), float(sums * steps))


def _halving_doubling(operation: str, ranks: int) -> Terms:
    """Return the costs of the core, a power of two, and of the steps before and after it.

    With reduce_scatter and all_gather, the first ranks of the core stand for two blocks each. In
    the step at distance ``width`` the longest message then has those of the first ``width`` ranks.
    """
    power = power_below(ranks)
    pairs, levels = ranks - power, power.bit_length() - 1
    whole, fold = Terms(1, 1.0, 0.0), Terms(1, 1.0, 1.0)
    if operation in ("reduce_scatter", "all_gather"):
        widths = [1 << level for level in range(levels)]
        share = sum(width + min(width, pairs) for width in widths) / ranks
        block = Terms(1, 1 / ranks, 0.0)
        if operation == "all_gather":
            core, extra = Terms(levels, share, 0.0), block + whole
        else:
            core, extra = Terms(levels, share, share), fold + block
    else:
        share = (power - 1) / power
        one_way, summing = Terms(levels, share, 0.0), Terms(levels, share, share)
        core, extra = {
            "broadcast": (one_way + one_way, whole),
            "reduce": (summing + one_way, fold),
            "all_reduce": (summing + one_way, fold + whole),
        }[operation]
    return core + extra if pairs else core

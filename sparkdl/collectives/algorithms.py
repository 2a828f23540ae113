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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
Part = Callable[[int], torch.Tensor]
"""A function from a rank to the part of the vector that travels to or from it."""


def even_bounds(length: int, blocks: int) -> list[int]:
    """Return the bounds of ``blocks`` blocks; the first ``length % blocks`` have one more element."""
    return [i * (length // blocks) + min(i, length % blocks) for i in range(blocks + 1)]


def power_below(size: int) -> int:
    """Return the largest power of two up to ``size``."""
    return 1 << (size.bit_length() - 1)


def star(size: int) -> list[tuple[int, int]]:
    """Return the edges from the root to every other rank, as (nearer the root, further from it)."""
    return [(0, rank) for rank in range(1, size)]


def tree(size: int) -> list[tuple[int, int]]:
    """Return the edges of a binomial tree, leaves first: in each step half of the ranks are done."""
    widths = [1 << i for i in range((size - 1).bit_length())]
    return [(near, near + width) for width in widths for near in range(0, size - width, 2 * width)]


def pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks that take part as one, so that a power of two takes part."""
    return [(even, even + 1) for even in range(0, 2 * (size - power_below(size)), 2)]


def down(link: Link, edges: Iterable[tuple[int, int]], part: Part) -> None:
    """Send along edges away from the root, to each rank its part."""
    for near, far in edges:
        if link.rank == near:
            link.send(part(far), far)
        elif link.rank == far:
            link.receive(part(far), near)


def up(
    link: Link, edges: Iterable[tuple[int, int]], part: Part, combine: Combine | None = None
) -> None:
    """Send along edges towards the root, from each rank its part, which is combined there or stored."""
    for near, far in edges:
        if link.rank == far:
            link.send(part(far), near)
        elif link.rank == near:
            place = part(far)
            received = torch.empty_like(place) if combine else place
            link.receive(received, far)
            if combine:
                combine(place, received)


def rooted(
    towards: Callable[[int], list[tuple[int, int]]], away: Callable[[int], list[tuple[int, int]]]
) -> dict[str, Callable[..., None]]:
    """Return the operations that send the whole vector along the edges of a tree in each step.

    With a star they take ``p - 1`` steps of ``n`` bytes, and the root combines in rank order. With a
    binomial tree they take ``ceil(log2 p)``: apart from halving-doubling its all_reduce has the fewest
    steps, but it sends the most bytes.
    """

    def broadcast(link: Link, flat: torch.Tensor) -> None:
        down(link, away(link.size), lambda _: flat)

    def reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
        up(link, towards(link.size), lambda _: flat, combine)

    def all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
        reduce(link, flat, combine)
        broadcast(link, flat)

    return {"broadcast": broadcast, "reduce": reduce, "all_reduce": all_reduce}


def all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """All-reduce by halving and doubling: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [5]"""
    up(link, pairs(link.size), lambda _: flat, combine)
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        halve(core, flat, bounds, combine)
        double(core, flat, bounds)
    down(link, pairs(link.size), lambda _: flat)


def reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce by halving and a gather on rank 0: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [5]"""
    up(link, pairs(link.size), lambda _: flat, combine)
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        halve(core, flat, bounds, combine)
        up(core, tree(core.size), _subtrees(flat, bounds))


def broadcast(link: Link, flat: torch.Tensor) -> None:
    """Broadcast by a scatter and doubling: ``2 log2 p`` steps, ``2 n (p - 1) / p`` bytes. [1]"""
    if core := _core(link):
        bounds = even_bounds(flat.numel(), core.size)
        down(core, reversed(tree(core.size)), _subtrees(flat, bounds))
        double(core, flat, bounds)
    down(link, pairs(link.size), lambda _: flat)


def reduce_scatter(link: Link, flat: torch.Tensor, bounds: Sequence[int], combine: Combine) -> None:
    """Reduce-scatter by halving: ``log2 p`` steps, ``n (p - 1) / p`` bytes. [1]"""
    up(link, pairs(link.size), lambda _: flat, combine)
    if core := _core(link):
        halve(core, flat, _core_bounds(link, bounds), combine)
    down(link, pairs(link.size), lambda far: _span(flat, bounds, far, 1))


def all_gather(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """All-gather by doubling: ``log2 p`` steps, ``n (p - 1) / p`` bytes. [1]"""
    up(link, pairs(link.size), lambda far: _span(flat, bounds, far, 1))
    if core := _core(link):
        double(core, flat, _core_bounds(link, bounds))
    down(link, pairs(link.size), lambda _: flat)


def halve(link: Link, flat: torch.Tensor, bounds: Sequence[int], combine: Combine) -> None:
    """Reduce-scatter among a power of two ranks, with partners at distance p/2, p/4, ..., 1."""
    for partner, mine, theirs in reversed(_partners(link, flat, bounds)):
        received = torch.empty_like(mine)
        link.exchange(theirs, partner, received, partner)
        combine(mine, received)


def double(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """All-gather among a power of two ranks, with partners at distance 1, 2, ..., p/2."""
    for partner, mine, theirs in _partners(link, flat, bounds):
        link.exchange(mine, partner, theirs, partner)


def _partners(
    link: Link, flat: torch.Tensor, bounds: Sequence[int]
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return the partner at each distance, and the blocks of this rank's side and of the other's."""
    widths = [1 << i for i in range(link.size.bit_length() - 1)]
    return [
        (
            link.rank ^ width,
            _span(flat, bounds, link.rank // width * width, width),
            _span(flat, bounds, (link.rank ^ width) // width * width, width),
        )
        for width in widths
    ]


def _subtrees(flat: torch.Tensor, bounds: Sequence[int]) -> Part:
    """Return the function to the blocks of a rank of :func:`tree` and of all ranks behind it."""
    return lambda rank: _span(flat, bounds, rank, rank & -rank)


def _core_members(size: int) -> list[int]:
    seconds = {second for _, second in pairs(size)}
    return [rank for rank in range(size) if rank not in seconds]


def _core(link: Link) -> Link | None:
    """Return the link among the ranks that make up a power of two, or None on the others."""
    members = _core_members(link.size)
    return SubgroupLink(link, members) if link.rank in members else None


def _core_bounds(link: Link, bounds: Sequence[int]) -> list[int]:
    """Return the bounds of the core's blocks. A rank that stands for a pair has the blocks of both."""
    return [bounds[rank] for rank in _core_members(link.size)] + [bounds[-1]]


def _span(flat: torch.Tensor, bounds: Sequence[int], low: int, count: int) -> torch.Tensor:
    return flat[bounds[low] : bounds[low + count]]


def ring_broadcast(link: Link, flat: torch.Tensor) -> None:
    """Broadcast ``p`` blocks down a chain, each of which is forwarded while the next one arrives.

    There are ``2 (p - 1)`` steps of ``n / p`` bytes. More and smaller blocks would suit long
    vectors better, but their number cannot be set here.
    """
    _relay(link, flat, 1, None)


def ring_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Reduce along the same chain backwards, and combine on every rank."""
    _relay(link, flat, -1, combine)


def _relay(link: Link, flat: torch.Tensor, towards: int, combine: Combine | None) -> None:
    """Receive blocks from the rank before and forward each while the next one arrives."""
    before, behind = (
        rank if 0 <= rank < link.size else None
        for rank in (link.rank - towards, link.rank + towards)
    )
    ready: torch.Tensor | None = None
    for begin, end in itertools.pairwise(even_bounds(flat.numel(), link.size)):
        block = flat[begin:end]
        received = torch.empty_like(block) if combine else block
        link.exchange(ready, behind, received, before)
        if combine and before is not None:
            combine(block, received)
        ready = block
    link.exchange(ready, behind, None, None)


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
    _ring(link, flat, bounds, 1, combine)


def ring_all_gather(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """All-gather on the ring: ``p - 1`` steps of ``n / p`` bytes.

    A rank forwards what it has received in the previous step.
    """
    _ring(link, flat, bounds, 0, None)


def _ring(
    link: Link, flat: torch.Tensor, bounds: Sequence[int], first: int, combine: Combine | None
) -> None:
    """Send blocks to the rank after this one, from the block ``first`` before this rank's on."""
    blocks = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
    for step in range(first, link.size - 1 + first):
        out, into = blocks[link.rank - step], blocks[link.rank - step - 1]
        received = torch.empty_like(into) if combine else into
        link.exchange(out, (link.rank + 1) % link.size, received, (link.rank - 1) % link.size)
        if combine:
            combine(into, received)


_BY_NAME: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "linear": rooted(star, star),
    "tree": rooted(tree, lambda size: tree(size)[::-1]),
    "ring": {
        "broadcast": ring_broadcast,
        "reduce": ring_reduce,
        "all_reduce": ring_all_reduce,
        "reduce_scatter": ring_reduce_scatter,
        "all_gather": ring_all_gather,
    },
    "halving-doubling": {
        function.__name__: function
        for function in (broadcast, reduce, all_reduce, reduce_scatter, all_gather)
    },
}
ALGORITHMS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    operation: {name: its[operation] for name, its in _BY_NAME.items() if operation in its}
    for operation in _BY_NAME["ring"]
}
"""The algorithms for each operation. Their arguments are (link, flat), then the bounds if blocks have
owners, then ``combine`` if there is something to sum."""


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

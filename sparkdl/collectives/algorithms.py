"""Collectives written out in sends and receives: what a library does, to be read and measured.

Every function runs on all ranks of a link at once, on flat contiguous tensors, in place:

=================  ================================  ===========================================
operation          before                            after
=================  ================================  ===========================================
broadcast          rank 0 has the vector             all ranks have it
reduce             each rank has a vector            rank 0 has their sum; the others are spoilt
all_reduce         each rank has a vector            all ranks have the sum
reduce_scatter     each rank has a vector            block ``i`` of rank ``i`` is the sum's
all_gather         rank ``i`` has block ``i``        all ranks have all blocks
=================  ================================  ===========================================

"Sum" stands for any commutative ``combine(into, received)``, which alters ``into``. The order in which
it combines is fixed by the algorithm and the number of ranks alone, so the same inputs give the same
bits; and each element is combined on one rank and copied from there, so all ranks have the same bits.
``bounds`` are the ends of the blocks: block ``i`` is ``flat[bounds[i]:bounds[i + 1]]``; blocks may
differ in size and be empty. :class:`~sparkdl.collectives.link.SubgroupLink` makes any rank the root.

The algorithms and what they cost (:mod:`sparkdl.collectives.costs` has the formulas):

``linear``
    The root talks to one rank after the other.
``tree``
    Binomial tree: for broadcast and reduce of small vectors. [1, 2]
``ring``
    Blocks go around a ring, every rank sends and receives at every step: all_gather,
    reduce_scatter, and all_reduce as both; no algorithm sends fewer bytes. [1, 2, 3] broadcast and
    reduce send the blocks down a chain, as a pipeline. [4]
``halving-doubling``
    :mod:`sparkdl.collectives.halving`: as few bytes as the ring in a logarithm of steps.

[1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in
MPICH", Int. J. High Performance Computing Applications 19(1), 2005.
[2] E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
practice, and experience", Concurrency and Computation: Practice and Experience 19(13), 2007.
[3] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel and Distributed Computing 69(2), 2009.
[4] J. Watts, R. van de Geijn, "A pipelined broadcast for multidimensional meshes", Parallel Processing
Letters 5(2), 1995.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from sparkdl.collectives import halving
from sparkdl.collectives.halving import Combine, even_bounds
from sparkdl.collectives.link import Link


def linear_broadcast(link: Link, flat: torch.Tensor) -> None:
    """``p - 1`` steps of ``n`` bytes, all from the root."""
    if link.rank:
        link.receive(flat, 0)
    else:
        for rank in range(1, link.size):
            link.send(flat, rank)


def linear_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """``p - 1`` steps of ``n`` bytes, all to the root, which combines in the order of ranks."""
    if link.rank:
        link.send(flat, 0)
    else:
        received = torch.empty_like(flat)
        for rank in range(1, link.size):
            link.receive(received, rank)
            combine(flat, received)


def linear_all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """A linear reduce, then a linear broadcast."""
    linear_reduce(link, flat, combine)
    linear_broadcast(link, flat)


def tree_broadcast(link: Link, flat: torch.Tensor) -> None:
    """Binomial tree: in each step, all that have the vector send it on. ``ceil(log2 p)`` steps of
    ``n`` bytes; the root sends in each."""
    for width in reversed(_widths(link.size)):
        place = link.rank % (2 * width)
        if place == 0 and link.rank + width < link.size:
            link.send(flat, link.rank + width)
        elif place == width:
            link.receive(flat, link.rank - width)


def tree_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """The same tree backwards: half of the ranks send in the first step, and are done."""
    received = torch.empty_like(flat)
    for width in _widths(link.size):
        place = link.rank % (2 * width)
        if place == 0 and link.rank + width < link.size:
            link.receive(received, link.rank + width)
            combine(flat, received)
        elif place == width:
            link.send(flat, link.rank - width)


def tree_all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """Up the tree and down again: the fewest steps but for halving-doubling, most bytes."""
    tree_reduce(link, flat, combine)
    tree_broadcast(link, flat)


def ring_broadcast(link: Link, flat: torch.Tensor) -> None:
    """Down a chain in ``p`` blocks, each sent on while the next one arrives: ``2 (p - 1)`` steps of
    ``n / p`` bytes. (More, smaller blocks suit long vectors: this one has no such knob.)"""
    before = link.rank - 1 if link.rank else None
    behind = link.rank + 1 if link.rank + 1 < link.size else None
    _relay(link, flat, before, behind, None)


def ring_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """The same chain backwards, combining at every rank."""
    before = link.rank + 1 if link.rank + 1 < link.size else None
    behind = link.rank - 1 if link.rank else None
    _relay(link, flat, before, behind, combine)


def ring_all_reduce(link: Link, flat: torch.Tensor, combine: Combine) -> None:
    """A reduce-scatter and an all-gather on the ring: ``2 (p - 1)`` steps of ``n / p`` bytes."""
    bounds = even_bounds(flat.numel(), link.size)
    ring_reduce_scatter(link, flat, bounds, combine)
    ring_all_gather(link, flat, bounds)


def ring_reduce_scatter(
    link: Link, flat: torch.Tensor, bounds: Sequence[int], combine: Combine
) -> None:
    """``p - 1`` steps of ``n / p`` bytes: a rank adds its own to the block that comes along and sends
    it on. A block sets out from the rank behind its owner: a rank sends every block but its own."""
    blocks, behind, before = _ring(link, flat, bounds)
    for step in range(1, link.size):
        out, into = blocks[link.rank - step], blocks[link.rank - step - 1]
        received = torch.empty_like(into)
        link.exchange(out, behind, received, before)
        combine(into, received)


def ring_all_gather(link: Link, flat: torch.Tensor, bounds: Sequence[int]) -> None:
    """``p - 1`` steps of ``n / p`` bytes: a rank sends on what it received in the step before."""
    blocks, behind, before = _ring(link, flat, bounds)
    for step in range(link.size - 1):
        out, into = blocks[link.rank - step], blocks[link.rank - step - 1]
        link.exchange(out, behind, into, before)


ALGORITHMS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "broadcast": {
        "linear": linear_broadcast,
        "tree": tree_broadcast,
        "ring": ring_broadcast,
        "halving-doubling": halving.broadcast,
    },
    "reduce": {
        "linear": linear_reduce,
        "tree": tree_reduce,
        "ring": ring_reduce,
        "halving-doubling": halving.reduce,
    },
    "all_reduce": {
        "linear": linear_all_reduce,
        "tree": tree_all_reduce,
        "ring": ring_all_reduce,
        "halving-doubling": halving.all_reduce,
    },
    "reduce_scatter": {
        "ring": ring_reduce_scatter,
        "halving-doubling": halving.reduce_scatter,
    },
    "all_gather": {
        "ring": ring_all_gather,
        "halving-doubling": halving.all_gather,
    },
}
"""What is written out for each operation. Arguments: (link, flat), then the bounds where blocks have
owners, then ``combine`` where there is something to sum."""


def _widths(size: int) -> list[int]:
    """Distances in a binomial tree: the powers of two below ``size``."""
    return [1 << i for i in range((size - 1).bit_length())]


def _ring(
    link: Link, flat: torch.Tensor, bounds: Sequence[int]
) -> tuple[list[torch.Tensor], int, int]:
    """The blocks, and the ranks behind and before this one."""
    blocks = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
    return blocks, (link.rank + 1) % link.size, (link.rank - 1) % link.size


def _relay(
    link: Link,
    flat: torch.Tensor,
    before: int | None,
    behind: int | None,
    combine: Combine | None,
) -> None:
    """Take the blocks from ``before`` and pass each to ``behind`` while the next one arrives; None
    at the ends of the chain."""
    ready: torch.Tensor | None = None
    for begin, end in itertools.pairwise(even_bounds(flat.numel(), link.size)):
        block = flat[begin:end]
        received = torch.empty_like(block) if combine else block
        link.exchange(ready, behind, received, before)
        if combine and before is not None:
            combine(block, received)
        ready = block
    link.exchange(ready, behind, None, None)

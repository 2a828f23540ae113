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
differ in size and be empty. The root is rank 0; :class:`~sparkdl.collectives.link.SubgroupLink`
makes any rank the root.

The algorithms (:mod:`sparkdl.collectives.costs` has the formulas for their costs):

``linear``
    The root communicates with one rank after another.
``tree``
    A binomial tree, for broadcast and reduce of small vectors. [1, 2]
``ring``
    Blocks go around a ring, and every rank sends and receives in every step: all_gather,
    reduce_scatter, and all_reduce as both. No algorithm sends fewer bytes. [1, 2, 3] broadcast and
    reduce send the blocks down a chain, as a pipeline. [4]
``halving-doubling``
    :mod:`sparkdl.collectives.halving`: as few bytes as the ring, in a logarithmic number of steps.

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
    link: Link,
    flat: torch.Tensor,
    before: int | None,
    behind: int | None,
    combine: Combine | None,
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

"""Sums whose bits do not depend on who computes which part: a binary tree over the replicas. Pure.

[Note: the shape of a sum] The bits of a floating-point sum depend on its brackets. Gradients are
first summed on the nodes of their replicas and then by the owner of a slice, and it is chance which
replicas share a node. So the numbers of the replicas alone determine the brackets: [0, 1], [2, 3]
and so on, then [0..3], [4..7], and so on up. A leaf is a replica's gradient times its share,
rounded. An inner node is left plus right, or the only one of them that exists. An aligned *block*
of 2**k replicas (those of it that exist) is a subtree: its sum may be computed anywhere, and the
bits of the total are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

CHUNK = 1 << 16
"""The number of elements that are summed at a time, so that the partial sums (one for each level)
stay in the cache."""


@dataclass(frozen=True)
class Term:
    """A term of a sum."""

    place: int  # the replica, or the first of a block that is summed already
    values: torch.Tensor
    share: float | None = None  # a factor; None: the values are added as they are


def additions(places: Sequence[int]) -> list[int]:
    """Return the order in which the tree adds up terms at ``places`` (ascending, all different).

    The terms are pushed on a stack in turn. Element i of the result says how often, after term i,
    the two topmost sums are replaced by their sum. The stack is never higher than the tree.
    """
    counts: list[int] = []
    joints: list[int] = []  # the levels at which neighbours on the stack are joined
    for i, place in enumerate(places):
        last = i + 1 == len(places)
        level = place.bit_length() + 64 if last else (place ^ places[i + 1]).bit_length()
        count = 0
        while joints and joints[-1] < level:
            joints.pop()
            count += 1
        counts.append(count)
        joints.append(level)
    return counts


def blocks(members: Collection[int], replicas: int) -> list[range]:
    """Return the largest aligned blocks of replicas 0 to ``replicas`` - 1 that contain only
    ``members``."""
    found: list[range] = []

    def search(start: int, size: int) -> None:
        there = range(start, min(start + size, replicas))
        if all(replica in members for replica in there):
            found.append(there)
        elif size > 1:
            search(start, size // 2)
            search(start + size // 2, size // 2)

    search(0, 1 << max(0, replicas - 1).bit_length())
    return [block for block in found if block]


@torch.no_grad()
def tree_sum(terms: Sequence[Term], out: torch.Tensor) -> torch.Tensor:
    """Write the sum in the shape of the tree into ``out``, in its dtype, and return it.

    ``out`` must not share memory with a term. See [Note: the shape of a sum].
    """
    ordered = sorted(terms, key=lambda term: term.place)
    counts = additions([term.place for term in ordered])
    if not ordered:
        return out.zero_()
    depth, height = 0, 0
    for count in counts:
        depth += 1
        height = max(height, depth)
        depth -= count
    spare = torch.empty(height - 1, min(CHUNK, len(out)), dtype=out.dtype)
    for start in range(0, len(out), CHUNK):
        place = out[start : start + CHUNK]
        stack = [place, *spare[:, : len(place)]]
        top = 0
        for term, count in zip(ordered, counts, strict=True):
            values = term.values[start : start + len(place)]
            if term.share is None:
                stack[top].copy_(values)
            elif values.dtype == out.dtype:
                torch.mul(values, term.share, out=stack[top])
            else:
                torch.mul(values.to(out.dtype), term.share, out=stack[top])
            for _ in range(count):
                top -= 1
                stack[top].add_(stack[top + 1])
            top += 1
    return out

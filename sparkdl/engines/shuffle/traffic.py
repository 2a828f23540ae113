"""Which replicas and slices share a node, and what that makes of the bytes between nodes. Pure.

P bytes of parameters are to be summed and handed back among K nodes, each of which owns P / K of them.
A node must then send (K - 1) / K of its sum of the gradients, and its slice of the new weights to K - 1
others: 2 P (K - 1) / K bytes in each direction, the least there is where every node does the same
(Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms"). :func:`least_bytes` says so, and
:func:`planned` what a job comes to with the nodes as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparkdl.loop.engine import Traffic
from sparkdl.slices.tree_sum import blocks


@dataclass(frozen=True)
class Nodes:
    """The node (its token) of each replica, and of each slice's owner."""

    replicas: tuple[str, ...]
    slices: tuple[str, ...]

    @functools.cached_property
    def _members(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for replica, token in enumerate(self.replicas):
            found.setdefault(token, []).append(replica)
        return found

    @property
    def tokens(self) -> list[str]:
        """The nodes that have replicas."""
        return list(self._members)

    def members(self, token: str) -> list[int]:
        """The replicas of a node."""
        return self._members[token]

    def representative(self, token: str, n: int) -> int:
        """The replica at whose place slice ``n`` is summed for the node, and its weights arrive: they
        take turns, so that a node's task slots share the work."""
        members = self._members[token]
        return members[n % len(members)]

    def blocks(self, token: str) -> list[range]:
        """The parts of the sum that the node can make, see [Note: the shape of a sum]."""
        return blocks(self._members[token], len(self.replicas))


Transfer = tuple[str, str, int]
"""From a node to a node, bytes."""


def between_nodes(gradients: Iterable[Transfer], weights: Iterable[Transfer]) -> dict[str, Traffic]:
    """What left and arrived at each node; what stayed on its node counts nothing."""
    sums: dict[str, dict[str, int]] = {}
    for kind, transfers in (("gradients", gradients), ("weights", weights)):
        for source, target, nbytes in transfers:
            if source != target and nbytes:
                for node, way in ((source, "sent"), (target, "received")):
                    mine = sums.setdefault(node, {})
                    mine[f"{kind}_{way}"] = mine.get(f"{kind}_{way}", 0) + nbytes
    return {node: Traffic(**found) for node, found in sums.items()}


def least_bytes(parameter_bytes: int, nodes: int) -> float:
    """2 P (K - 1) / K: bytes that a node must send, and receive, in an iteration."""
    return 2 * parameter_bytes * (nodes - 1) / nodes


@dataclass(frozen=True)
class SliceBytes:
    """Of a slice: its dense gradient as it travels, its dense gradient in the flat vector's dtype, and
    its weights."""

    wire: int
    flat: int
    weights: int


def sum_is_smaller(terms: int, wire: int, flat: int) -> bool:
    """Whether a sum of gradients is fewer bytes than they are."""
    return terms > 1 and terms * wire > flat


@dataclass(frozen=True)
class _Plan:
    gradients: list[Transfer] = field(default_factory=list)
    weights: list[Transfer] = field(default_factory=list)


def planned(nodes: Nodes, slices: Sequence[SliceBytes], summed: bool) -> dict[str, Traffic]:
    """What an iteration will send, tables and buffers left out.

    ``summed``: each node sums its replicas' gradients, and gets new weights once.
    """
    plan = _Plan()
    for token in nodes.tokens:
        members = nodes.members(token)
        for owner, nbytes in zip(nodes.slices, slices, strict=True):
            if not summed:
                plan.gradients.append((token, owner, len(members) * nbytes.wire))
                plan.weights.append((owner, token, len(members) * nbytes.weights))
                continue
            for block in nodes.blocks(token):
                worth = sum_is_smaller(len(block), nbytes.wire, nbytes.flat)
                sent = nbytes.flat if worth else len(block) * nbytes.wire
                plan.gradients.append((token, owner, sent))
            plan.weights.append((owner, token, nbytes.weights))
    return between_nodes(plan.gradients, plan.weights)

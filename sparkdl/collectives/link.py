"""Links, through which a rank sends to others. The algorithms of collectives need nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

TAG = 1 << 30
"""The tag of the messages of collectives. Users' messages have smaller tags."""


class Sent(NamedTuple):
    """The number of messages and bytes that a rank has sent."""

    messages: int
    bytes: int


class Link(ABC):
    """The end of ``rank`` among ``size`` ranks, which are numbered from 0."""

    rank: int
    size: int

    @abstractmethod
    def exchange(
        self,
        out: torch.Tensor | None,
        to: int | None,
        into: torch.Tensor | None,
        source: int | None,
    ) -> None:
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

    def exchange(
        self,
        out: torch.Tensor | None,
        to: int | None,
        into: torch.Tensor | None,
        source: int | None,
    ) -> None:
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

    def exchange(
        self,
        out: torch.Tensor | None,
        to: int | None,
        into: torch.Tensor | None,
        source: int | None,
    ) -> None:
        both = []
        if out is not None and to is not None and out.numel():
            both.append(dist.P2POp(dist.isend, out, group=self.group, tag=TAG, group_peer=to))
            self.sent = Sent(self.sent.messages + 1, self.sent.bytes + out.nbytes)
        if into is not None and source is not None and into.numel():
            both.append(dist.P2POp(dist.irecv, into, group=self.group, tag=TAG, group_peer=source))
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait()

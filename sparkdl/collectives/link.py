"""Links: how one rank sends to the others, which is all that the algorithms of a collective need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

TAG = 1 << 30
"""Of the messages of collectives; those of users have smaller ones."""


class Sent(NamedTuple):
    """What one rank has sent."""

    messages: int
    bytes: int


class Link(ABC):
    """The end of ``rank`` among ``size`` ranks. Ranks count from 0."""

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
        """Send ``out`` to one rank and, at the same time, fill ``into`` with what another sends.

        Both are contiguous tensors, and both ends know their sizes: nothing travels for an empty
        one. None: not in this direction. Returns when both are done.
        """

    def send(self, out: torch.Tensor, to: int) -> None:
        """Send alone."""
        self.exchange(out, to, None, None)

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Receive alone."""
        self.exchange(None, None, into, source)


class SubgroupLink(Link):
    """The link among a few ranks of ``link``, or among all in another order.

    Rank ``i`` here is ``members[i]`` there. So an algorithm can be written for root 0 and run for
    any root, or be written for a power of two and run on those ranks that make one.
    """

    def __init__(self, link: Link, members: Sequence[int]) -> None:
        self.link, self.members = link, members
        self.rank, self.size = members.index(link.rank), len(members)

    @classmethod
    def rooted(cls, link: Link, root: int) -> Link:
        """All ranks, ``root`` as rank 0, the others behind it around the ring."""
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
    """The link of a process group, by ``torch.distributed``'s isend and irecv.

    They are handed over as one batch: NCCL runs an exchange only so, to Gloo it is all the same.
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

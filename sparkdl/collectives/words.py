"""Messages of whole numbers and tensors between ranks, through one process group of Gloo.

A receive of Gloo ends if its peer is gone, and otherwise only by a time limit, which closes the
connections of the whole group. So whoever waits for requests waits without a limit, and
:meth:`Words.disconnect` uses a limit to end all waiting threads of this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

HEADER = 24
"""The number of whole numbers in the first part of a message."""
NO_LIMIT = timedelta(days=365)
TAG, UNUSED_TAG = 1, 2


class Words:
    """One direction of messages: each process has one thread that sends to a peer, and one that
    receives from it. The group, of Gloo with all ranks, is used for nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def send(
        self,
        to: int,
        words: Sequence[int],
        tensors: Sequence[torch.Tensor] = (),
        limit: timedelta = NO_LIMIT,
    ) -> None:
        """Send numbers, then tensors, whose shapes the receiver knows or learns from the numbers."""
        for work in self.post(to, words, tensors):
            work.wait(limit)

    def post(
        self, to: int, words: Sequence[int], tensors: Sequence[torch.Tensor] = ()
    ) -> list[dist.Work]:
        """Begin to send a message, and return what to wait for before its tensors may change."""
        head = torch.zeros(HEADER, dtype=torch.int64)
        every = torch.tensor([len(words), *words], dtype=torch.int64)
        head[: min(len(every), HEADER)] = every[:HEADER]
        parts = [head] if len(every) <= HEADER else [head, every[HEADER:]]
        parts += [tensor.contiguous().view(-1) for tensor in tensors if tensor.numel()]
        sent = [dist.isend(part, group=self._group, group_dst=to, tag=TAG) for part in parts]
        return [work for work in sent if work is not None]

    def receive(self, source: int, limit: timedelta = NO_LIMIT) -> list[int]:
        """Receive the numbers of a message."""
        head = torch.empty(HEADER, dtype=torch.int64)
        self.receive_into(head, source, limit)
        count, *found = head.tolist()
        if count < HEADER:
            return list(found[:count])
        rest = torch.empty(count + 1 - HEADER, dtype=torch.int64)
        self.receive_into(rest, source, limit)
        return [*found, *rest.tolist()]

    def receive_into(
        self, tensor: torch.Tensor, source: int, limit: timedelta = NO_LIMIT
    ) -> torch.Tensor:
        """Receive one contiguous tensor of a message, and return it."""
        if tensor.numel():
            flat = tensor.view(-1)
            work = dist.irecv(flat, group=self._group, group_src=source, tag=TAG)
            assert work is not None
            work.wait(limit)
        return tensor

    def disconnect(self) -> None:
        """Close the connections to all peers, which ends every wait here and there with an error."""
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError, ValueError):
                    unused = torch.empty(1)
                    work = dist.irecv(unused, group=self._group, group_src=peer, tag=UNUSED_TAG)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        """Give up the process group; nothing may wait any more."""
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(self._group)


def text_tensor(text: str) -> torch.Tensor:
    """Return a text as a tensor of bytes."""
    return torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)


def text_of(tensor: torch.Tensor) -> str:
    """Return the text of :func:`text_tensor`."""
    return bytes(tensor.tolist()).decode()

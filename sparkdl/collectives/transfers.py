"""Sums over ranks, cut into chunks, the most urgent of those that every rank is ready for first.

Ranks become ready for their sums in different orders, but must take part in them in one order. So
they agree before each chunk, in one small all-reduce: each says which of the oldest sums it is ready
for, and all take the most urgent one that nobody is missing from. Sums are told apart by the order in
which they were asked for, which is the same on all ranks.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives import arguments
from sparkdl.collectives.communicator import Communicator
from sparkdl.errors import ParameterError, TrainingError, kind_of, raise_all, shown

WINDOW = 256
"""The number of oldest unfinished sums among which ranks choose."""
PAUSE = 0.002
"""Seconds until ranks that found no common sum compare again, if nothing has changed here."""
PENDING, FAILED, UNKNOWN = 0, -1, -2
"""The states in which a rank reports a sum that it is not ready for. A sum that it is ready for has a
positive number."""

End = Callable[[Any, BaseException | None], None]
"""A function that ends an operation with a result or an exception."""


@dataclass
class Transfer:
    """A sum over ranks, with those of its chunks that are still to come."""

    number: int
    tensor: torch.Tensor
    chunks: list[torch.Tensor]
    op: str
    priority: float
    call: str
    state: int = PENDING
    error: BaseException | None = None
    end: End | None = field(default=None, compare=False)


class Transfers:
    """The sums of a process group, which nothing else may use meanwhile. They run in a thread."""

    def __init__(self, communicator: Communicator) -> None:
        self._group, self._size = communicator.group, communicator.size
        self._changed = threading.Condition()
        self._known: dict[int, Transfer] = {}
        self._asked, self._oldest, self._closed = 0, 0, False
        self._finished: set[int] = set()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def add(self, tensor: torch.Tensor, op: str, priority: float, chunk_bytes: int) -> Transfer:
        """Give the sum of a tensor its place among those of this group."""
        raise_all(ParameterError, problems(tensor, op, priority, chunk_bytes))
        chunk = max(1, chunk_bytes // tensor.element_size())
        call = (
            f"{arguments.name_of(tensor.dtype)} {list(tensor.shape)}, {op=}, "
            f"priority={float(priority)} and chunk_bytes={chunk * tensor.element_size()}"
        )
        with self._changed:
            number, self._asked = self._asked, self._asked + 1
            self._known[number] = Transfer(
                number,
                tensor,
                list(tensor.detach().view(-1).split(chunk)),
                op,
                priority,
                call,
            )
            return self._known[number]

    def begin(self, transfer: Transfer, end: End) -> None:
        """Say that the tensor has its values; call ``end`` when it has their sum."""
        with self._changed:
            transfer.end = end
            error = self._broken or transfer.error
            self._say(transfer, 1 + zlib.crc32(transfer.call.encode()))
        if error is not None:
            end(None, error)

    def give_up(self, transfer: Transfer) -> None:
        """Say that a tensor never gets its values, unless its sum has begun."""
        with self._changed:
            if transfer.end is None:
                self._say(transfer, FAILED)

    def close(self) -> None:
        """Wait until all sums have ended, also those that failed here, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _say(self, transfer: Transfer, state: int) -> None:
        transfer.state = state
        if self._broken is not None:  # nobody would be told
            self._known.pop(transfer.number, None)
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news() or self._is_over())
                if not self._known:
                    return
                window = range(self._oldest, self._oldest + WINDOW)
                own = [self._known[n].state if n in self._known else UNKNOWN for n in window]
            try:
                found = self._sum_a_chunk(window, own)
            except Exception as error:  # the group is of no use any more
                self._break(error)
                continue
            with self._changed:
                if not found:
                    self._changed.wait(PAUSE)

    def _is_over(self) -> bool:
        return self._closed and not self._known

    def _has_news(self) -> bool:
        return any(transfer.state != PENDING for transfer in self._known.values())

    def _sum_a_chunk(self, window: range, own: list[int]) -> bool:
        """Agree on a sum and add one chunk of it up; return whether there was one."""
        said = torch.tensor([own, [-state for state in own]])
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group)
        least, most = said[0].tolist(), (-said[1]).tolist()
        ready = []
        for number, low, high in zip(window, least, most, strict=True):
            if low == FAILED:  # and no rank has yet to ask for it
                what = "On another rank, the operation that computes this tensor failed."
                self._finish(self._known[number], TrainingError(what))
            elif low > PENDING and low != high:
                self._finish(self._known[number], ParameterError(_disagree(self._known[number])))
            elif low > PENDING:
                ready.append(self._known[number])
        if not ready:
            return False
        chosen = min(ready, key=lambda transfer: (-transfer.priority, transfer.number))
        chunk = chosen.chunks.pop(0)
        dist.all_reduce(chunk, arguments.OPS[chosen.op][1], group=self._group)
        if chosen.op == "mean":
            chunk /= self._size
        if not chosen.chunks:
            self._finish(chosen, None)
        return True

    def _finish(self, transfer: Transfer, error: BaseException | None) -> None:
        with self._changed:
            del self._known[transfer.number]
            self._finished.add(transfer.number)
            while self._oldest in self._finished:
                self._finished.remove(self._oldest)
                self._oldest += 1
            transfer.error, end = error, transfer.end
        if end is not None:
            end(None if error else transfer.tensor, error)

    def _break(self, error: BaseException) -> None:
        """End the sums that are ready here; :meth:`begin` ends the others when they are."""
        with self._changed:
            self._broken = error
            ends = [transfer.end for transfer in self._known.values() if transfer.end is not None]
            self._known = {n: one for n, one in self._known.items() if one.state == PENDING}
        for end in ends:
            end(None, error)


def problems(tensor: Any, op: str, priority: Any, chunk_bytes: Any) -> list[str]:
    """Return what keeps a tensor from being summed in place, chunk by chunk."""
    if not isinstance(tensor, torch.Tensor):
        return [f"tensor is {kind_of(tensor)}: give a tensor."]
    if tensor.layout != torch.strided:
        return arguments.device(tensor, tensor.device)
    found = arguments.collective_tensor(tensor, by_rows=False)
    found += arguments.reduction(op, tensor.dtype)
    if tensor.device.type != "cpu":
        found.append(
            f"The tensor is on {tensor.device}: chunks are summed in memory. Copy it there."
        )
    if not tensor.is_contiguous():
        found.append("The tensor is not contiguous: its sum is to be written into it. Copy it.")
    found += arguments.priority(priority)
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        found.append(f"chunk_bytes={shown(chunk_bytes)}: give a whole number of at least 1.")
    return found


def _disagree(own: Transfer) -> str:
    return (
        f"all_reduce number {own.number} of this group is of {own.call} here, but not on every rank. "
        "Ask for the same sums in the same order on all ranks."
    )

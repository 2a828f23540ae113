"""The messages between the clients and the owners of a parameter server.

The order in which the operations of clients are applied. Pure: no process group, no threads.

[Note: one order for all owners] Every push and pull asks for its turn at one place. The turn says
at which position it stands at each owner, and owners apply operations by position. So all owners
apply them in one order, and a pull finds at every owner what the same pushes have made. The order
is a list of ranks: the n-th number is the rank whose next operation is the n-th. Because what a
client asks for depends only on what it has pulled before, this list says everything: whoever gives
turns by it gets the same bits again.

Messages of words and tensors between ranks, through one process group of Gloo.

A receive of Gloo ends if its peer is gone, and otherwise only by a time limit, which closes the
connections of the whole group. So whoever waits for requests waits without a limit, and
:meth:`Words.disconnect` uses a limit to end all waiting threads of this process.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives.communicator import dtype_name
from sparkdl.errors import (
    CheckpointError,
    ParameterError,
    SparkdlError,
    StalledError,
    StateLostError,
    TrainingError,
)


class Kind(IntEnum):
    """The kinds of requests. The comments show the words and tensors that follow.

    Those from PUSH to LOAD have a turn, and begin with their position at the owner.
    """

    TURN = (
        0  # kind, keys, places, words for place 0; tensors for place 0 -> a position for each place
    )
    MEET = 1  # text -> once every rank has said the same
    INIT = 2  # key; values
    PUSH = 3  # (key, by rows) of each; ([rows], values)
    PULL = 4  # (key, by rows) of each; [rows] -> values
    FINISH = 5  # the client pushes no more
    OPTIMIZER = 6  # use the next optimizer
    SAVE = 7  # the path of a file
    LOAD = 8  # have the ranges that were read
    BYE = 9  # the last message of a client


@dataclass(frozen=True)
class Operation:
    """An operation that waits for its turn."""

    client: int
    kind: Kind
    keys: tuple[int, ...] = ()


class OperationOrder:
    """Decide whose operation is the next.

    The *clock* of a client at a key is the number of its pushes to that key. A push or pull waits
    while its client's clock is more than ``staleness`` ahead of the slowest client's that has not
    finished. Without ``replay``, the order to repeat, turns are given in the order of asking.
    """

    def __init__(
        self, clients: int, staleness: int | None, replay: Sequence[int] | None = None
    ) -> None:
        self._staleness = staleness
        self._replay = None if replay is None else list(replay)
        self._left = Counter(self._replay)
        self._clocks: dict[int, list[int]] = {}
        self._clients, self._active = clients, set(range(clients))
        self._waiting: dict[int, Operation] = {}
        self.order = array("i")

    def ask(self, operation: Operation) -> None:
        """Add an operation to those that wait."""
        client = operation.client
        if self._replay is not None:
            left = self._left[client]
            if left == 0 or (operation.kind == Kind.FINISH and left > 1):
                done = self.order.count(client)
                raise ParameterError(
                    f"replay: rank {client} has made {done} operations and "
                    f"{'ends' if left else 'asks for one more'}, but the order has "
                    f"{done + left} of it. Replay the same function on the same data."
                )
        self._waiting[client] = operation

    def grant(self) -> Operation | None:
        """Return the operation whose turn it is, or None if all must wait."""
        for client, operation in self._waiting.items():
            if self._may(operation):
                del self._waiting[client]
                self._note(operation)
                return operation
        return None

    def withdraw(self, client: int) -> str:
        """Remove what a client waits for, and return the reason why it waited."""
        operation = self._waiting.pop(client)
        if self._replay is not None:
            return f"in the order that is replayed it is the turn of rank {self._next_client()}"
        key = next(key for key in operation.keys if self._lag(client, key) > self._most())
        clocks = self._clocks[key]
        behind = {rank: clocks[client] - clocks[rank] for rank in sorted(self._active)}
        slow = [str(rank) for rank, lag in behind.items() if lag > self._most()]
        return f"rank {', '.join(slow)} is {max(behind.values())} pushes behind this one"

    def _may(self, operation: Operation) -> bool:
        if self._replay is not None:
            return operation.client == self._next_client()
        if self._staleness is None or operation.kind == Kind.FINISH:
            return True
        return all(self._lag(operation.client, key) <= self._staleness for key in operation.keys)

    def _lag(self, client: int, key: int) -> int:
        """Return by how much the clock of ``client`` is ahead of the slowest one."""
        clocks = self._clocks.get(key)
        if clocks is None:
            return 0
        return clocks[client] - min((clocks[rank] for rank in self._active), default=0)

    def _most(self) -> int:
        return 0 if self._staleness is None else self._staleness

    def _next_client(self) -> int | None:
        """Return the rank of the next operation that is replayed, or None at the end."""
        assert self._replay is not None
        done = len(self.order)
        return self._replay[done] if done < len(self._replay) else None

    def _note(self, operation: Operation) -> None:
        self.order.append(operation.client)
        self._left[operation.client] -= 1
        if operation.kind == Kind.FINISH:
            self._active.discard(operation.client)
        elif operation.kind == Kind.PUSH:
            for key in operation.keys:
                self._clocks.setdefault(key, [0] * self._clients)[operation.client] += 1


ERRORS: dict[str, type[SparkdlError]] = {
    kind.__name__: kind
    for kind in (ParameterError, StalledError, StateLostError, TrainingError, CheckpointError)
}
"""The errors that an answer can carry: its first word is a name of these, or empty."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options on which all ranks of a parameter server have agreed."""

    synchronous: bool  # a step takes one gradient of every client
    staleness: int | None  # how far clients may be apart; None: any distance
    average: bool  # the gradients of a step are averaged, not summed
    timeout: float  # seconds that a request may wait
    replay: Sequence[int] | None = None


@dataclass
class Request:
    """A request of a client."""

    client: int
    kind: Kind
    words: Sequence[Any]
    tensors: Sequence[torch.Tensor]
    answer: Callable[[Sequence[Any], Sequence[torch.Tensor]], None]
    until: float = field(default=0.0)  # time.monotonic() until which it may wait


HEAD = 192
"""The number of bytes in the first part of a message."""
NO_LIMIT = timedelta(days=365)
TAG, UNUSED_TAG = 1, 2


class Words:
    """One direction of messages: each process has one thread that sends to a peer, and one that
    receives from it. The group, of Gloo with all ranks, is used for nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def send(
        self,
        to: int,
        words: Sequence[Any],
        tensors: Sequence[torch.Tensor] = (),
        limit: timedelta = NO_LIMIT,
    ) -> None:
        """Send words, which are values of JSON, and tensors."""
        for work in self.post(to, words, tensors):
            work.wait(limit)

    def post(
        self, to: int, words: Sequence[Any], tensors: Sequence[torch.Tensor] = ()
    ) -> list[dist.Work]:
        """Begin to send a message, and return what to wait for before its tensors may change."""
        shapes = [(dtype_name(tensor.dtype), *tensor.shape) for tensor in tensors]
        text = json.dumps((words, shapes)).encode()
        data = bytearray(len(text).to_bytes(8, "little") + text.ljust(HEAD - 8))
        head = torch.frombuffer(data, dtype=torch.uint8)
        parts = [head[:HEAD], head[HEAD:], *(tensor.contiguous().view(-1) for tensor in tensors)]
        sent = [
            dist.isend(part, group=self.group, group_dst=to, tag=TAG)
            for part in parts
            if part.numel()
        ]
        return [work for work in sent if work is not None]

    def receive(
        self, source: int, limit: timedelta = NO_LIMIT, into: Sequence[torch.Tensor] = ()
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Receive the words and tensors of a message, which lie in ``into`` unless it has none."""

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel():
                flat = tensor.view(-1)
                work = dist.irecv(flat, group=self.group, group_src=source, tag=TAG)
                assert work is not None
                work.wait(limit)
            return tensor

        head = fill(torch.empty(HEAD, dtype=torch.uint8)).numpy().tobytes()
        missing = max(0, 8 + int.from_bytes(head[:8], "little") - HEAD)
        rest = fill(torch.empty(missing, dtype=torch.uint8)).numpy().tobytes()
        words, shapes = json.loads(head[8:] + rest)
        places = into or [torch.empty(s, dtype=getattr(torch, name)) for name, *s in shapes]
        return words, [fill(place) for place, _ in zip(places, shapes, strict=False)]

    def disconnect(self) -> None:
        """Close the connections to all peers, which ends every wait here and there with an error."""
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError, ValueError):
                    unused = torch.empty(1)
                    work = dist.irecv(unused, group=self.group, group_src=peer, tag=UNUSED_TAG)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))

    def destroy(self) -> None:
        """Give up the process group; nothing may wait any more."""
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(self.group)

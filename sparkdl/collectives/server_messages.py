"""The messages between the clients and the owners of a parameter server.

The order in which the operations of clients are applied. Pure: no process group, no threads.

[Note: one order for all owners] Every push and pull asks for its turn at one place. The turn says
at which position it stands at each owner, and owners apply operations by position. So all owners
apply them in one order, and a pull finds at every owner what the same pushes have made. The order
is a list of ranks: the n-th number is the rank whose next operation is the n-th. Because what a
client asks for depends only on what it has pulled before, this list says everything: whoever gives
turns by it gets the same bits again.

Messages of whole numbers and tensors between ranks, through one process group of Gloo.

A receive of Gloo ends if its peer is gone, and otherwise only by a time limit, which closes the
connections of the whole group. So whoever waits for requests waits without a limit, and
:meth:`Words.disconnect` uses a limit to end all waiting threads of this process.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from sparkdl import errors
from sparkdl.collectives.key_range import WHOLE, KeySpec
from sparkdl.errors import ParameterError, SparkdlError


class Kind(IntEnum):
    """The kinds of operations that have a turn."""

    PUSH = 0
    PULL = 1
    FINISH = 2
    OPTIMIZER = 3
    SAVE = 4
    LOAD = 5


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


ERRORS: tuple[type[SparkdlError], ...] = (
    *(errors.ParameterError, errors.StalledError, errors.StateLostError),
    *(errors.TrainingError, errors.CheckpointError),
)
"""The errors that an answer can carry: its first number is 0, or 1 + the error's place here."""


class Message(IntEnum):
    """The kinds of requests. The comments show the numbers and tensors that follow."""

    TURN = 0  # kind, number of keys, keys, number of places, places -> a position for each place
    # if place 0 is one of them, also what the operation says to it, without a position
    MEET = 1  # length of the text; text -> once every rank has said the same
    INIT = 2  # key; values
    PUSH = 3  # position, (key, number of rows or WHOLE) of each; ([rows], values)
    PULL = 4  # position, (key, number of rows or WHOLE) of each; [rows] -> values
    FINISH = 5  # position: the client pushes no more
    OPTIMIZER = 6  # position: use the next optimizer
    BYE = 7  # the last message of a client
    SAVE = 8  # position, length of the text; the path of a file
    LOAD = 9  # position: have the ranges that were read


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
    kind: Message
    words: Sequence[int]
    tensors: list[torch.Tensor]
    answer: Callable[[Sequence[int], Sequence[torch.Tensor]], None]
    until: float = field(default=0.0)  # time.monotonic() until which it may wait


def message_of(words: Sequence[int]) -> Message:
    """Return the message of the operation for which a turn is asked."""
    return Message[Kind(words[0]).name]


def places_of(words: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places of the operation for which a turn is asked, and what it says to place 0."""
    _, keys, *rest = words
    count = rest[keys]
    return rest[keys + 1 : keys + 1 + count], rest[keys + 1 + count :]


def tensors_of(
    kind: Message, words: Sequence[int], keys: Mapping[int, KeySpec], place: int
) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Yield the shapes and dtypes of the tensors of a message."""
    if kind == Message.TURN:
        places, rest = places_of(words)
        if 0 in places:
            yield from tensors_of(message_of(words), [0, *rest], keys, place)
    elif kind in (Message.MEET, Message.SAVE):
        yield (words[-1],), torch.uint8
    elif kind == Message.INIT:
        yield keys[words[0]].range_shape(place), keys[words[0]].dtype
    elif kind in (Message.PUSH, Message.PULL):
        for key, rows in pairs(words[1:]):
            spec = keys[key]
            if rows != WHOLE:
                yield (rows,), torch.int64
            if kind == Message.PUSH:
                whole = spec.range_shape(place)
                yield whole if rows == WHOLE else (rows, *spec.row_shape), spec.dtype


def pairs(words: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the key and the number of rows of each gradient or value of an operation."""
    return zip(words[::2], words[1::2], strict=True)


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

"""The order in which the operations of clients are applied. Pure: no process group, no threads.

[Note: one order for all owners] Every push and pull asks for its turn at one place. The turn says
at which position it stands at each owner, and owners apply operations by position. So all owners
apply them in one order, and a pull finds at every owner what the same pushes have made. The order
is a list of ranks: the n-th number is the rank whose next operation is the n-th. Because what a
client asks for depends only on what it has pulled before, this list says everything: whoever gives
turns by it gets the same bits again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from sparkdl.errors import ParameterError


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

"""A dependency engine: operations run as soon as the things that they read and change are free.

This is the engine of MXNet (T. Chen et al., 2015) for functions of Python. An operation names its
*tags*: the things that it reads, and those that it changes. Results are those of running operations
one after another, in the order in which they were pushed.

Sums over ranks, cut into chunks, the most urgent of those that every rank is ready for first.

Ranks become ready for their sums in different orders, but must take part in them in one order. So
they agree before each chunk, in one small all-reduce: each says which of the oldest sums it is ready
for, and all take the most urgent one that nobody is missing from. Sums are told apart by the order in
which they were asked for, which is the same on all ranks.
"""

from __future__ import annotations

import heapq
import threading
import zlib
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives.communicator import (
    OPS,
    Communicator,
    device_problems,
    dtype_name,
    priority_problems,
    reduction_problems,
    tensor_problems,
)
from sparkdl.errors import ParameterError, TrainingError, kind_of, raise_all, shown
from sparkdl.plain import is_whole

WINDOW = 256
"""The number of oldest unfinished sums among which ranks choose."""
PAUSE = 0.002
"""Seconds until ranks that found no common sum compare again, if nothing has changed here."""
PENDING, FAILED, UNKNOWN = 0, -1, -2
"""The states in which a rank reports a sum that it is not ready for. A sum that it is ready for has a
positive number."""


@dataclass
class Transfer:
    """A sum over ranks, with those of its chunks that are still to come."""

    number: int
    tensor: torch.Tensor
    chunks: list[torch.Tensor]
    op: str
    priority: float
    call: str
    sum: Future[torch.Tensor] = field(default_factory=Future)
    state: int = PENDING


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
            f"{dtype_name(tensor.dtype)} {list(tensor.shape)}, {op=}, "
            f"priority={float(priority)} and chunk_bytes={chunk * tensor.element_size()}"
        )
        with self._changed:
            number, self._asked = self._asked, self._asked + 1
            chunks = list(tensor.detach().view(-1).split(chunk))
            transfer = Transfer(number, tensor, chunks, op, priority, call)
            if self._broken is None:
                self._known[number] = transfer
            else:
                transfer.sum.set_exception(self._broken)
            return transfer

    def begin(self, transfer: Transfer) -> Future[torch.Tensor]:
        """Say that the tensor has its values; return the future of their sum."""
        with self._changed:
            transfer.state = 1 + zlib.crc32(transfer.call.encode())
            self._changed.notify_all()
        return transfer.sum

    def give_up(self, transfer: Transfer) -> None:
        """Say that a tensor never gets its values, unless its sum has begun."""
        with self._changed:
            if transfer.state == PENDING:
                transfer.state = FAILED
                self._changed.notify_all()

    def close(self) -> None:
        """Wait until all sums have ended, also those that failed here, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        any(transfer.state != PENDING for transfer in self._known.values())
                        or (self._closed and not self._known)
                    )
                )
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
        dist.all_reduce(chunk, OPS[chosen.op][1], group=self._group)
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
        if error is None:
            transfer.sum.set_result(transfer.tensor)
        else:
            transfer.sum.set_exception(error)

    def _break(self, error: BaseException) -> None:
        """End all sums, also those that are not ready here yet."""
        with self._changed:
            self._broken, known, self._known = error, self._known, {}
        for transfer in known.values():
            transfer.sum.set_exception(error)


def problems(tensor: Any, op: str, priority: Any, chunk_bytes: Any) -> list[str]:
    """Return what keeps a tensor from being summed in place, chunk by chunk."""
    if not isinstance(tensor, torch.Tensor):
        return [f"tensor is {kind_of(tensor)}: give a tensor."]
    if tensor.layout != torch.strided:
        return device_problems(tensor, tensor.device)
    found = tensor_problems(tensor, by_rows=False)
    found += reduction_problems(op, tensor.dtype)
    if tensor.device.type != "cpu":
        found.append(
            f"The tensor is on {tensor.device}: chunks are summed in memory. Copy it there."
        )
    if not tensor.is_contiguous():
        found.append("The tensor is not contiguous: its sum is to be written into it. Copy it.")
    found += priority_problems(priority)
    if not is_whole(chunk_bytes, 1):
        found.append(f"chunk_bytes={shown(chunk_bytes)}: give a whole number of at least 1.")
    return found


def _disagree(own: Transfer) -> str:
    return (
        f"all_reduce number {own.number} of this group is of {own.call} here, but not on every rank. "
        "Ask for the same sums in the same order on all ranks."
    )


_LANE = object()
"""The tag that every ordered operation changes."""


@dataclass(order=True)
class _Operation:
    """An operation, with those that wait for it, and whether they need what it changes."""

    place: tuple[float, int]
    fn: Callable[[], Any] = field(compare=False)
    tags: frozenset[Hashable] = field(compare=False)
    future: Future[Any] = field(compare=False, default_factory=Future)
    waits_for: int = field(compare=False, default=0)
    followers: list[tuple[_Operation, bool]] = field(compare=False, default_factory=list)
    error: BaseException | None = field(compare=False, default=None)
    begins: bool = field(compare=False, default=False)
    """``fn`` returns at once, with the future of its result."""


@dataclass
class _Tag:
    """The last operation that changes a tag, until it has succeeded, and later ones that read it."""

    itself: Any  # kept, so that no other tensor has its id
    writer: _Operation | None = None
    readers: list[_Operation] = field(default_factory=list)


class Engine:
    """Run operations in threads, in an order that their dependencies allow.

    Operations that only read a tag run together; one that changes it runs alone. Torch releases the
    GIL in its kernels and in collectives, so these overlap; Python code does not.

    If an operation raises an exception or is cancelled, the futures of all later ones that read or
    change what it should have changed have that exception, and are not run. As a context manager the
    engine waits for all operations at the end.

    Args:
        threads: The greatest number of operations that run at once.
    """

    def __init__(self, threads: int = 4) -> None:
        if not is_whole(threads, 1):
            raise ParameterError(f"threads = {shown(threads)}: give a whole number of at least 1.")
        self._changed = threading.Condition()
        self._tags: dict[Hashable, _Tag] = {}
        self._ready: list[_Operation] = []
        self._pushed, self._unfinished, self._closed = 0, 0, False
        self._failure: BaseException | None = None
        self._transfers: dict[int, Transfers] = {}
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def push(
        self,
        fn: Callable[[], Any],
        *,
        read: Iterable[Any] = (),
        mutate: Iterable[Any] = (),
        ordered: bool = False,
        priority: float = 0,
    ) -> Future[Any]:
        """Add an operation, and return the future of its result at once.

        Args:
            fn: The operation, without arguments. It must not wait for futures of this engine.
            read: The tags that it reads: tensors, each standing for itself and not for its views,
                or any hashable objects.
            mutate: The tags that it changes, whether it reads them or not.
            ordered: Whether it runs after all ordered operations before it, as collectives must, so
                that every rank runs them in the order of pushing. If one fails, so do those behind.
            priority: Of the operations that may run, those with the highest number run first.

        Raises:
            sparkdl.ParameterError: ``fn``, a tag or the priority cannot be used, or the engine is
                closed.
        """
        if not callable(fn):
            raise ParameterError(f"fn is {kind_of(fn)}: give a function without arguments.")
        raise_all(ParameterError, priority_problems(priority))
        return self._push(fn, read, mutate, ordered, priority)

    def all_reduce(
        self,
        communicator: Communicator,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        priority: float = 0,
        chunk_bytes: int = 4 << 20,
    ) -> Future[torch.Tensor]:
        """Sum a tensor over ranks, in place and in chunks; return the future of it at once.

        The sum changes ``tensor``: it begins after all operations before it that name this tensor,
        and later ones that name it wait for it. Before each chunk the ranks agree on the sum of the
        highest priority that all of them are ready for, so that an urgent one overtakes between two
        chunks. Values do not depend on the order, and are the same on all ranks.

        All ranks ask for the same sums of a group in the same order, with the same arguments. Sums of
        the same shape, type and arguments are not told apart.
        Nothing else may communicate in this group until the engine is closed. Sums take no place of
        the engine's threads.

        Args:
            communicator: The ranks.
            tensor: The tensor, on the CPU and contiguous.
            op: "sum", "mean", "max" or "min".
            priority: Of the sums that all ranks are ready for, those with the highest number run
                first; the ranks look at the oldest 256.
            chunk_bytes: The size of a chunk. Smaller ones let urgent sums begin earlier, and cost a
                message each.

        Raises:
            sparkdl.ParameterError: An argument cannot be used, or the engine is closed. If the ranks
                disagree, the future has it. If the tensor's value fails on a rank, the futures of
                the others have a :class:`sparkdl.TrainingError`.
        """
        if not isinstance(communicator, Communicator):
            raise ParameterError(
                f"communicator is {kind_of(communicator)}: give a sparkdl.gang.Communicator."
            )
        with self._changed:
            self._check_open()
            key = id(communicator.group)
            if key not in self._transfers:
                self._transfers[key] = Transfers(communicator)
            transfers = self._transfers[key]
            transfer = transfers.add(tensor, op, priority, chunk_bytes)
            begin = partial(transfers.begin, transfer)
            future = self._push(begin, (), [tensor], False, priority, begins=True)
        future.add_done_callback(lambda _: transfers.give_up(transfer))
        return future

    def _push(
        self,
        fn: Any,
        read: Iterable[Any],
        mutate: Iterable[Any],
        ordered: bool,
        priority: float,
        begins: bool = False,
    ) -> Future[Any]:
        changes = _by_key(mutate) | ({_key(_LANE): _LANE} if ordered else {})
        tags = _by_key(read) | changes
        with self._changed:
            self._check_open()
            self._pushed, self._unfinished = self._pushed + 1, self._unfinished + 1
            operation = _Operation((-priority, self._pushed), fn, frozenset(tags), begins=begins)
            before: dict[int, tuple[_Operation, bool]] = {}
            for key, tag in tags.items():
                its = self._tags.setdefault(key, _Tag(tag))
                if its.writer is not None:
                    before[id(its.writer)] = its.writer, True
                if key in changes:
                    for reader in its.readers:
                        before.setdefault(id(reader), (reader, False))
                    self._tags[key] = _Tag(tag, operation)
                else:
                    its.readers.append(operation)
            for other, needed in before.values():
                if other.error is not None and other.future.done():
                    operation.error = operation.error or other.error
                else:
                    operation.waits_for += 1
                    other.followers.append((operation, needed))
            self._release(operation)
        return operation.future

    def wait(self) -> None:
        """Return when all operations have run; raise the exception of the first one that failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Wait for all operations, and end the threads. Exceptions are those of the futures."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for transfers in self._transfers.values():
            transfers.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.close()
        if kind is None:
            self.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise ParameterError("This Engine is closed: make a new one.")

    def _release(self, operation: _Operation) -> None:
        if not operation.waits_for:
            heapq.heappush(self._ready, operation)
            self._changed.notify_all()

    def _work(self) -> None:
        """Run what is ready, until the engine is closed and everything has run."""
        while True:
            with self._changed:
                while not self._ready and (self._unfinished or not self._closed):
                    self._changed.wait()
                if not self._ready:
                    return
                operation = heapq.heappop(self._ready)
            result, error = None, operation.error
            if not operation.future.set_running_or_notify_cancel():
                error = error or CancelledError()
            elif error is None and operation.begins:
                operation.fn().add_done_callback(partial(self._end_as, operation))
                continue
            elif error is None:
                try:
                    result = operation.fn()
                except BaseException as raised:
                    error = raised
            self._end(operation, result, error)

    def _end_as(self, operation: _Operation, done: Future[Any]) -> None:
        error = done.exception()
        self._end(operation, None if error else done.result(), error)

    def _end(self, operation: _Operation, result: Any, error: BaseException | None) -> None:
        """Give an operation its outcome, and let those begin that waited for it."""
        if operation.future.cancelled():
            pass
        elif error is not None:
            operation.future.set_exception(error)
        else:
            operation.future.set_result(result)
        with self._changed:
            self._finish(operation, error)

    def _finish(self, operation: _Operation, error: BaseException | None) -> None:
        """Let those run that waited for this operation alone, and forget it unless it has failed."""
        operation.error = error
        self._failure = self._failure or error
        for follower, needed in operation.followers:
            follower.waits_for -= 1
            follower.error = follower.error or (error if needed else None)
            self._release(follower)
        operation.followers.clear()
        for key in operation.tags & self._tags.keys():
            its = self._tags[key]
            its.readers = [reader for reader in its.readers if reader is not operation]
            its.writer = None if its.writer is operation and error is None else its.writer
            if its.writer is None and not its.readers:
                del self._tags[key]
        self._unfinished -= 1
        self._changed.notify_all()


def _by_key(tags: Iterable[Any]) -> dict[Hashable, Any]:
    if isinstance(tags, (torch.Tensor, str)):  # of which the rows or characters would be the tags
        raise ParameterError(f"The tags are {kind_of(tags)}: give a list, also of a single tag.")
    try:
        return {_key(tag): tag for tag in tags}
    except TypeError as error:
        raise ParameterError(f"A tag is no tensor and not hashable: {error}.") from None


def _key(tag: Any) -> Hashable:
    """Return what tells tags apart: a tensor's identity, or the tag, which must be hashable."""
    return (torch.Tensor, id(tag)) if isinstance(tag, torch.Tensor) else (None, hash(tag), tag)

"""A dependency engine: operations run as soon as the things that they read and change are free.

This is the engine of MXNet (T. Chen et al., "MXNet: A Flexible and Efficient Machine Learning
Library for Heterogeneous Distributed Systems", 2015) for functions of Python. An operation names its
*tags*: the things that it reads, and those that it changes. The results are those of running all
operations one after another, in the order in which they were pushed.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.errors import ParameterError, kind_of

_LANE = object()
"""The tag that every ordered operation changes."""


@dataclass(order=True)
class _Operation:
    """An operation; of those that are ready, the least one runs first."""

    place: tuple[float, int]
    fn: Callable[[], Any] = field(compare=False)
    tags: frozenset[Hashable] = field(compare=False)
    future: Future[Any] = field(compare=False, default_factory=Future)
    waits_for: int = field(compare=False, default=0)
    followers: list[tuple[_Operation, bool]] = field(compare=False, default_factory=list)
    """Those that wait for it, and whether they need what it makes."""
    error: BaseException | None = field(compare=False, default=None)


@dataclass
class _Tag:
    """The operations on a tag that have not run: the last that changes it, and later ones that read it.

    A writer that has failed stays.
    """

    writer: _Operation | None = None
    readers: list[_Operation] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Identity:
    """A tensor as a tag, which is equal to itself only."""

    tensor: torch.Tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.tensor is self.tensor


class Engine:
    """Run operations in threads, in an order that their dependencies allow.

    Operations that only read a tag run together; one that changes it runs alone. Torch releases the
    GIL in its kernels and in collectives, so these overlap; Python code does not.

    If an operation raises an exception, so does every later one that reads or changes what it should
    have changed, without being run. A tag that was not made stays so.

    Use the engine as a context manager, which waits for all operations at the end.

    Args:
        threads: The greatest number of operations that run at once.
    """

    def __init__(self, threads: int = 4) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ParameterError(f"threads = {threads!r}: give a whole number of at least 1.")
        self._changed = threading.Condition()
        self._tags: dict[Hashable, _Tag] = {}
        self._ready: list[_Operation] = []
        self._pushed, self._unfinished, self._closed = 0, 0, False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"sparkdl-engine-{i}")
            for i in range(threads)
        ]
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
        """Add an operation, and return at once.

        Args:
            fn: The operation, without arguments. It must not wait for futures of this engine.
            read: The tags that it reads: tensors, each standing for itself and not for its views,
                or any hashable objects.
            mutate: The tags that it changes, whether it reads them or not.
            ordered: Whether it runs after all ordered operations before it, as collectives must:
                then all ranks run them in the order in which they push them. If one fails, so do
                all ordered ones behind it.
            priority: Of the operations that may run, those with the highest number run first.

        Returns:
            The future of what ``fn`` returns.

        Raises:
            sparkdl.ParameterError: ``fn`` or a tag cannot be used, or the engine is closed.
        """
        if not callable(fn):
            raise ParameterError(f"fn is {kind_of(fn)}: give a function without arguments.")
        changes = {_tag_of(tag) for tag in mutate} | ({_LANE} if ordered else set())
        reads = {_tag_of(tag) for tag in read} - changes
        with self._changed:
            if self._closed:
                raise ParameterError("This Engine is closed: make a new one.")
            self._pushed += 1
            self._unfinished += 1
            operation = _Operation((-priority, self._pushed), fn, frozenset(reads | changes))
            before: dict[int, tuple[_Operation, bool]] = {}
            for tag in operation.tags:
                its = self._tags.setdefault(tag, _Tag())
                if its.writer is not None:
                    before[id(its.writer)] = its.writer, True
                if tag in changes:
                    for reader in its.readers:
                        before.setdefault(id(reader), (reader, False))
                    self._tags[tag] = _Tag(operation)
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

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.close()
        if kind is None:
            self.wait()

    def _release(self, operation: _Operation) -> None:
        """Add an operation to those that are ready, if it waits for nothing."""
        if not operation.waits_for:
            heapq.heappush(self._ready, operation)
            self._changed.notify_all()

    def _work(self) -> None:
        """Run what is ready, until the engine is closed and everything has run."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ready or (self._closed and not self._unfinished)
                )
                if not self._ready:
                    return
                operation = heapq.heappop(self._ready)
            future, error = operation.future, operation.error
            if not future.set_running_or_notify_cancel():
                error = error or CancelledError()
            elif error is not None:
                future.set_exception(error)
            else:
                try:
                    future.set_result(operation.fn())
                except BaseException as raised:
                    error = raised
                    future.set_exception(raised)
            with self._changed:
                self._finish(operation, error)

    def _finish(self, operation: _Operation, error: BaseException | None) -> None:
        """Let those run that waited for this operation alone, and forget it unless it has failed."""
        operation.error = error
        self._failure = self._failure or error
        for follower, needed in operation.followers:
            follower.waits_for -= 1
            if needed:
                follower.error = follower.error or error
            self._release(follower)
        operation.followers.clear()
        for tag in operation.tags & self._tags.keys():
            its = self._tags[tag]
            its.readers = [reader for reader in its.readers if reader is not operation]
            if its.writer is operation and error is None:
                its.writer = None
            if its.writer is None and not its.readers:
                del self._tags[tag]
        self._unfinished -= 1
        self._changed.notify_all()


def _tag_of(tag: Any) -> Hashable:
    if isinstance(tag, torch.Tensor):
        return _Identity(tag)
    try:
        hash(tag)
    except TypeError:
        raise ParameterError(
            f"A tag is {kind_of(tag)}: give tensors or hashable objects."
        ) from None
    return tag  # type: ignore[no-any-return]

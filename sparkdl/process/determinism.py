"""Seeding of the global generators of ``torch`` (CPU), ``numpy`` and ``random``, and torch's threads.

Models and augmentations may draw from these generators. The number of threads matters too: it changes
the bits of a sum.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class _Generators:
    """The state of this process's global generators.

    ``depth`` is the number of open blocks that seed them; if ``lent``, their state from before the
    outermost need not be restored. ``seeded`` counts seedings for work in :func:`steadily`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth, self.lent, self.seeded = 0, False, 0


_GENERATORS = _Generators()
"""The one instance of this process; a driver may fit in several threads."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed ``torch`` (CPU), ``numpy`` and ``random`` inside the block, and restore them after it.

    Other threads wait for its end.
    """
    own = _GENERATORS
    with own.lock:
        kept = None if own.lent and not own.depth else _states()
        own.depth += 1
        try:
            _seed(seed)
            yield
        finally:
            own.depth -= 1
            if kept is not None:
                _restore(kept)


@contextlib.contextmanager
def generators_lent() -> Iterator[None]:
    """Restore the generators once, at the end of this block, and not after each :func:`seeded` in it.

    Saving and restoring them takes ten times as long as seeding them. A :func:`seeded` block inside
    another one still restores them.
    """
    own = _GENERATORS
    with own.lock:
        kept, own.lent = _states(), True
    try:
        yield
    finally:
        with own.lock:
            own.lent = False
            _restore(kept)


def steadily(who: Hashable, work: Callable[[Callable[[int], object]], T]) -> T:
    """Return ``work(seed)``, whose draws from the global generators are the same in any process.

    ``work`` calls ``seed(number)`` before each piece of its work, and must be pure but for the
    draws. The generators are restored afterwards.

    Seeding before each of many small pieces that draw nothing would take as long as the pieces
    themselves. So work of a ``who`` that has not been seen to draw first runs unseeded, and runs
    again, seeded, if it drew.
    """
    if getattr(_thread, "beside", False):
        return work(_leave)
    own = _GENERATORS
    with own.lock:
        before, drew = _states(), True
        try:
            if who not in _drawing:
                result = work(_leave)
                drew = not _alike(before, _states())
                if not drew:
                    return result
                _drawing.add(who)
                _restore(before)
            own.seeded += 1
            return work(_seed)
        finally:
            if drew:
                _restore(before)


def times_seeded() -> int:
    """Return how often :func:`steadily` seeded work because it draws."""
    return _GENERATORS.seeded


def work_beside() -> None:
    """Mark this thread as one that runs beside a thread that draws from the generators.

    From then on :func:`steadily` leaves the generators alone in this thread, so no work that draws
    may run in it.
    """
    _thread.beside = True


_drawing: set[Hashable] = set()
_thread = threading.local()


def _leave(seed: int) -> None:
    """Seed nothing."""


def _seed(seed: int) -> None:
    # torch.manual_seed takes a hundred times longer: for each accelerator type that is not in use,
    # it stores a stack trace as text, in case the call fails later
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


_States = tuple[torch.Tensor, Any, object]


def _states() -> _States:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _alike(one: _States, other: _States) -> bool:
    return (
        torch.equal(one[0], other[0])
        and one[1][2:] == other[1][2:]
        and np.array_equal(one[1][1], other[1][1])
        and one[2] == other[2]
    )


def _restore(states: _States) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])  # type: ignore[arg-type]


class _Threads:
    """The number of open :func:`torch_threads` blocks, and of threads before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open, self.before = 0, 0


_THREADS = _Threads()


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use ``count`` torch threads inside the block, and the previous number afterwards.

    Blocks of one thread must not be nested. Each Python thread has its own number, and a new one
    starts with the number that any thread set last. So the previous number cannot be read at the
    start of a block if fits run in several threads.
    """
    own = _THREADS
    with own.lock:
        if not own.open:
            own.before = torch.get_num_threads()
        own.open += 1
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with own.lock:
            own.open -= 1
            torch.set_num_threads(own.before)

"""Random draws inside models: from the generators of ``torch`` (CPU), ``numpy`` and ``random``.

How many threads torch computes with: their number changes the bits of a sum.
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
    """Those of this process. ``depth``: how many blocks that seed them are open; ``lent``: whether
    nobody wants them back as they were before the outermost of these; ``seeded``: how often they were
    for work in :func:`steadily`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth, self.lent, self.seeded = 0, False, 0


_GENERATORS = _Generators()
"""There is one of each in a process, and a driver may fit in several threads."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed ``torch`` (CPU), ``numpy`` and ``random`` inside the block; restore them after it. Other
    threads wait for its end."""
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
    """Blocks of :func:`seeded` in this one leave the generators as they are at their end, unless they
    are in one another: to keep and to restore them takes ten times as long as to seed them. They are
    restored once, at the end of this block."""
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
    """``work(seed)``, so that what it draws from the generators is the same in any process: it calls
    ``seed(number)`` before each piece of what ``who`` does, and is pure but for the draws. The
    generators are left as they were.

    To seed for each of many small pieces that draw nothing would take as long as these: work of
    somebody who was not seen to draw is done without, and done again if it has drawn.
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
    """How often work was seeded in :func:`steadily`, since it draws."""
    return _GENERATORS.seeded


def work_beside() -> None:
    """From here on :func:`steadily` leaves the generators alone in this thread, which works beside one
    that draws from them; nobody who draws may work in it."""
    _thread.beside = True


_drawing: set[Hashable] = set()
_thread = threading.local()


def _leave(seed: int) -> None:
    """Seeds nothing."""


def _seed(seed: int) -> None:
    # torch.manual_seed takes a hundred times longer: for each kind of accelerator that is not
    # in use it keeps the stack as text, in case the call fails once it is
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
    """``before``: how many there were when the first of the ``open`` blocks began."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open, self.before = 0, 0


_THREADS = _Threads()


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """``count`` of them inside the block, which is in no other one; afterwards as many as before.

    Each thread of Python's has its own number, and one that begins takes the last that any has set: so
    it may not be asked what there was before, where fits run in several.
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

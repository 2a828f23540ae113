"""Seeding of the global generators of ``torch`` (CPU), ``numpy`` and ``random``, and torch's threads.

Models and augmentations may draw from these generators. The number of threads matters too: it changes
the bits of a sum.

Process-wide torch settings that affect numbers: a driver's settings also apply in its tasks.

A user sets them once, at the top of a program or a notebook, and by themselves they reach no other
process. For example, a model with tensors of the default dtype would be built with another dtype on the
executors. Workers are shared, so each task restores the settings that it found.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from operator import attrgetter
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


_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn.enabled",
)
_OLD_PRECISIONS = ("matmul precision", "cudnn.allow_tf32")
_PRECISIONS = tuple(
    f"{part}fp32_precision"
    for part in (
        *("", "cuda.matmul.", "cudnn.", "cudnn.conv.", "cudnn.rnn."),
        *("mkldnn.", "mkldnn.matmul.", "mkldnn.conv.", "mkldnn.rnn."),
    )
)
"""Settings that exist since torch 2.9.

Once one of them is set, torch's earlier names for the same settings raise an error. So a process sets
exactly what the driver has set.
"""


@dataclass(frozen=True)
class Numerics:
    """Settings by name; settings that are not in ``values`` are left alone."""

    values: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def here() -> Numerics:
        """Return the present settings of this process."""
        try:
            precisions = _values(_OLD_PRECISIONS)
        except RuntimeError:  # the newer names are in use
            precisions = _values(_PRECISIONS)
        found = {**_values(("default dtype", "deterministic")), **precisions, **_values(_FLAGS)}
        return Numerics(tuple(found.items()))

    def use(self) -> None:
        """Apply these settings until the task ends (:func:`put_back`)."""
        if self == _process.used:
            return
        now = Numerics.here()
        if _process.before is None:
            _process.before = now
        self._set(now)
        _process.used = self

    def _set(self, now: Numerics) -> None:
        known = dict(now.values)
        for name, value in self.values:
            if name in known and known[name] == value:
                continue
            if name in _FUNCTIONS:
                _FUNCTIONS[name][1](value)
                continue
            place, _, attribute = f"backends.{name}".rpartition(".")
            with contextlib.suppress(AttributeError):  # torch of another version lacks it
                setattr(attrgetter(place)(torch), attribute, value)


def put_back() -> None:
    """Restore the settings from before the first :meth:`Numerics.use`."""
    if _process.before is not None:
        _process.before._set(Numerics.here())
        _process.before = _process.used = None


_FUNCTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}
"""What reads a setting and what sets it, for those that are no attributes of ``torch.backends``."""


def _values(names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        with contextlib.suppress(AttributeError):  # torch of another version lacks it
            get = _FUNCTIONS[name][0] if name in _FUNCTIONS else None
            found[name] = get() if get else attrgetter(f"backends.{name}")(torch)
    return found


@dataclass
class _Process:
    """The settings that a task applied, if any, and those to restore afterwards."""

    used: Numerics | None = None
    before: Numerics | None = None


_process = _Process()

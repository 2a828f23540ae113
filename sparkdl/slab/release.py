"""Release of what the processes of a node keep of a run between its tasks.

Spark's workers are pooled. Each keeps the replica, the mapped slabs and other parts of a run for its
next task, while the task that ends the run on a node runs in only one of them. Without further
measures, the others would keep this memory until their next fit, or until Spark ends them after an idle
minute. Therefore a process that keeps something of a run *watches* the run's slab root: a thread
notices that the root was removed, and calls every function that was registered by :func:`released`.
What these drop is only a cache: a task that is still running builds it again.

A GPU's memory must be free when the next fit or prediction begins. The process that removes a root
therefore waits for the watchers that keep something on a GPU.

For the same reason a module that predicts is kept on a GPU for :data:`KEPT_SECONDS` after its last use,
but no longer than until this process needs the memory for a fit. Released memory also goes back to the
GPU driver; torch would keep it for this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from sparkdl.process.memory import give_heap_back
from sparkdl.slab.root import SlabConfig, open_private, open_root, remove_root

WATCHED = "watched"
LOOK_SECONDS = 0.1
KEPT_SECONDS = 5.0
AWAITED_SECONDS = 10.0
"""The longest time that a process which removes a root waits for watchers, which may be busy."""

_Drop = TypeVar("_Drop", bound=Callable[[str], None])
_drops: list[Callable[[str], None]] = []
_watched: dict[str, int] = {}
"""The file descriptors by which this process watches roots, by run."""


def released(drop: _Drop) -> _Drop:
    """Register a function that drops what this process keeps of a run, given the run's slab root."""
    _drops.append(drop)
    return drop


def release(run: str) -> None:
    """Drop everything that this process keeps of the run whose slab root has the name ``run``."""
    for drop in _drops:
        drop(run)
    give_back()


def watch(config: SlabConfig, awaited: bool = False) -> None:
    """Release what this process keeps of a run as soon as the run's root on this node is removed.

    The root of samples that were placed before the run is watched too. If ``awaited``, the process
    that removes the root waits for this one.
    """
    if config.samples:
        watch(SlabConfig(config.directory, config.samples))
    held = _watched.get(config.name)
    if held is None:
        root = open_root(config)
        if root is None:
            return
        try:
            held = open_private(root.directories[-1] / WATCHED, os.O_RDWR | os.O_CREAT)
        except OSError:  # the disk is full, or the root was just removed
            return
        _watched[config.name] = held
        threading.Thread(target=_watch, args=(config.name, held), daemon=True).start()
    if awaited:
        fcntl.flock(held, fcntl.LOCK_SH)


def _watch(run: str, held: int) -> None:
    try:
        while os.fstat(held).st_nlink:
            time.sleep(LOOK_SECONDS)
        _watched.pop(run, None)  # a root of this name that is made from now on is watched anew
        release(run)
    finally:
        os.close(held)


def clean_here(config: SlabConfig) -> None:
    """Remove a run's slabs from this node, and release what this process keeps of the run.

    Wait for the processes that watch the root and keep something on a GPU.
    """
    held = -1
    with contextlib.suppress(OSError):  # nobody watches it, or it belongs to someone else
        if root := open_root(config):
            held = open_private(root.directories[-1] / WATCHED, os.O_RDONLY)
    remove_root(config)
    release(config.name)
    if held >= 0:
        until = time.monotonic() + AWAITED_SECONDS
        while not _free(held) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 4)
        os.close(held)


def _free(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def give_back() -> None:
    """Give the memory that this process no longer uses back to the GPU driver and the system.

    Modules may be in reference cycles and frozen (see :mod:`sparkdl.spark.worker`), so that the garbage
    collector would not find them.
    """
    if torch.cuda.is_initialized():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()
    give_heap_back()


def leave_room(device: torch.device) -> None:
    """Give a GPU's cached memory back if another process could not reserve as much as this one.

    Spark's idle workers take turns. Each computes an iteration of the shuffle engine once in a while,
    and needs then what this one has needed now.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < torch.cuda.memory_reserved(device):
            torch.cuda.empty_cache()


class Idle:
    """A cached object that is released, by calling ``drop``, once it has been idle for some time."""

    def __init__(self, drop: Callable[[], None], seconds: float = KEPT_SECONDS) -> None:
        self._drop, self._seconds = drop, seconds
        self._lock, self._used, self._watched = threading.Lock(), 0.0, False

    def used(self) -> None:
        """Note that the object is being used now."""
        with self._lock:
            self._used = time.monotonic()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="sparkdl-idle", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                left = self._used + self._seconds - time.monotonic()
                if left <= 0:
                    self._watched = False
                    break
            time.sleep(left)
        self.drop()

    def drop(self) -> None:
        """Release the object now, because its memory is needed."""
        self._drop()
        give_back()


_idle: list[Idle] = []


def kept_while_used(drop: Callable[[], None]) -> Idle:
    """Return an :class:`Idle` that stays registered for the life of this process."""
    _idle.append(Idle(drop))
    return _idle[-1]


def make_room() -> None:
    """Release everything that is kept for predictions."""
    for kept in _idle:
        kept.drop()

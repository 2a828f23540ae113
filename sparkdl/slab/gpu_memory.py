"""Release of the GPU memory that the processes of a node keep between tasks.

Spark's workers are pooled. Each keeps its replica for the next task and its module for the next
prediction, while the task that ends a fit runs in only one of them. Without further measures, the next
fit on a GPU would find the memory of all the others taken. Therefore:

* A process that keeps a replica *holds* a file of the run's slab root. When the root is removed, all
  holders notice and release their memory, and the process that removes the root waits for that.
* A module that predicts is kept for :data:`KEPT_SECONDS` after its last use, but no longer than until
  this process needs the memory for a fit.

Released memory also goes back to the GPU driver; torch would keep it for this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from sparkdl.slab.root import open_private

HELD = "on-gpus"
KEPT_SECONDS = 5.0
LOOK_SECONDS = 0.1
AWAITED_SECONDS = 10.0
"""The longest time that a process which removes a root waits for holders, which may be busy."""


def hold(root: Path, let_go: Callable[[], None]) -> threading.Thread:
    """Call ``let_go``, in a thread of this process, as soon as ``root`` is removed."""
    held = os.open(root / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    thread = threading.Thread(target=_hold, args=(held, let_go), name="sparkdl-gpu", daemon=True)
    thread.start()
    return thread


def _hold(held: int, let_go: Callable[[], None]) -> None:
    try:
        while os.fstat(held).st_nlink:
            time.sleep(LOOK_SECONDS)
        let_go()
        give_back()
    finally:
        os.close(held)


@contextlib.contextmanager
def holders_awaited(roots: list[Path]) -> Iterator[None]:
    """Remove the roots inside the block.

    At its end, wait until their holders have released their memory.
    """
    with contextlib.ExitStack() as opened:
        files = []
        for root in roots:
            with contextlib.suppress(OSError):  # nobody holds it
                files.append(opened.enter_context(open(root / HELD, "rb", opener=open_private)))
        yield
        until = time.monotonic() + AWAITED_SECONDS
        for file in files:
            while not _free(file.fileno()) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS / 4)


def _free(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def give_back() -> None:
    """Release the GPU memory that this process no longer uses.

    Modules may be in reference cycles and frozen (see :mod:`sparkdl.spark.worker`), so that the garbage
    collector would not find them.
    """
    if torch.cuda.is_initialized():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
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

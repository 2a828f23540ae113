"""When the processes of a node let go of what they keep on GPUs between tasks.

Spark's workers are pooled: each of them keeps its replica for the next task, and its module for the
next prediction, while the task that ends a fit runs in one of them alone. On a GPU the next fit would
find the memory of all others taken. So

* whoever keeps a replica there *holds* a file of the run's slab root. With the root it goes, all
  holders notice and let go, and who has removed the root waits for that;
* a module that predicts is kept for :data:`KEPT_SECONDS` after it was last asked for, and no longer
  than until this process needs the room for a fit.

What was let go of is given back to the driver of the GPU, too; torch would keep it for this process.
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
"""So long who removes a root waits for holders, which may be busy."""


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
    """In the block the roots are removed; after it their holders have let go."""
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
    """What this process does not use any more of GPUs. Modules may be in cycles, and frozen (see
    :mod:`sparkdl.spark.worker`), where the collector does not look for any."""
    if torch.cuda.is_initialized():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()


class Idle:
    """What is kept until it was not used for a while. ``drop``: lets go of it."""

    def __init__(self, drop: Callable[[], None], seconds: float = KEPT_SECONDS) -> None:
        self._drop, self._seconds = drop, seconds
        self._lock, self._used, self._watched = threading.Lock(), 0.0, False

    def used(self) -> None:
        """It is used now."""
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
        """Now: the room is needed."""
        self._drop()
        give_back()


_idle: list[Idle] = []


def kept_while_used(drop: Callable[[], None]) -> Idle:
    """See :class:`Idle`; of this process, for all its life."""
    _idle.append(Idle(drop))
    return _idle[-1]


def make_room() -> None:
    """Let go of what is kept for predictions."""
    for kept in _idle:
        kept.drop()

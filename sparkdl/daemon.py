"""The daemon that forks Spark's Python workers, with torch and sparkdl's tasks already imported.

Spark starts it once per executor, as ``python -m sparkdl.daemon``, if the session has
``spark.python.daemon.module=sparkdl.daemon`` (:func:`sparkdl.session` sets it). PySpark's own daemon
imports nothing, so each of its workers imports torch by itself. That costs some seconds and 200 MB
per worker, and again whenever a worker is replaced that was idle for a minute. Workers that are
forked here share that memory. The garbage collector ignores it (:func:`gc.freeze`), so it stays
shared, and collections after a task are short.

Only a process without threads can be forked safely. The imports start no threads except those of
jemalloc (pyarrow links it), which handles forks itself. The thread pools of OpenMP and torch start
with the first operation, hence in the workers, and so does CUDA.

Whoever can connect to the daemon's Unix socket can run code as its user. PySpark creates the socket
in a directory that all users share and relies on the umask. Here it lies in a private directory
(:func:`use_private_directory`).

Each worker is a session of its own (:func:`give_workers_sessions`). Linux divides the processor
among sessions first, and workers that wait for each other at every step lose a tenth of their speed
if they share one session.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import mmap
import os
import shutil
import signal
import warnings
import zlib
from pathlib import Path
from typing import Any

from sparkdl.process.system import longest_socket_path
from sparkdl.slab.root import marked_directory
from sparkdl.spark.worker import quiet_hang_ups

MODULES = (
    "pandas",  # pyarrow imports it when it makes NumPy arrays
    "pyspark.worker",
    "sparkdl.consistency.asynchronous",
    "sparkdl.consistency.diloco",
    "sparkdl.consistency.gossip",
    "sparkdl.data.records",
    "sparkdl.engines.shuffle.engine",  # the tasks of a fit, and torch
    "sparkdl.infer.model",
    "sparkdl.infer.score",
    "sparkdl.infer.evaluate",
    "sparkdl.optim",
    "sparkdl.train.trainer",  # what models and callbacks of users refer to
)


ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""The variable of torch that, set to 1, lets it look for GPUs without starting CUDA."""
SOCKETS = "PYTHON_WORKER_FACTORY_SOCK_DIR"
"""The variable in which Spark passes the directory for the daemon's socket; unset if it listens on
TCP."""
_SIGNAL_AT_PARENTS_DEATH = 1
"""``PR_SET_PDEATHSIG`` of Linux's prctl."""
LONGEST_PARENT = (
    longest_socket_path()
    - len("/sparkdl-12345678")
    - len("/.01234567-0123-0123-0123-012345678901.sock")
)
"""The longest parent directory, in bytes, that leaves room for the socket in the path of a Unix
socket."""


def preload() -> None:
    """Import :data:`MODULES`, and freeze all present objects for the garbage collector.

    A module may ask torch for GPUs when it is imported. Torch is made to ask NVML, the driver's
    management library, and not CUDA itself, which a process forked afterwards could not use.
    """
    gc.disable()
    asked_before = os.environ.get(ASK_NVML)
    os.environ[ASK_NVML] = "1"
    for module in MODULES:
        importlib.import_module(module)
    if asked_before is None:
        del os.environ[ASK_NVML]
    else:
        os.environ[ASK_NVML] = asked_before
    gc.collect()
    gc.freeze()
    gc.enable()


def use_private_directory() -> None:
    """Create a directory of mode 0700 for the daemon's socket.

    The directory is removed when the daemon ends; that of a killed daemon is removed by the next
    one. If the path would be too long for a socket, the directory that Spark passed is used.
    """
    parent = os.environ.get(SOCKETS)
    if parent is None or len(os.fsencode(parent)) > LONGEST_PARENT:
        return
    directory = str(marked_directory(Path(parent)))
    os.environ[SOCKETS] = directory
    atexit.register(shutil.rmtree, directory, ignore_errors=True)


def give_workers_sessions() -> None:
    """Make every process that this one forks from now on a session of its own; on Linux only.

    PySpark's daemon ends its workers with a signal to its process group, which these workers have
    left. So the kernel is asked to kill them when the daemon ends, for whatever reason. The daemon
    itself ends at once, without the quarter of a second in which an interpreter tears down its
    imported modules.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    daemon, begun = os.getpid(), False

    def begin() -> None:
        nonlocal begun
        if begun:  # forked by a worker
            return
        begun = True
        os.setsid()
        prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
        if os.getppid() != daemon:  # the daemon ended before prctl was called
            os._exit(1)

    os.register_at_fork(after_in_child=begin)
    atexit.register(os._exit, 1)


def show_warnings_once() -> None:
    """Show each of Python's warnings once, whichever of the processes forked from now on raises it.

    Replicas run the same code, so each would show what a library warns of.
    """
    seen, show = mmap.mmap(-1, 1 << 16), warnings.showwarning  # shared with the forks

    def show_once(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
        text = f"{category.__name__} {filename} {lineno} {message}"
        place = zlib.crc32(text.encode("utf-8", "replace")) % len(seen)
        if not seen[place]:
            seen[place] = 1
            show(message, category, filename, lineno, *more)

    warnings.showwarning = show_once  # type: ignore[assignment]


if __name__ == "__main__":
    from pyspark.daemon import manager

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # each worker would draw its own
    preload()
    quiet_hang_ups()
    give_workers_sessions()
    show_warnings_once()
    use_private_directory()
    manager()

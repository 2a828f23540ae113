"""The daemon that forks Spark's Python workers, with all that our tasks need imported beforehand.

Spark starts it once an executor, as ``python -m sparkdl.daemon``, where the session has
``spark.python.daemon.module=sparkdl.daemon`` (:func:`sparkdl.session` sets it). PySpark's own daemon
imports nothing: each of its workers imports torch for itself, which costs some seconds and 200 MB
apiece, again whenever a worker that was idle for a minute is replaced. Workers forked here
share that memory, and the garbage collector leaves it alone (:func:`gc.freeze`), so that it stays
shared and collections after a task are short.

Only a process without threads is forked safely. The imports start none but jemalloc's (pyarrow
links it), which handles forks itself; the pools of OpenMP and torch start with the first operation,
hence in the workers, and so does CUDA.

Whoever can connect to the daemon's Unix socket can run code as its user. PySpark leaves that to the
umask, in a directory of all users; here the socket is in a private one (:func:`use_private_directory`).

Each worker is a session of its own (:func:`give_workers_sessions`): Linux divides the processor among
sessions first, and workers that wait for each other at every step lose a tenth where they share one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import shutil
import signal
from pathlib import Path

from sparkdl.process.system import longest_socket_path
from sparkdl.slab.root import marked_directory
from sparkdl.spark.worker import quiet_hang_ups

MODULES = (
    "pandas",  # pyarrow imports it where it makes NumPy arrays
    "pyspark.worker",
    "sparkdl.engines.shuffle.engine",  # the tasks of a fit, and torch
    "sparkdl.infer.predict",
    "sparkdl.infer.evaluate",
    "torch._dynamo",  # the first optimizer of a process imports it
)


ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Torch's variable: where it is 1, looking whether there is a GPU does not start CUDA."""
SOCKETS = "PYTHON_WORKER_FACTORY_SOCK_DIR"
"""Where Spark wants the daemon's socket; not set where it listens on TCP."""
_SIGNAL_AT_PARENTS_DEATH = 1
"""``PR_SET_PDEATHSIG`` of Linux's prctl."""
LONGEST_PARENT = (
    longest_socket_path()
    - len("/sparkdl-12345678")
    - len("/.01234567-0123-0123-0123-012345678901.sock")
)
"""Bytes that are left for it in the path of a Unix socket."""


def preload() -> None:
    """Import :data:`MODULES`, and take all that there is now out of the collector's sight.

    A module may ask torch for GPUs when it is imported. Torch then asks the driver's library of
    management, and not CUDA itself, which no process could use that is forked afterwards.
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
    """Make a directory of mode 0700 for the daemon's socket, which goes with the daemon; that of a
    daemon that was killed goes with the next one.

    Where its path would be too long for a socket's, the directory stays the one that Spark says.
    """
    parent = os.environ.get(SOCKETS)
    if parent is None or len(os.fsencode(parent)) > LONGEST_PARENT:
        return
    directory = str(marked_directory(Path(parent)))
    os.environ[SOCKETS] = directory
    atexit.register(shutil.rmtree, directory, ignore_errors=True)


def give_workers_sessions() -> None:
    """Make every process that this one forks from now on a session of its own; on Linux only.

    PySpark's daemon ends its workers by a signal to its process group, in which they then are no
    longer. So the kernel is asked to end them with the daemon, however that ends; and it ends at once,
    without the quarter of a second in which an interpreter takes down what it has imported.
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
        if os.getppid() != daemon:  # it ended before the kernel was asked
            os._exit(1)

    os.register_at_fork(after_in_child=begin)
    atexit.register(os._exit, 1)


if __name__ == "__main__":
    from pyspark.daemon import manager

    preload()
    quiet_hang_ups()
    give_workers_sessions()
    use_private_directory()
    manager()

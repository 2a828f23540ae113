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
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "pandas",  # PySpark's Arrow tasks import it
    "pyspark.worker",
    "sparkdl.train.shuffle",  # the tasks of a fit, and torch
    "sparkdl.infer.predict",
    "sparkdl.infer.evaluate",
    "torch._dynamo",  # the first optimizer of a process imports it
)


def preload() -> None:
    """Import :data:`MODULES`, and take all that there is now out of the collector's sight."""
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    from pyspark.daemon import manager

    preload()
    manager()

"""Keeping Python's garbage collector out of the way in Spark's workers."""

from __future__ import annotations

import gc

_tasks = 0


def settle_collector() -> None:
    """Call at the end of a task.

    PySpark's daemon runs a full collection after every task. With torch imported, that walks about
    half a million objects: 100 ms and more, several times an iteration. They are modules, functions
    and the live replica, and stay as long as the process: freezing them takes them out of the walk.
    It is done after tasks 1, 2, 4, 8, ..., since the first few still import and build.
    """
    global _tasks
    _tasks += 1
    if _tasks & (_tasks - 1) == 0:
        gc.collect()
        gc.freeze()

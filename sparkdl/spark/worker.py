"""Adjustments of the PySpark worker that runs sparkdl's tasks, and a check for cancelled tasks.

Tasks call :func:`finish_task` at their end, unless :func:`sparkdl.spark.frames.map_frames` runs them,
which does it.

*Garbage collection.* PySpark's daemon runs a full collection after every task. With torch imported,
that traverses about half a million objects, which takes 100 ms and more, several times per
iteration. These objects are modules, functions and the live replica, and stay as long as the
process. Freezing them excludes them from the traversal. This happens after tasks 1, 2, 4, 8, ...,
because the first few still import and build.

*Settings of torch.* Settings that a task has changed are restored, see
:mod:`sparkdl.process.determinism`.

*Closed connections.* Spark closes its connection to a worker that was idle for a minute, and to all
workers when it stops. With a Unix socket the worker's last write then fails, and the daemon prints
a BrokenPipeError. This is not a fault, and is not printed: after any task if :mod:`sparkdl.daemon`
forks the workers, otherwise only after tasks of sparkdl.

*A user's mistake.* PySpark reports the whole traceback of an exception, 30 to 60 lines above the
sentence that counts, unless a variable of the environment says otherwise. :func:`mistakes_told_briefly`
sets it for the mistake that ends this process; frames of the user's own code are told in any case.

*Cancelled tasks.* When Spark cancels a task, it closes the connection and reports that the task has
ended. The worker continues until it next reads or writes; :func:`task_cancelled` detects this.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from pyspark import TaskContext

from sparkdl.errors import UserError, frames_of_user
from sparkdl.process.determinism import put_back
from sparkdl.process.system import has_hung_up, label_output

_tasks = 0


def finish_task() -> None:
    """Restore torch's settings and end the label of what is printed.

    In a worker, also freeze objects and silence closed connections.
    """
    global _tasks
    put_back()
    label_output("")
    if not quiet_hang_ups():
        return
    _tasks += 1
    if _tasks & (_tasks - 1) == 0:
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def mistakes_told_briefly() -> Iterator[None]:
    """Let Spark report a user's mistake that ends the task in the block without our frames."""
    try:
        yield
    except UserError as error:
        if TaskContext.get() is not None:
            cause = error.__cause__
            if cause is not None and (frames := frames_of_user(cause)):
                error.add_note(frames)
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"  # PySpark ends the process after an exception
        raise


def task_cancelled() -> bool:
    """Return whether Spark has cancelled the task that calls this; False outside a worker."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "worker" and code.co_filename.endswith("pyspark/daemon.py"):
            quiet_hang_ups()
            return has_hung_up(frame.f_locals["sock"])
        frame = frame.f_back  # type: ignore[assignment]
    return False


def quiet_hang_ups() -> bool:
    """Silence closed connections in the daemon's output; return whether this is a worker or daemon."""
    daemon = sys.modules["__main__"]
    if getattr(getattr(daemon, "__spec__", None), "name", "") != "pyspark.daemon":
        if "pyspark.daemon" not in sys.modules:
            return False
        daemon = sys.modules["pyspark.daemon"]  # under another daemon, e.g. a user's own
    daemon.traceback = _QuietTraceback  # type: ignore[attr-defined]
    return True


class _QuietTraceback:
    """A replacement for the daemon's ``traceback`` module in this process."""

    format_exc = staticmethod(traceback.format_exc)

    @staticmethod
    def print_exc(*args: Any, **kwargs: Any) -> None:
        """Call ``traceback.print_exc``, unless the JVM has closed the connection."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            traceback.print_exc(*args, **kwargs)

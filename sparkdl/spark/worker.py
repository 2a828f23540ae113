"""The PySpark worker that runs our tasks: some adjustments, and whether Spark still wants its result.

Tasks call :func:`finish_task` at their end.

*Collection.* PySpark's daemon runs a full garbage collection after every task. With torch imported,
that walks about half a million objects: 100 ms and more, several times an iteration. They are
modules, functions and the live replica, and stay as long as the process: freezing them takes them
out of the walk. It is done after tasks 1, 2, 4, 8, ..., since the first few still import and build.

*torch's settings.* What a task has set of them is put back, see :mod:`sparkdl.process.numerics`.

*Hanging up.* Spark drops a worker that was idle for a minute, and all of them when it stops. Over a
Unix socket the worker then fails to say goodbye, and the daemon prints a BrokenPipeError for it. That
one is nobody's error, and is not printed: after any task where :mod:`sparkdl.daemon` forks the workers,
after ours under another daemon.

*Tasks that were given up.* When Spark cancels a task it hangs up, and says that the task has ended; the
worker goes on until it next reads or writes, :func:`task_cancelled` tells.
"""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

from sparkdl.process.numerics import put_back
from sparkdl.process.system import has_hung_up

_tasks = 0


def finish_task() -> None:
    """Put torch's settings back; in a worker, keep the collector out of the way, and hang-ups quiet."""
    global _tasks
    put_back()
    if not quiet_hang_ups():
        return
    _tasks += 1
    if _tasks & (_tasks - 1) == 0:
        gc.collect()
        gc.freeze()


def task_cancelled() -> bool:
    """Whether Spark has given up the task that calls this. False outside a worker."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "worker" and code.co_filename.endswith("pyspark/daemon.py"):
            quiet_hang_ups()
            return has_hung_up(frame.f_locals["sock"])
        frame = frame.f_back  # type: ignore[assignment]
    return False


def quiet_hang_ups() -> bool:
    """Keep hang-ups out of the daemon's output; whether this is a worker or its daemon."""
    daemon = sys.modules["__main__"]
    if getattr(getattr(daemon, "__spec__", None), "name", "") != "pyspark.daemon":
        if "pyspark.daemon" not in sys.modules:
            return False
        daemon = sys.modules["pyspark.daemon"]  # under a daemon of the user's own
    daemon.traceback = _QuietTraceback  # type: ignore[attr-defined]
    return True


class _QuietTraceback:
    """The ``traceback`` that the daemon sees in this process."""

    format_exc = staticmethod(traceback.format_exc)

    @staticmethod
    def print_exc(*args: Any, **kwargs: Any) -> None:
        """As ``traceback.print_exc``, but silent where the JVM has hung up."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            traceback.print_exc(*args, **kwargs)

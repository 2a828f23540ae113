"""The user's interrupt (Ctrl-C, a notebook's stop button): the first one ends a training normally."""

from __future__ import annotations

import _thread
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = "interrupted"
"""The value of ``History.stopped`` after an interrupt."""
_TOLD = (
    "interrupted: training ends after the current iteration, and fit returns the model as it is "
    "then. Interrupt again to stop at once, without a model."
)

logger = logging.getLogger("sparkdl")


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay SIGINT inside the block; afterwards it has its usual effect.

    At its end a fit releases its resources in Spark, which takes at most some seconds. If that were
    interrupted, they would stay as long as the session. In threads other than the main thread
    nothing is changed: Python raises KeyboardInterrupt only in the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)


class Interrupt:
    """The user's requests to end the training."""

    asked = False
    again = False  # a second one: end at once


def _raises(handler: object) -> bool:
    """Return whether a handler only raises KeyboardInterrupt.

    Python's own does. PySpark's counts too: it cancels jobs first, but a fit cancels its jobs
    itself, and not in the middle of a call to Spark.
    """
    of_pyspark = str(getattr(handler, "__module__", "")).partition(".")[0] == "pyspark"
    return handler is signal.default_int_handler or of_pyspark


@contextlib.contextmanager
def _without_stack_of_py4j() -> Iterator[None]:
    """Prevent Py4J from logging inside the block that a call into the JVM was interrupted; the user
    knows."""
    loggers = [logging.getLogger(name) for name in (None, "py4j.clientserver", "py4j.java_gateway")]

    def keep(record: logging.LogRecord) -> bool:
        return "py4j" not in record.pathname

    for each in loggers:
        each.addFilter(keep)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(keep)


@contextlib.contextmanager
def interruptible(
    told: str = _TOLD, ready: Callable[[], bool] = lambda: True
) -> Iterator[Interrupt]:
    """Turn the first SIGINT inside the block into a request, which sets ``asked``.

    The next SIGINT has the effect that it had before the block, which is usually to raise
    KeyboardInterrupt. This applies only in the main thread, and only if SIGINT has a handler of
    Python and is not ignored. Otherwise nothing is changed.
    While ``ready`` returns False, a SIGINT counts as the second.
    """
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    if not ours or before in (None, signal.SIG_IGN):
        yield interrupt
        return

    quiet = contextlib.ExitStack()

    def ask(number: int, frame: FrameType | None) -> None:
        if not interrupt.asked and ready():
            interrupt.asked = True
            # in a thread: this one may hold a lock of logging, or be writing
            _thread.start_new_thread(logger.warning, (told,))
            return
        interrupt.again = True
        quiet.enter_context(_without_stack_of_py4j())
        if _raises(before):
            raise KeyboardInterrupt
        if callable(before):
            before(number, frame)
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, ask)
    try:
        yield interrupt
    except Exception:
        if interrupt.again:  # caused by the interruption, for example of a call into Spark's JVM
            raise KeyboardInterrupt from None
        raise
    finally:
        quiet.close()
        if signal.getsignal(signal.SIGINT) is ask:  # else a callback has replaced it
            signal.signal(signal.SIGINT, before)

"""The user's interrupt (Ctrl-C, a notebook's stop button): the first ends a training well."""

from __future__ import annotations

import _thread
import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = "interrupted"
"""What a history says of the reason."""
_TOLD = (
    "interrupted: training ends after the iteration under way, and fit returns the model as it stands. "
    "Interrupt again to end at once, without it."
)

logger = logging.getLogger("sparkdl")


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside the block SIGINT waits; afterwards it does what it would have done.

    What a fit gives back to Spark at its end takes at most some seconds, and cut short it would stay
    there as long as the session. In other threads than the main one nothing is changed: Python raises
    KeyboardInterrupt in that one alone.
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
    """Whether the user has asked for the end."""

    asked = False
    again = False
    """Whether that has been asked twice: at once, then."""


def _raises(handler: object) -> bool:
    """Whether a handler comes to KeyboardInterrupt alone: Python's own, and that of PySpark, which
    cancels jobs before that. A fit cancels its jobs itself, and not in the midst of a call to Spark."""
    of_pyspark = str(getattr(handler, "__module__", "")).partition(".")[0] == "pyspark"
    return handler is signal.default_int_handler or of_pyspark


@contextlib.contextmanager
def _without_stack_of_py4j() -> Iterator[None]:
    """Inside the block Py4J does not log that a call into the JVM was interrupted: who asked knows."""
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
def interruptible() -> Iterator[Interrupt]:
    """Inside the block the first SIGINT sets ``asked``; the next one does what it did before the block,
    which is to raise KeyboardInterrupt as a rule.

    Only the main thread may have it so, and only where SIGINT is not ignored or somebody else's; else
    nothing is changed.
    """
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    if not ours or before in (None, signal.SIG_IGN):
        yield interrupt
        return

    quiet = contextlib.ExitStack()

    def ask(number: int, frame: FrameType | None) -> None:
        if not interrupt.asked:
            interrupt.asked = True
            # in a thread: this one may hold a lock of logging's, or be in the midst of writing
            _thread.start_new_thread(logger.warning, (_TOLD,))
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
    except Exception as error:
        if interrupt.again:  # of what was cut short by it, such as a call into Spark's JVM
            raise KeyboardInterrupt from error
        raise
    finally:
        quiet.close()
        if signal.getsignal(signal.SIGINT) is ask:  # else a callback has put another in its place
            signal.signal(signal.SIGINT, before)

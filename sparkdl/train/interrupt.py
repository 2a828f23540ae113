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


class Interrupt:
    """Whether the user has asked for the end."""

    asked = False


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

    def ask(number: int, frame: FrameType | None) -> None:
        if not interrupt.asked:
            interrupt.asked = True
            # in a thread: this one may hold a lock of logging's, or be in the midst of writing
            _thread.start_new_thread(logger.warning, (_TOLD,))
        elif callable(before):
            before(number, frame)
        else:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, ask)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) is ask:  # else a callback has put another in its place
            signal.signal(signal.SIGINT, before)

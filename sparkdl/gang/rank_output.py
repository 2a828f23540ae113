"""The text that a rank prints, on its way to the driver."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from sparkdl.gang.channel import Channel, ChannelError

OUTPUT = "output"
"""The kind of a rank's message that has lines of text."""


class _Output(io.TextIOBase):
    """A text stream that sends lines into the channel.

    Processes that are forked from this one, such as those of a DataLoader, write to ``before``
    instead: a channel has only two ends.
    """

    def __init__(self, channel: Channel, before: TextIO) -> None:
        self._channel, self._before, self._line = channel, before, ""
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            return self._before.write(text)
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._send("\n".join(lines))
        return len(text)

    def flush(self) -> None:
        """Do nothing, because lines are sent when they are complete. In a fork, flush ``before``."""
        if os.getpid() != self._process:
            self._before.flush()

    def rest(self) -> None:
        """Send the unfinished line."""
        line, self._line = self._line, ""
        if line:
            self._send(line)

    def _send(self, text: str) -> None:
        with contextlib.suppress(ChannelError):
            self._channel.send((OUTPUT, text))


@contextlib.contextmanager
def output_sent(channel: Channel | None) -> Iterator[Callable[[], None]]:
    """Send what is printed in the block to the driver, if there is a channel.

    The function that is yielded sends the unfinished line.
    """
    if channel is None:
        yield lambda: None
        return
    stream = _Output(channel, sys.stdout)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield stream.rest

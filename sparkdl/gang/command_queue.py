"""A rank's end of its channel: the commands that arrive from the driver, and the results sent to it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time

from sparkdl.gang.channel import Channel, ChannelError

RESULT = "result"
"""The kind of a message with results."""
END_SECONDS = 3.0
"""The time in which a rank that still computes must end after the driver has closed the connection."""
MOST_HELD, HOLD_SECONDS = 3, 0.05
"""The largest number of results that are sent together, and the time for which one may be held."""


class ResultSender:
    """The results that a rank sends to the driver.

    If the driver has already sent more commands, the results of short ones are sent together, which
    wakes it less often while ranks compute. No result is held for long, even if the next command
    waits for another rank.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._held = channel, list[tuple[bytes, float]]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._look_after, name="sparkdl-results", daemon=True).start()

    def add(self, content: bytes, more: bool) -> None:
        """Add the result of the command that has just ended.

        ``more`` tells whether another has arrived.
        """
        with self._lock:
            self._held.append((content, time.monotonic()))
        if not more or len(self._held) >= MOST_HELD:
            self._send()

    def close(self) -> None:
        """Send the results that are held, and hold no more."""
        self._ended.set()
        with contextlib.suppress(ChannelError):
            self._send()

    def _send(self) -> None:
        """Send each held result with its age in seconds."""
        with self._lock:
            now, held, self._held = time.monotonic(), self._held, []
            if held:
                self._channel.send((RESULT, [(content, now - then) for content, then in held]))

    def _look_after(self) -> None:
        with contextlib.suppress(ChannelError):  # the driver has hung up, see CommandReceiver
            while not self._ended.wait(HOLD_SECONDS):
                held = self._held
                if held and time.monotonic() - held[0][1] > HOLD_SECONDS:
                    self._send()


class CommandReceiver:
    """The commands from the driver, which a thread reads.

    When the driver closes the connection, commands that have arrived are not started any more. A
    running command is interrupted as by the keyboard. If that has no effect, because the command
    waits inside a collective, the process exits.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arrived: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self._busy, self._task_cancelled = False, False
        self._lock, self._idle = threading.Lock(), threading.Event()
        threading.Thread(target=self._read, name="sparkdl-commands", daemon=True).start()

    def done(self) -> None:
        """Note that the command has ended, so that nothing is interrupted from now on."""
        with self._lock:
            self._busy = False
        self._idle.set()

    @property
    def waiting(self) -> bool:
        """Return whether another command has arrived."""
        return not self._arrived.empty()

    def next(self) -> bytes | None:
        """Wait for the next command and return it, or None at the end.

        Raises whatever prevented the command from being read.
        """
        self.done()
        content = self._arrived.get()
        if isinstance(content, Exception):
            raise content
        with self._lock:
            content = None if self._task_cancelled else content
            self._busy = content is not None
            self._idle.clear()
        return content

    def _read(self) -> None:
        try:
            while True:
                for command in self._channel.receive():
                    self._arrived.put(command)
        except (ChannelError, OSError):
            self._arrived.put(None)
        except Exception as error:  # such as a command that does not fit into memory
            self._arrived.put(error)
            self._channel.exhaust()
        with self._lock:
            self._task_cancelled = True
            if not self._busy:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not self._idle.wait(END_SECONDS):
            os._exit(1)

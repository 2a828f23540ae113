"""A rank's end of its channel: commands of the driver that come, and results that go."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time

from sparkdl.gang.channel import Channel, ChannelError

RESULT = "result"
"""The kind of a message that tells results."""
END_SECONDS = 3.0
"""After the driver has hung up, a rank that still computes has so long to end by itself."""
MOST_HELD, HOLD_SECONDS = 3, 0.05
"""So many results are told together, and none is held much longer."""


class ResultSender:
    """What the driver is told. Where it has sent other commands already, results of short ones are told
    together: that wakes it less often while ranks compute. None is held for long, also where the next
    command waits for another rank."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._held = channel, list[tuple[bytes, float]]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        threading.Thread(target=self._look_after, name="sparkdl-results", daemon=True).start()

    def add(self, content: bytes, more: bool) -> None:
        """The result of the command that has just ended; ``more``: another has come."""
        with self._lock:
            self._held.append((content, time.monotonic()))
        if not more or len(self._held) >= MOST_HELD:
            self._send()

    def close(self) -> None:
        """Tell what is held, and hold no more."""
        self._ended.set()
        with contextlib.suppress(ChannelError):
            self._send()

    def _send(self) -> None:
        """Each with its age in seconds."""
        with self._lock:
            now, held, self._held = time.monotonic(), self._held, []
            if held:
                self._channel.send((RESULT, [(content, now - then) for content, then in held]))

    def _look_after(self) -> None:
        with contextlib.suppress(ChannelError):  # the driver has hung up, see Commands
            while not self._ended.wait(HOLD_SECONDS):
                held = self._held
                if held and time.monotonic() - held[0][1] > HOLD_SECONDS:
                    self._send()


class CommandReceiver:
    """What the driver sends, read by a thread of its own.

    Where the driver hangs up, what it has sent is not begun any more. A command that is under way is
    interrupted as by the keyboard. What does not heed that, as it waits inside a collective, ends with
    this process.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arrived: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self._busy, self._task_cancelled = False, False
        self._lock, self._idle = threading.Lock(), threading.Event()
        threading.Thread(target=self._read, name="sparkdl-commands", daemon=True).start()

    def done(self) -> None:
        """The command has ended; from here on nothing is interrupted."""
        with self._lock:
            self._busy = False
        self._idle.set()

    @property
    def waiting(self) -> bool:
        """Whether another has come."""
        return not self._arrived.empty()

    def next(self) -> bytes | None:
        """Wait for the next; None at the end. Raises what kept it from being read."""
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
        except Exception as error:  # it does not fit into the memory, say
            self._arrived.put(error)
            self._channel.exhaust()
        with self._lock:
            self._task_cancelled = True
            if not self._busy:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not self._idle.wait(END_SECONDS):
            os._exit(1)

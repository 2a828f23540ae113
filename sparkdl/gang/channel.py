"""Authenticated messages between the driver and the ranks of a gang, over TCP.

[Note: what a channel protects] Commands are code, so nobody else may send one. The key of a gang is
random and reaches the ranks inside their tasks, with the protection that Spark's own messages have.
Every frame carries two keyed BLAKE2b digests (RFC 7693) of the connection's nonce, of which each end
has drawn one half, the direction, the frame number, and the length or the content. A length is
believed only after its digest. A frame that is forged, changed, repeated (also from an earlier
connection) or left out ends the connection. Nothing is encrypted.

[Note: who may keep a rank waiting] Nobody. The listener takes first messages side by side, whoever
else is silent, and knows at most :data:`MOST_SILENT` connections that have not sent one, of a hundred
bytes each; the oldest gives way. It answers a first message. So a rank that was dropped before, as
one that was stopped or swapped out for a minute, knows that it was, and connects again.

A rank's end of its channel: the commands that arrive from the driver, and the results sent to it.

The text that a rank prints, on its way to the driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import pickle
import queue
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TextIO, TypeVar

from sparkdl.errors import SparkdlError
from sparkdl.process.system import end_unanswered, keep_alive

_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_HEAD_BYTES = _LENGTH.size + 2 * _DIGEST_BYTES
_IN_ONE = 1 << 16
"""The largest content that is sent together with its header, so that the other end wakes up once."""
NONCE_BYTES = 16
HELLO_SECONDS = 60.0
"""The time in which the first message of a connection must have arrived."""
NONCE_SECONDS = 600.0
"""The time in which a listener, which may be busy, must have sent its part of the nonce."""
MOST_SILENT = 256
"""The most connections whose first message has not arrived."""
CONNECT_SECONDS = 60.0
TRIES, LONGEST_PAUSE = 10, 5.0
"""How often a rank connects if it is dropped before its first message, with growing pauses."""


_SILENT_SECONDS, _PROBE_SECONDS, _PROBES = 60, 15, 4
"""TCP keep-alive: the connection ends after two minutes of silence, because a host that is lost does
not close it."""
_UNANSWERED_MS = 120_000
"""The same limit for data that is not acknowledged, during which there are no keep-alive probes. It
applies to what the driver sends only: a rank always reads, but the driver may be busy for longer."""


T = TypeVar("T")


class ChannelError(SparkdlError, RuntimeError):
    """An error because the other end has closed the connection, or is not who it should be."""


class EndedError(ChannelError):
    """An error because the connection has ended."""


class Channel:
    """One end of a connection. Several threads may send frames, but only one may receive."""

    def __init__(
        self, connection: socket.socket, key: bytes, nonce: bytes | bytearray, driver: bool
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection, _SILENT_SECONDS, _PROBE_SECONDS, _PROBES)
        if driver:
            end_unanswered(connection, _UNANSWERED_MS)
        self._connection, self._key, self._nonce = connection, key, nonce
        self._out, self._in = (b"D", b"R") if driver else (b"R", b"D")
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def bound_sends(self, seconds: float) -> None:
        """Limit the time that :meth:`send` waits for the other end to accept data."""
        bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def send(self, message: Any) -> None:
        """Pickle and send a message; raise ChannelError if the other end is gone or stuck."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            length = _LENGTH.pack(len(content))
            head = length + self._digest(self._out.lower(), self._sent, length)
            head += self._digest(self._out, self._sent, content)
            self._sent += 1
            try:
                if len(content) <= _IN_ONE:
                    self._connection.sendall(head + content)
                else:
                    self._connection.sendall(head)
                    self._connection.sendall(content)
            except OSError as error:
                raise EndedError(f"the connection broke: {error}") from None

    def receive(self, seconds: float = math.inf) -> Any:
        """Return the next message, waiting at most ``seconds`` for each of its parts.

        Raise ChannelError if the connection has ended, or the time is over.
        """
        if seconds != math.inf:
            self._connection.settimeout(max(seconds, 0.001))
        try:
            return _ended(self.frame())
        except TimeoutError as error:
            raise EndedError(f"the connection broke: {error}") from None
        finally:
            if seconds != math.inf:
                self._connection.settimeout(None)

    def frame(self) -> Generator[None, None, Any]:
        """Return the next message; yield where the connection does not block and has no more yet."""
        head = yield from _read(self._connection, _HEAD_BYTES)
        length, digests = head[: _LENGTH.size], head[_LENGTH.size :]
        self._check(digests[:_DIGEST_BYTES], self._in.lower(), length)
        content = yield from _read(self._connection, _LENGTH.unpack(length)[0])
        self._check(digests[_DIGEST_BYTES:], self._in, content)
        self._received += 1
        return pickle.loads(content)

    def _check(self, digest: bytearray, direction: bytes, content: bytearray) -> None:
        expected = self._digest(direction, self._received, content)
        if not secrets.compare_digest(digest, expected):
            raise ChannelError("a message is not by a member of the gang")

    def exhaust(self) -> None:
        """Read and discard everything until the connection ends."""
        with contextlib.suppress(OSError):
            while self._connection.recv(1 << 16):
                pass

    def close(self) -> None:
        """Close the connection, which whoever reads from it will notice."""
        _end(self._connection)
        self._connection.close()

    def _digest(self, direction: bytes, number: int, content: bytes | bytearray) -> bytes:
        digest = hashlib.blake2b(self._nonce, key=self._key, digest_size=_DIGEST_BYTES)
        digest.update(direction + number.to_bytes(8, "little"))
        digest.update(content)
        return digest.digest()


def _read(connection: socket.socket, nbytes: int) -> Generator[None, None, bytearray]:
    """Return so many bytes; yield where the connection does not block and has no more yet."""
    content = bytearray()
    while len(content) < nbytes:
        try:
            part = connection.recv(min(nbytes - len(content), 1 << 20))
        except BlockingIOError:
            yield
            continue
        except TimeoutError:
            raise
        except OSError as error:
            raise EndedError(f"the connection broke: {error}") from None
        if not part:
            raise EndedError("the connection was closed")
        content += part
    return content


def _exactly(nbytes: int, connection: socket.socket) -> bytearray:
    """Return so many bytes of a connection that blocks."""
    return _ended(_read(connection, nbytes))


def _ended(steps: Generator[None, None, T]) -> T:
    """Return what the steps return, of a connection that blocks."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


Arrival = tuple[Channel, Any]
"""A connection and its first message."""


class _Handshake:
    """A connection whose first message has not arrived. Nothing here waits."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection, self.until = connection, time.monotonic() + HELLO_SECONDS
        self._steps = self._exchange(key)

    def _exchange(self, key: bytes) -> Generator[None, None, Arrival]:
        self.connection.setblocking(False)
        ours = secrets.token_bytes(NONCE_BYTES)
        self.connection.sendall(ours)
        yield  # the rest waits for the other end
        theirs = yield from _read(self.connection, NONCE_BYTES)
        channel = Channel(self.connection, key, ours + theirs, driver=True)
        hello = yield from channel.frame()
        self.connection.setblocking(True)
        channel.send(None)
        return channel, hello

    def advance(self) -> Arrival | None:
        """Read what has arrived. Return the channel and its first message if it is complete."""
        try:
            next(self._steps)
        except StopIteration as end:
            arrival: Arrival = end.value
            return arrival
        return None


def listening(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address of this node, by default on a port of the system's
    choice."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)


class Listener:
    """The driver's end: a socket on ``host``. See the note on who may keep a rank waiting."""

    def __init__(self, host: str, port: int = 0, key: bytes | None = None) -> None:
        self._socket = listening(host, port)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._handshakes: dict[_Handshake, None] = {}
        self.port: int = self._socket.getsockname()[1]
        self.key = key or secrets.token_bytes(32)

    @property
    def silent(self) -> int:
        """Return the number of connections whose first message has not arrived."""
        return len(self._handshakes)

    def accept(self, seconds: float) -> Arrival | None:
        """Return the next connection and its first message, or None if none of ours arrives in time."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            ready = [key.data for key, _ in self._selector.select(max(left, 0.0))]
            for handshake in filter(None, ready):
                arrival = self._advance(handshake)
                if arrival is not None:
                    return arrival
            if None in ready:
                self._begin()
            for handshake in list(self._handshakes):  # only now: this process may have been stopped
                if handshake not in ready and time.monotonic() > handshake.until:
                    self._drop(handshake)
            if left <= 0:
                return None

    def _begin(self) -> None:
        """Begin a handshake with the next connection."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        if len(self._handshakes) == MOST_SILENT:
            self._drop(next(iter(self._handshakes)))
        handshake = _Handshake(connection, self.key)
        self._handshakes[handshake] = None
        self._selector.register(connection, selectors.EVENT_READ, handshake)
        self._advance(handshake)  # sends our part of the nonce

    def _advance(self, handshake: _Handshake) -> Arrival | None:
        """Go on with a handshake, and forget it if it has ended, well or not."""
        try:
            arrival = handshake.advance()
        except (OSError, ChannelError):
            self._drop(handshake)
            return None
        if arrival is not None:
            self._forget(handshake)
        return arrival

    def _drop(self, handshake: _Handshake) -> None:
        self._forget(handshake)
        handshake.connection.close()

    def _forget(self, handshake: _Handshake) -> None:
        self._selector.unregister(handshake.connection)
        del self._handshakes[handshake]

    def close(self) -> None:
        """Close the socket and all connections whose first message has not arrived."""
        for handshake in list(self._handshakes):
            self._drop(handshake)
        self._selector.close()
        self._socket.close()


def connect(
    host: str,
    port: int,
    key: bytes,
    hello: Any,
    seconds: float = CONNECT_SECONDS,
    patience: float | None = None,
) -> Channel:
    """Connect to a listener, and return when it has taken the first message.

    ``patience`` is the seconds in which the listener, who is then asked only once, must answer;
    None: no limit after its nonce, and a connection that ends before is made again. Raise
    ConnectionError if nobody listens any more, and ChannelError if the message is not taken.
    """
    tries = TRIES if patience is None else 1
    for number in range(tries):
        if number:
            time.sleep(min(0.05 * 2**number, LONGEST_PAUSE))
        connection = socket.create_connection((host, port), timeout=seconds)
        keep_alive(connection, _SILENT_SECONDS, _PROBE_SECONDS, _PROBES)
        connection.settimeout(NONCE_SECONDS if patience is None else patience)
        try:
            return _introduced(connection, key, hello, patience)
        except TimeoutError:
            connection.close()
            if patience is not None:
                raise
            raise ChannelError(
                f"{host}:{port} has taken a connection and said nothing for {NONCE_SECONDS:g} s: the "
                "driver hangs, or a program listens there that does not belong to this gang."
            ) from None
        except (ConnectionError, EndedError):
            connection.close()
        except BaseException:
            connection.close()
            raise
    raise ChannelError(
        f"{host}:{port} has ended {tries} connections before it took the first message: too many "
        "others connect to it, or a program listens there that does not belong to this gang."
    )


def _introduced(
    connection: socket.socket, key: bytes, hello: Any, patience: float | None
) -> Channel:
    """Send the first message, and return the channel when it has been taken."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    channel = Channel(connection, key, _exactly(NONCE_BYTES, connection) + ours, driver=False)
    connection.settimeout(patience)
    channel.send(hello)
    channel.receive(math.inf if patience is None else patience)
    return channel


def _end(connection: socket.socket) -> None:
    """Shut the connection down, so that both ends stop waiting."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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


OUTPUT = "output"
"""The kind of a rank's message that has lines of text."""


class LineStream(io.TextIOBase):
    """A text stream that hands its lines to ``tell``, and its text to ``before`` if ``also``.

    Processes that are forked from this one, such as those of a DataLoader, write to ``before`` only:
    a channel has only two ends.
    """

    def __init__(
        self, tell: Callable[[list[str]], object], before: TextIO, also: bool = False
    ) -> None:
        super().__init__()
        self.before, self._tell, self._also, self._line = before, tell, also, ""
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if os.getpid() == self._process:
            *lines, self._line = (self._line + text).split("\n")
            if lines:
                self._tell(lines)
        return self.before.write(text) if self._passes_on() else len(text)

    def flush(self) -> None:
        """Flush ``before`` if text goes there; lines are told when they are complete."""
        if self._passes_on():
            self.before.flush()

    def rest(self) -> None:
        """Tell the unfinished line."""
        line, self._line = self._line, ""
        if line:
            self._tell([line])

    def _passes_on(self) -> bool:
        return self._also or os.getpid() != self._process


@contextlib.contextmanager
def output_sent(channel: Channel | None) -> Iterator[Callable[[], None]]:
    """Send what is printed in the block to the driver, if there is a channel.

    The function that is yielded sends the unfinished line.
    """
    if channel is None:
        yield lambda: None
        return

    def send(lines: list[str]) -> None:
        with contextlib.suppress(ChannelError):
            channel.send((OUTPUT, "\n".join(lines)))

    stream = LineStream(send, sys.stdout)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield stream.rest

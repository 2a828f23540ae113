"""Authenticated messages between the driver and the ranks of a gang, over TCP.

[Note: what a channel protects] Commands are code, so nobody else may send one. The key of a gang is
random and reaches the ranks inside their tasks, with the protection that Spark's own messages have.
Every frame carries a keyed BLAKE2b digest (RFC 7693) of the connection's nonce, of which each end
has drawn one half, the direction, the frame number, and the content. A frame that is forged,
changed, repeated (also from an earlier connection) or left out ends the connection. Nothing is
encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pickle
import secrets
import socket
import struct
import threading
from typing import Any

from sparkdl.errors import SparkdlError
from sparkdl.process.system import end_unanswered, keep_alive

_HEAD = struct.Struct("<Q32s")
_FIRST_BYTES = 1 << 16
"""The largest first frame. Until it has arrived, the other end is not authenticated."""
_IN_ONE = 1 << 16
"""The largest content that is sent together with its header, so that the other end wakes up once."""
NONCE_BYTES = 16
HELLO_SECONDS = 5.0
CONNECT_SECONDS = 60.0


_SILENT_SECONDS, _PROBE_SECONDS, _PROBES = 60, 15, 4
"""TCP keep-alive: the connection ends after two minutes of silence, because a host that is lost does
not close it."""
_UNANSWERED_MS = 120_000
"""The same limit for data that is not acknowledged, during which there are no keep-alive probes. It
applies to what the driver sends only: a rank always reads, but the driver may be busy for longer."""


class ChannelError(SparkdlError, RuntimeError):
    """An error because the other end has closed the connection, or is not who it should be."""


class Channel:
    """One end of a connection. Several threads may send frames, but only one may receive.

    Args:
        connection: The connected socket.
        key: The key of the gang.
        nonce: The connection's nonce, of which each end has drawn a half.
        driver: Whether this is the driver's end.
    """

    def __init__(self, connection: socket.socket, key: bytes, nonce: bytes, driver: bool) -> None:
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
        """Pickle and send a message.

        Raises:
            ChannelError: If the other end is gone or stuck.
        """
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            digest = self._digest(self._out, self._sent, content)
            self._sent += 1
            try:
                head = _HEAD.pack(len(content), digest)
                if len(content) <= _IN_ONE:
                    self._connection.sendall(head + content)
                else:
                    self._connection.sendall(head)
                    self._connection.sendall(content)
            except OSError as error:
                raise ChannelError(f"the connection broke: {error}") from None

    def receive(self, seconds: float = math.inf) -> Any:
        """Return the next message, waiting at most ``seconds`` for each of its parts.

        Raises:
            ChannelError: If the connection has ended, or the time is over.
        """
        if seconds == math.inf:
            return self._receive()
        self._connection.settimeout(max(seconds, 0.001))
        try:
            return self._receive()
        finally:
            self._connection.settimeout(None)

    def _receive(self) -> Any:
        nbytes, digest = _HEAD.unpack(self._read(_HEAD.size))
        if self._received == 0 and nbytes > _FIRST_BYTES:
            raise ChannelError("the first message is too long")
        content = self._read(nbytes)
        expected = self._digest(self._in, self._received, content)
        if not secrets.compare_digest(digest, expected):
            raise ChannelError("a message is not by a member of the gang")
        self._received += 1
        return pickle.loads(content)

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
        digest = hashlib.blake2b(self._nonce, key=self._key, digest_size=32)
        digest.update(direction + number.to_bytes(8, "little"))
        digest.update(content)
        return digest.digest()

    def _read(self, nbytes: int) -> bytearray:
        content = bytearray()
        while len(content) < nbytes:
            try:
                part = self._connection.recv(min(nbytes - len(content), 1 << 20))
            except OSError as error:
                raise ChannelError(f"the connection broke: {error}") from None
            if not part:
                raise ChannelError("the connection was closed")
            content += part
        return content


class Listener:
    """The driver's end: a socket on ``host``.

    Args:
        host: The address.
        port: The port; 0 lets the system choose one.
        key: The key of the gang; None makes a new one.
    """

    def __init__(self, host: str, port: int = 0, key: bytes | None = None) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.key = key or secrets.token_bytes(32)

    def accept(self, seconds: float) -> tuple[Channel, Any] | None:
        """Return the next connection and its first message, or None if none of ours arrives in time."""
        self._socket.settimeout(seconds)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(None)
        ours = secrets.token_bytes(NONCE_BYTES)
        late = threading.Timer(HELLO_SECONDS, _end, [connection])  # a limit for the whole exchange
        late.start()
        try:
            connection.sendall(ours)
            nonce = ours + _exactly(NONCE_BYTES, connection)
            channel = Channel(connection, self.key, nonce, driver=True)
            hello = channel.receive()
        except (OSError, ChannelError):
            connection.close()
            return None
        finally:
            late.cancel()
        return channel, hello

    def close(self) -> None:
        self._socket.close()


def connect(
    host: str, port: int, key: bytes, hello: Any, seconds: float = CONNECT_SECONDS
) -> Channel:
    """Connect a rank to the driver.

    Args:
        host: The driver's host.
        port: The driver's port.
        key: The key of the gang.
        hello: The first message.
        seconds: The longest time that the connection may take.

    Raises:
        ConnectionError: If nobody listens any more.
    """
    connection = socket.create_connection((host, port), timeout=seconds)
    connection.settimeout(None)  # the driver may be busy before it answers
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    channel = Channel(connection, key, _exactly(NONCE_BYTES, connection) + ours, driver=False)
    channel.send(hello)
    return channel


def _end(connection: socket.socket) -> None:
    """Shut the connection down, so that both ends stop waiting."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _exactly(nbytes: int, connection: socket.socket) -> bytes:
    """Read ``nbytes``. Raise ConnectionError if the connection ends before."""
    found = b""
    while len(found) < nbytes:
        part = connection.recv(nbytes - len(found))
        if not part:
            raise ConnectionError("the other end closed the connection")
        found += part
    return found

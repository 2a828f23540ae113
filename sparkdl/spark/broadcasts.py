"""Transfer of byte strings of any size to the executors, in broadcasts of bounded size.

While a broadcast is made, it lies entirely in the heap of the driver's JVM; while it is fetched, in
that of an executor. What is cached of it goes to disk if memory is short. Large byte strings are
therefore split into several broadcasts.

Files that a session of Spark Connect sends to its server, in place of broadcasts.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError
from pyspark import Broadcast, SparkContext, SparkFiles

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class BroadcastBytes:
    """Byte strings of given ``lengths``, concatenated; each of the ``pieces`` holds some chunks."""

    pieces: tuple[Broadcast[Any], ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(context: SparkContext, parts: Sequence[bytes]) -> BroadcastBytes:
        """Broadcast ``parts`` without copying them, so that they live as long as the broadcasts.

        Where Spark encrypts what it writes to disks, PySpark takes plain bytes only: they are copied.
        """
        encrypted = getattr(context, "_encryption_enabled", False)
        pieces: list[list[bytes | pickle.PickleBuffer]] = [[]]
        room = PIECE_BYTES
        for part in parts:
            left = memoryview(part).toreadonly()
            while True:
                chunk, left = left[:room], left[room:]
                pieces[-1].append(bytes(chunk) if encrypted else pickle.PickleBuffer(chunk))
                room -= len(chunk)
                if not left:
                    break
                pieces.append([])
                room = PIECE_BYTES
        broadcasts = tuple(context.broadcast(piece) for piece in pieces)
        return BroadcastBytes(broadcasts, tuple(map(len, parts)))

    def __iter__(self) -> Iterator[bytes]:
        """Yield the chunks, in a task. The worker keeps none that it can read again from disk."""
        for piece in self.pieces:
            chunks = piece.value
            if getattr(piece, "_path", None) is not None:
                vars(piece).pop("_value", None)
            yield from chunks

    def parts(self) -> Iterator[bytes]:
        """Yield the byte strings, in a task."""
        chunks = iter(self)
        for length in self.lengths:
            found = [next(chunks)]
            while sum(map(len, found)) < length:
                found.append(next(chunks))
            yield b"".join(found)

    @property
    def value(self) -> bytes:
        """Return the byte string, in a task, if there is exactly one."""
        (part,) = self.parts()
        return part

    def destroy(self) -> None:
        """Delete the broadcasts here and on the executors; no task may use them afterwards."""
        for piece in self.pieces:
            with contextlib.suppress(Py4JError):  # a stopped session has deleted them
                piece.destroy()


INLINE_BYTES = 1 << 20
"""The most bytes that travel inside a task or a query; more go apart from it."""
_sent: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""The names of the files that each session of Spark Connect has."""


@dataclass(frozen=True)
class Artifact:
    """A file that a Spark Connect session sends to its server, in place of a broadcast.

    Each executor fetches it from there. It is deleted with the session.
    """

    name: str

    @staticmethod
    def of(data: bytes, name: str, session: Any) -> Artifact:
        """Send bytes as a file, unless the session has it, and return the artifact.

        The name must belong to these bytes alone, since a session replaces no file.
        """
        sent = _sent.setdefault(session, set())
        if name not in sent:
            with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
                path = Path(folder, name)
                path.write_bytes(data)
                session.addArtifacts(path.as_uri(), file=True)
            sent.add(name)
        return Artifact(name)

    @property
    def value(self) -> bytes:
        """The bytes, in an executor."""
        return Path(SparkFiles.get(self.name)).read_bytes()

    def destroy(self) -> None:
        """Do nothing, since a session cannot delete a file."""


def sent_bytes(data: bytes, kind: str, session: Any) -> bytes | Artifact:
    """Return bytes as they travel with a query: themselves, or the artifact that has them."""
    if len(data) <= INLINE_BYTES:
        return data
    name = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Artifact.of(data, f"sparkdl-{name}.{kind}", session)


def received_bytes(sent: bytes | Artifact) -> bytes:
    """Return in an executor the bytes that :func:`sent_bytes` sent."""
    return sent if isinstance(sent, bytes) else sent.value

"""Transfer of byte strings of any size to the executors, in broadcasts of bounded size.

While a broadcast is made, it lies entirely in the heap of the driver's JVM; while it is fetched, in
that of an executor. What is cached of it goes to disk if memory is short. Large byte strings are
therefore split into several broadcasts.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark import Broadcast, SparkContext

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

"""Bytes of any size on their way to the executors, in broadcasts of bounded size.

A broadcast is as a whole in the heap of the driver's JVM while it is made, and in an executor's while
it is fetched; what is cached of it goes to disk where memory is short. So large bytes go as several.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.core.broadcast import Broadcast

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class BroadcastBytes:
    """Byte strings of ``lengths``, one after another in ``pieces``, each a broadcast of some chunks."""

    pieces: tuple[Broadcast[Any], ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(context: SparkContext, parts: Sequence[bytes]) -> BroadcastBytes:
        """Nothing is copied in this process: ``parts`` stay as long as the broadcasts do."""
        pieces: list[list[pickle.PickleBuffer]] = [[]]
        room = PIECE_BYTES
        for part in parts:
            left = memoryview(part).toreadonly()
            while True:
                chunk, left = left[:room], left[room:]
                pieces[-1].append(pickle.PickleBuffer(chunk))
                room -= len(chunk)
                if not left:
                    break
                pieces.append([])
                room = PIECE_BYTES
        broadcasts = tuple(context.broadcast(piece) for piece in pieces)
        return BroadcastBytes(broadcasts, tuple(map(len, parts)))

    def __iter__(self) -> Iterator[bytes]:
        """In a task: chunk after chunk. None is kept by the worker where it can read it again."""
        for piece in self.pieces:
            chunks = piece.value
            if getattr(piece, "_path", None) is not None:
                vars(piece).pop("_value", None)
            yield from chunks

    def parts(self) -> Iterator[bytes]:
        """In a task: byte string after byte string."""
        chunks = iter(self)
        for length in self.lengths:
            found = [next(chunks)]
            while sum(map(len, found)) < length:
                found.append(next(chunks))
            yield b"".join(found)

    @property
    def value(self) -> bytes:
        """In a task: the byte string, where it is one."""
        (part,) = self.parts()
        return part

    def destroy(self) -> None:
        """Delete them, here and on the executors: nothing that uses them may come any more."""
        for piece in self.pieces:
            with contextlib.suppress(Py4JError):  # of a session that has stopped it is gone
                piece.destroy()

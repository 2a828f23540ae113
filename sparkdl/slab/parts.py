"""What is too large for one frame on its way out of a task: it stays in a slab of its node, and whoever
wants it reads it there, or asks for a part at a time.

[Note: large bytes] Every frame is as a whole in the heap of the executor's JVM, and what comes to the
driver in that of the driver's too, where Spark ends a job whose results take more than
``spark.driver.maxResultSize``; no frame can have 2 GB. So weights, moments and what is made of them
travel in parts whose size is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.errors import SlabFullError
from sparkdl.slab.pool import Pool, Reference

FRAME_BYTES = 16 << 20
"""The longest frame, where large bytes are cut."""
LARGE_BYTES = 64 << 10
"""What takes more is left in a slab."""
ROLE = "result"


@dataclass(frozen=True)
class Left:
    """Bytes that were left in a slab, in the place of a result."""

    reference: Reference


def left_where_large(pool: Pool, result: Any, tick: int) -> Any:
    """The result itself; where it is bytes or an array and large, :class:`Left`, if there is room.

    The buffers of results of earlier ticks are free.
    """
    if not isinstance(result, (bytes, np.ndarray)):
        return result
    data = np.frombuffer(result, dtype=np.uint8)
    if data.nbytes <= LARGE_BYTES:
        return result
    try:
        with pool.claim(ROLE, data.nbytes, tick, tick) as claim:
            claim.bytes[:] = data
            return Left(claim.reference)
    except SlabFullError:  # in one piece, then, however large: it may arrive
        return result


def read_part(pool: Pool, part: Reference) -> bytes:
    """The bytes, in memory of their own."""
    data = pool.read(part).tobytes()
    pool.check(part)
    return data


def num_frames(references: Sequence[Reference]) -> int:
    """How many :func:`frames_of` gives."""
    return sum(-(-reference.nbytes // FRAME_BYTES) for reference in references)


def frames_of(pool: Pool, references: Sequence[Reference]) -> Iterator[bytes]:
    """The bytes of some references, one after another, in frames of bounded length."""
    for reference in references:
        for part in reference.parts(FRAME_BYTES):
            yield pool.read(part).tobytes()
        pool.check(reference)


def fill(place: np.ndarray, frames: Iterator[bytes]) -> None:
    """Write the bytes of one reference from the frames that come next."""
    for start in range(0, len(place), FRAME_BYTES):
        frame = np.frombuffer(next(frames), dtype=np.uint8)
        place[start : start + FRAME_BYTES] = frame

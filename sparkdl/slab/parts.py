"""Results that are too large for one frame: they stay in a slab of their node and are read in parts.

[Note: large bytes] The executor's JVM holds every frame as a whole in its heap. The driver's JVM also
holds what comes to the driver, and Spark ends a job whose results take more than
``spark.driver.maxResultSize``. No frame can have 2 GB. So weights, moments and what is derived from
them travel in parts of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.errors import SlabFullError, StaleReferenceError
from sparkdl.slab.pool import Pool, Reference

FRAME_BYTES = 16 << 20
"""The longest frame when large bytes are cut."""
LARGE_BYTES = 64 << 10
"""Results larger than this are left in a slab."""
ROLE = "result"


@dataclass(frozen=True)
class Left:
    """Bytes left in a slab; it takes the place of a result."""

    reference: Reference


def left_where_large(pool: Pool, result: Any, submission: int) -> Any:
    """Return ``result``, or :class:`Left` if it is large bytes or a large array and a slab has room.

    A rank of a gang has its state in memory, so the loss of its slabs does not cost the result.
    Buffers of results of earlier submissions are free.
    """
    if not isinstance(result, (bytes, np.ndarray)):
        return result
    data = np.frombuffer(result, dtype=np.uint8)
    if data.nbytes <= LARGE_BYTES:
        return result
    try:
        with pool.claim(ROLE, data.nbytes, submission, submission) as claim:
            claim.bytes[:] = data
            return Left(claim.reference)
    except (SlabFullError, StaleReferenceError):  # send it whole, however large: it may arrive
        return result


def read_part(pool: Pool, part: Reference) -> bytes:
    """Return a copy of the bytes; StaleReferenceError if they were deleted or written again."""
    data = pool.read(part).tobytes()
    pool.check(part)
    return data


def num_frames(references: Sequence[Reference]) -> int:
    """Return the number of frames that :func:`frames_of` yields."""
    return sum(-(-reference.nbytes // FRAME_BYTES) for reference in references)


def frames_of(pool: Pool, references: Sequence[Reference]) -> Iterator[bytes]:
    """Yield the bytes of some references, one after another, in frames of bounded length."""
    for reference in references:
        for part in reference.parts(FRAME_BYTES):
            yield pool.read(part).tobytes()
        pool.check(reference)


def fill(place: np.ndarray, frames: Iterator[bytes]) -> None:
    """Write the bytes of one reference into ``place`` from the next frames."""
    for start in range(0, len(place), FRAME_BYTES):
        frame = np.frombuffer(next(frames), dtype=np.uint8)
        place[start : start + FRAME_BYTES] = frame

"""Memory that a rank of a gang gives back to its machine."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE, _USUAL = 8 << 20, 32 << 20


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Inside the block every large tensor that is let go of is memory that the process no longer has.

    Otherwise glibc keeps what gathered units leave, in pieces: measured, a rank of 100 MB of parameters
    then holds 590 MB instead of 231. Afterwards it keeps what has up to 32 MB, as it comes to do by
    itself. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        _keep_up_to(mallopt, _LARGE)
    try:
        yield
    finally:
        if mallopt is not None:
            _keep_up_to(mallopt, _USUAL)


def _keep_up_to(mallopt: Any, nbytes: int) -> None:
    """Once one limit is set glibc adjusts neither by itself, and would trim its heap at every turn."""
    mallopt(_MMAP_THRESHOLD, nbytes)
    mallopt(_TRIM_THRESHOLD, 2 * nbytes)

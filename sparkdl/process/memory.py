"""What a process does with memory that it lets go of: keep it for the next, or give it back.

[Note: kept or given back] A step allocates the same tensors again and again. By itself glibc maps a
large one anew, page by page, and cuts its heap at every end of a step; kept, the memory is there. But
tensors are aligned, and an aligned piece does not fit exactly where an equal one was: where many of
one size come and go, as the units of a replica that is cut do, the heap grows to several times what
is in use. Figures are in docs/internals/engine-notes.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ASKED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Where a user says it."""
KEPT, GIVEN_BACK = (32 << 20, 2**31 - 1), (1 << 20, 2 << 20)
"""Bytes from which on a piece is mapped by itself, and free bytes at the end of the heap from which on
these are given back; glibc takes no larger ones."""


def keep_heap() -> None:
    """From now on this process keeps what it lets go of, but for what is larger than 32 MB.

    Elsewhere than on glibc, and where the environment sets it, nothing happens.
    """
    _set(KEPT)


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Inside the block every large tensor that is let go of is memory that the process no longer has;
    afterwards see :func:`keep_heap`."""
    _set(GIVEN_BACK)
    try:
        yield
    finally:
        _set(KEPT)


def forget_values(tensor: torch.Tensor) -> None:
    """Give back the memory of a contiguous CPU tensor whose values nobody needs any more.

    It can be written again; until then it reads as what it was, or as zeros. Whole pages only.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and stop > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _set(limits: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _ASKED):
        mapped, trimmed = limits
        mallopt(_MMAP_THRESHOLD, mapped)
        mallopt(_TRIM_THRESHOLD, trimmed)

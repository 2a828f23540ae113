"""Memory of this process: what it keeps or gives back of what it lets go of, and what is left to it.

[Note: kept or given back] A step allocates the same tensors again and again. By itself glibc maps a
large one anew, page by page, and cuts its heap at every end of a step; kept, the memory is there. But
tensors are aligned, and an aligned piece does not fit exactly where an equal one was: where many of
one size come and go, as the units of a replica that is cut do, the heap grows to several times what
is in use. Figures are in docs/performance.md.

[Note: memory that is left] The machine and each control group (container) around this process have a
total and a use; the scarcest of them counts. Memory that caches files of a disk counts as left, as the
system takes it back by itself when anybody wants it. Memory of processes counts as used, and so do
files in shared memory (/dev/shm), which nothing takes back: a container is killed where these go
beyond its limit, however much room its /dev/shm still has.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
RESERVE_SHARE, MOST_RESERVE = 0.1, 2 << 30
"""The share of all memory that files in shared memory leave alone, and the most bytes that this is."""
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


def left_to_machine() -> float:
    """Return the bytes that can still be had here, of the machine or the container; see the note above.

    Infinite where the system does not say.
    """
    return min(memory.left for memory in _memories())


def left_for_files() -> float:
    """Return the bytes that files in shared memory may still take here, which leave a reserve to the
    processes; at most 0 where there are none. Infinite where the system does not say."""
    return min(memory.left - memory.reserve for memory in _memories())


def left_to_process() -> float:
    """Return the bytes that this process may still have: of :func:`left_to_machine`, and by its own
    limits (``ulimit -v`` and ``-d``, and ``spark.executor.pyspark.memory``, which is one)."""
    left = left_to_machine()
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            left = min(left, limit - _own_nbytes())
    return left


def is_scarce(nbytes: int, processes: int) -> bool:
    """Return whether this process cannot have ``nbytes`` more, or the machine cannot give so much to
    each of so many ``processes``."""
    return left_to_process() < nbytes or left_to_machine() < nbytes * processes


@dataclass(frozen=True)
class _Memory:
    """Memory of the machine or of a control group: bytes in all, and bytes that can still be had."""

    total: float
    left: float

    @property
    def reserve(self) -> float:
        return min(RESERVE_SHARE * self.total, MOST_RESERVE)


def _memories() -> Iterator[_Memory]:
    """The memory of the machine, and of each control group that this process is in."""
    machine = _entries(PROC / "meminfo")
    total, left = (machine.get(name, math.inf) for name in ("MemTotal:", "MemAvailable:"))
    yield _Memory(1024 * total, 1024 * left)
    with contextlib.suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _groups(CGROUPS, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
                yield from _groups(CGROUPS / "memory", path, limit, use, "total_")


def _groups(root: Path, path: str, limit: str, use: str, prefix: str) -> Iterator[_Memory]:
    """The group and those that it is in. A container may see its own as the root."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            most = float((folder / limit).read_text())  # "max": no limit
            entries = _entries(folder / "memory.stat")
            cache = [entries.get(f"{prefix}{kind}_file", 0.0) for kind in ("inactive", "active")]
            yield _Memory(most, most - float((folder / use).read_text()) + sum(cache))
        if folder == root:
            return


def _entries(path: Path) -> dict[str, float]:
    """The numbers of a file with one a line, by the names before them."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, *rest = line.split()
            if rest:
                found[name] = float(rest[0])
    return found


def _own_nbytes() -> float:
    """The address space that this process takes; 0 where the system does not say."""
    try:
        return float((PROC / "self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0.0

"""Memory of this process: whether freed memory is kept or given back, and how much memory is left.

[Note: kept or given back] A step allocates the same tensors again and again. By default glibc maps each
large tensor anew, page by page, and trims its heap at the end of every step. If the heap is kept, the
memory is already there. But tensors are aligned, and an aligned block does not fit exactly where an
equal one was. If many blocks of one size come and go, as the units of a sharded replica do, the heap
grows to several times what is in use. Figures are in docs/internals/engine-notes.md.

[Note: memory that is left] The machine and each control group (container) around this process have a
total and a use; the scarcest of them counts. Memory that caches files of a disk counts as left, because
the system reclaims it on demand. Memory of processes counts as used, and so do files in shared memory
(/dev/shm), which nothing reclaims: a container is killed if these exceed its limit, however much room
its /dev/shm still has.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
RESERVE_SHARE, MOST_RESERVE = 0.1, 2 << 30
"""The share of all memory that files in shared memory must leave free, and its limit in bytes."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ASKED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user sets the limits."""
KEPT, GIVEN_BACK = (32 << 20, 2**31 - 1), (1 << 20, 2 << 20)
"""Pairs of limits in bytes: the block size and the free end of the heap.

Larger blocks are mapped by themselves, and a longer free end of the heap is given back. glibc takes no
larger limits than ``KEPT``.
"""


def keep_heap() -> None:
    """Make this process keep freed memory from now on, except blocks larger than 32 MB.

    Without glibc, or if the environment sets the limits, nothing changes.
    """
    _set(KEPT)


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Give the memory of every freed large tensor back to the system inside the block.

    Afterwards :func:`keep_heap` applies.
    """
    _set(GIVEN_BACK)
    try:
        yield
    finally:
        _set(KEPT)


def give_heap_back() -> None:
    """Give the freed memory that this process's heap keeps back to the system, if glibc is there."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def forget_values(tensor: torch.Tensor) -> None:
    """Give back the memory of a contiguous CPU tensor whose values are no longer needed.

    The tensor can be written again; until then it reads as before, or as zeros. Only whole pages
    are given back.
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
    """Return the bytes that the machine or the container still has; see [Note: memory that is left].

    The result is infinite if the system does not say.
    """
    return min(memory.left for memory in _memories())


def left_for_files() -> float:
    """Return the bytes that files in shared memory may still take, less a reserve for the processes.

    The result is at most 0 if there are none, and infinite if the system does not say.
    """
    return min(memory.left - memory.reserve for memory in _memories())


def left_to_process() -> float:
    """Return the bytes that this process may still allocate.

    This is :func:`left_to_machine`, restricted by the process's own limits (``ulimit -v`` and
    ``-d``, and ``spark.executor.pyspark.memory``, which is one).
    """
    left = left_to_machine()
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            left = min(left, limit - _own_nbytes())
    return left


def is_scarce(nbytes: int, processes: int) -> bool:
    """Return whether memory is too scarce for ``nbytes`` more, here or in each of ``processes``."""
    return left_to_process() < nbytes or left_to_machine() < nbytes * processes


class _Memory(NamedTuple):
    """Memory of the machine or of a control group: total bytes, and bytes that are left."""

    total: float
    left: float

    @property
    def reserve(self) -> float:
        return min(RESERVE_SHARE * self.total, MOST_RESERVE)


def _memories() -> Iterator[_Memory]:
    """Yield the memory of the machine, and of each control group that this process is in."""
    machine = _entries(PROC / "meminfo")
    total, left = (machine.get(name, math.inf) for name in ("MemTotal:", "MemAvailable:"))
    yield _Memory(1024 * total, 1024 * left)
    with contextlib.suppress(OSError):
        for line in (
            (PROC / "self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _groups(CGROUPS, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
                yield from _groups(CGROUPS / "memory", path, limit, use, "total_")


def _groups(root: Path, path: str, limit: str, use: str, prefix: str) -> Iterator[_Memory]:
    """Yield the memory of the group and its ancestors.

    A container may see its own group as the root.
    """
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            most = float((folder / limit).read_text(encoding="ascii"))  # "max": no limit
            entries = _entries(folder / "memory.stat")
            cache = [entries.get(f"{prefix}{kind}_file", 0.0) for kind in ("inactive", "active")]
            yield _Memory(
                most, most - float((folder / use).read_text(encoding="ascii")) + sum(cache)
            )
        if folder == root:
            return


def _entries(path: Path) -> dict[str, float]:
    """Return the numbers of a file with one name and number a line, by name."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, *rest = line.split()
            if rest:
                found[name] = float(rest[0])
    return found


def _own_nbytes() -> float:
    """Return the address space that this process takes; 0 if the system does not say."""
    try:
        return float((PROC / "self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0.0

"""How a rank of a gang uses its machine's memory: what is large is given back, or kept for the next.

[Note: kept or given back] A replica that is cut gathers its units, and lets go of them, many times a
step. What a process lets go of glibc keeps for itself up to 32 MB a piece: nothing has to be mapped
anew, page by page, but tensors are aligned, an aligned piece does not fit exactly where an equal one
was, and the heap grows to several times what is in use. Mapped by itself each piece is gone when it is
let go of, which makes a step a third longer. So a rank maps large tensors where memory is scarce,
and while the model is built and cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE, _USUAL = 1 << 20, 32 << 20
HEAP_SHARE = 8
"""A rank under "fsdp" may come to hold so many times the model's bytes where the heap is kept: measured
with Adam, see docs/performance.md."""
CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    (CGROUP / "memory.max", CGROUP / "memory.stat", "anon"),
    (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.stat", "total_rss"),
)
"""Of a container: its limit, and what of its memory is in use for good; version 2 and version 1."""


@contextlib.contextmanager
def memory_given_back() -> Iterator[None]:
    """Inside the block every large tensor that is let go of is memory that the process no longer has.

    Afterwards it keeps what has up to 32 MB. Elsewhere than on glibc nothing happens.
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


def is_scarce(model_nbytes: int, ranks: int) -> bool:
    """Whether this process cannot keep its heap: what is left, shared with the other ``ranks`` of the
    machine, may be less than that of a model of so many bytes."""
    wanted = HEAP_SHARE * model_nbytes
    return left_to_process() < wanted or left_to_machine() < wanted * ranks


def left_to_process() -> float:
    """Bytes that this process may still have, by its own limits (``ulimit -v`` and ``-d``, and Spark's
    ``spark.executor.pyspark.memory``, which is one)."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    known = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if not known:
        return math.inf
    return min(known) - _number(Path("/proc/self/statm")) * os.sysconf("SC_PAGE_SIZE")


def left_to_machine() -> float:
    """Bytes that can still be had here, or in this container."""
    found = [_entry(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for limit, use, name in _LIMITS:
        if limit.exists():
            found.append(_number(limit) - _entry(use, name, missing=0.0))
    return min(found)


def _entry(path: Path, name: str, missing: float = math.inf) -> float:
    """The number after ``name`` in a file of one a line."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return float(words[1])
    return missing


def _number(path: Path) -> float:
    """The first of a file; infinite where it says "max" or there is none."""
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return math.inf

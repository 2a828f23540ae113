"""Whether a rank of a gang has memory to spare."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from pathlib import Path

HEAP_SHARE = 8
"""A rank under "fsdp" may come to hold so many times the model's bytes where it keeps its heap (see
:mod:`sparkdl.process.memory`): measured with Adam."""
CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    (CGROUP / "memory.max", CGROUP / "memory.stat", "anon"),
    (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.stat", "total_rss"),
)
"""Of a container: its limit, and what of its memory is in use for good; version 2 and version 1."""


def is_scarce(model_nbytes: int, ranks: int) -> bool:
    """Whether this process cannot keep its heap: of what is left to it, or to the machine with so many
    ``ranks``, one may take more with a model of so many bytes."""
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

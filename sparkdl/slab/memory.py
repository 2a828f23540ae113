"""Whether shared memory may take more: what lies there is memory of the machine, and of the container.

A container is killed where it goes beyond its limit, however much room its /dev/shm still has; a file
on a disk takes memory, too, but only as long as nobody else wants it. So a reserve stays.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RESERVE_SHARE, MOST_RESERVE = 0.1, 2 << 30
"""Of the memory that the machine, or the container, has: so much is left alone, and no more."""
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes in all, and bytes that can still be had."""

    total: float
    left: float

    @property
    def for_files(self) -> float:
        """What files in shared memory may still take."""
        return self.left - min(RESERVE_SHARE * self.total, MOST_RESERVE)


def for_files() -> float:
    """What files in shared memory may still take here: of the scarcest of the machine and of the
    control groups that this process is in. Infinite where nothing says."""
    return min(memory.for_files for memory in _memories(PROC, CGROUPS))


def _memories(proc: Path, cgroups: Path) -> Iterator[Memory]:
    machine = _entries(proc / "meminfo")
    yield Memory(
        1024 * machine.get("MemTotal:", math.inf), 1024 * machine.get("MemAvailable:", math.inf)
    )
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _groups(cgroups, path, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
                yield from _groups(cgroups / "memory", path, limit, use, "total_")


def _groups(root: Path, path: str, limit: str, use: str, prefix: str) -> Iterator[Memory]:
    """The group and those that it is in. A container may see its own as the root."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            most = float((folder / limit).read_text())  # "max": no limit
            entries = _entries(folder / "memory.stat")
            cache = [entries.get(f"{prefix}{kind}_file", 0.0) for kind in ("inactive", "active")]
            yield Memory(most, most - float((folder / use).read_text()) + sum(cache))
        if folder == root:
            return


def _entries(path: Path) -> dict[str, float]:
    """The numbers of a file of one a line, each behind its name."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, *rest = line.split()
            if rest:
                found[name] = float(rest[0])
    return found

"""What this process and all its descendants take: peaks of resident memory, and processor time."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path

KINDS = ("driver, Python", "driver, JVM", "worker, Python")
PARTS = ("RssAnon", "RssFile", "RssShmem")


class Sampler(threading.Thread):
    """Reads ``/proc/PID/status`` of every process below this one, every ``interval`` seconds.

    ``peaks[kind, phase][part]`` is the largest value of any single process, in bytes; ``phase`` is
    the name that the program gives to what it does now.
    """

    def __init__(self, interval: float = 0.2) -> None:
        super().__init__(daemon=True)
        self.interval = interval
        self.phase = "start"
        self.peaks: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self.workers: set[int] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self.interval):
            self.sample()

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()

    def sample(self) -> None:
        """Look at every process once."""
        for process in _descendants(os.getpid()):
            found = _memory(process)
            if found is None:
                continue
            kind = _kind(process)
            if kind == KINDS[2]:
                self.workers.add(process)
            peak = self.peaks[kind, self.phase]
            for part, value in found.items():
                peak[part] = max(value, peak.get(part, 0))

    def peak(self, kind: str, part: str = "RssAnon") -> int:
        """Over all phases, in bytes."""
        return max((p.get(part, 0) for (k, _), p in self.peaks.items() if k == kind), default=0)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue  # it ended
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children[process]
    return found


def _memory(process: int) -> dict[str, int] | None:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "RssAnon" not in fields:
        return None  # it is ending
    return {part: int(fields[part].split()[0]) << 10 for part in PARTS}


def _kind(process: int) -> str:
    if process == os.getpid():
        return KINDS[0]
    try:
        name = Path(f"/proc/{process}/comm").read_text()
    except OSError:
        return KINDS[2]
    return KINDS[1] if name.startswith("java") else KINDS[2]


def cpu_seconds() -> float:
    """Processor time so far of this process and all that descend from it and live."""
    ticks = 0
    for process in _descendants(os.getpid()):
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def stopwatch() -> float:
    """Seconds of a clock that only goes forward."""
    return time.perf_counter()

"""What this process and all its descendants take: peaks of resident memory, and processor time."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path

KINDS = ("driver, Python", "driver, JVM", "worker, Python")
EXECUTOR, COMPILERS = "executor, JVM", "JVM's compilers"
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
            found = resident(process)
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


def resident(process: int) -> dict[str, int] | None:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "RssAnon" not in fields:
        return None  # it is ending
    return {part: int(fields[part].split()[0]) << 10 for part in PARTS}


SHARES = ("private", "shared", "files")
_LINES = {"Pss_Anon": "private", "Pss_Shmem": "shared", "Pss_File": "files"}


def shares(process: int) -> dict[str, int]:
    """Bytes that a process holds, a page that n processes map counted 1/n: its own, those of slabs
    and other shared memory, those of files such as libraries. Empty where it is ending."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        part: int(found[line].split()[0]) << 10 for line, part in _LINES.items() if line in found
    }


class Watch(threading.Thread):
    """Looks, every ``interval`` seconds, at the Python processes below this one that have no children:
    Spark's workers, DDP's ranks. Each sample holds the ``shares`` of every one of them."""

    def __init__(self, interval: float = 0.2) -> None:
        super().__init__(daemon=True)
        self.interval = interval
        self.samples: list[list[dict[str, int]]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self.interval):
            below = _descendants(os.getpid())
            parents = {_parent(process) for process in below}
            leaves = [p for p in below if p not in parents and _kind(p) == KINDS[2]]
            self.samples.append([found for found in map(shares, leaves) if found])

    def end(self) -> None:
        """Stop; may be called twice."""
        self._ended.set()
        self.join()


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


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
    return sum(_processor(process) for process in _descendants(os.getpid()))


def cpu_by_kind(ended: bool = False) -> dict[str, float]:
    """Likewise, for each of ``KINDS``, for the JVMs of executors that have one of their own, and for
    the compilers in all JVMs, which are counted nowhere else. With ``ended``, processes that have
    ended count for the one that started them."""
    found = dict.fromkeys((*KINDS, EXECUTOR, COMPILERS), 0.0)
    for process in _descendants(os.getpid()):
        kind, seconds = _kind(process), _processor(process, ended=ended)
        if kind == KINDS[1]:
            kind = EXECUTOR if _kind(_parent(process)) == KINDS[1] else kind
            compilers = _compilers(process)
            found[COMPILERS] += compilers
            seconds -= compilers
        found[kind] += seconds
    return found


def _processor(process: int, under: str = "", ended: bool = False) -> float:
    """Return processor seconds of a process, or of its thread ``under`` its directory in /proc.
    With ``ended``, also that of its children that have ended."""
    try:
        stat = Path(f"/proc/{process}/{under}stat").read_text()
    except OSError:
        return 0.0
    ticks = sum(map(int, stat.rpartition(")")[2].split()[11 : 15 if ended else 13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _compilers(process: int) -> float:
    """Of a JVM's threads that compile. They end when they like, unless the JVM has
    ``-XX:-UseDynamicNumberOfCompilerThreads``."""
    seconds = 0.0
    for thread in Path(f"/proc/{process}/task").glob("*"):
        try:
            name = (thread / "comm").read_text()
        except OSError:
            continue
        if name.startswith(("C1 Comp", "C2 Comp")):
            seconds += _processor(process, f"task/{thread.name}/")
    return seconds


def address_space() -> int:
    """Of this process, at most so far, in bytes, when it has imported what a gang's rank needs."""
    import torch.distributed.fsdp  # noqa: F401

    import sparkdl.engines.gang.rank  # noqa: F401

    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line for line in lines if line.startswith("VmPeak")]
    return int(peak.split()[1]) << 10


def stopwatch() -> float:
    """Seconds of a clock that only goes forward."""
    return time.perf_counter()

"""Memory that is left, where files go, and what a process keeps or gives back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fork_server import run_fresh

from sparkdl.data.partition_reader import close_partitions, open_partition
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.process import memory
from sparkdl.process.memory import is_scarce, left_for_files, left_to_machine, left_to_process
from sparkdl.slab import pool, root
from sparkdl.slab.pool import open_pool, release
from sparkdl.slab.root import SlabConfig, open_root, remove_root

GIB = 1 << 30
Group = tuple[str, object, float, float]
"""A control group: its path, limit, use, and how much of that caches files of a disk; in GiB."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine of 64 GiB, of which 20 can still be had, and its control groups."""

    def make(lines: list[str], groups: list[Group]) -> None:
        proc, folder = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        kib = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {20 * GIB // 1024} kB\n"
        (proc / "meminfo").write_text(kib)
        (proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))
        for path, limit, use, cache in groups:
            write_group(folder / path, limit, use, cache, 1 if path.startswith("memory") else 2)
        monkeypatch.setattr(memory, "PROC", proc)
        monkeypatch.setattr(memory, "CGROUPS", folder)

    return make


def write_group(folder: Path, limit: object, use: float, cache: float, version: int) -> None:
    """As the kernel does. Files in shared memory are in use, and no process has them (anon)."""
    names, prefix = ("memory.max", "memory.current"), ""
    if version == 1:
        names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
    most = "max" if limit == "max" else int(float(str(limit)) * GIB)
    half = int(cache * GIB / 2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{int(use * GIB)}\n")
    stat = f"anon 5\nshmem 7\n{prefix}inactive_file {half}\n{prefix}active_file {half}\n"
    (folder / "memory.stat").write_text(stat)


V2, V1 = "0::", "4:memory:"
MACHINES: dict[str, tuple[list[str], list[Group], float, float]] = {
    "no container": ([], [], 20, 18),
    # Of a limit of 8 GiB 5 are in use, of which 2 cache files; the rest may well be shared memory
    "a container is its own root": ([f"{V2}/"], [("", 8, 5, 2)], 5, 5 - 0.8),
    "the scarcest of the groups around": (
        [f"{V2}/pods/ours"],
        [("pods/ours", "max", 1, 0), ("pods", 10, 9, 0)],
        *(1, 0),
    ),
    "no limit": ([f"{V2}/"], [("", "max", 30, 0)], 20, 18),
    "more in use than the limit is": ([f"{V2}/"], [("", 4, 4.5, 0)], -0.5, -0.9),
    "version 1": ([f"{V1}/docker/us", f"{V2}/"], [("memory/docker/us", 4, 3, 1)], 2, 2 - 0.4),
    # Inside a container the path of its group is often not to be seen
    "version 1, as the root": ([f"{V1}/docker/us", f"{V2}/"], [("memory", 4, 3, 1)], 2, 2 - 0.4),
}
"""Lines of /proc/self/cgroup, groups, and what is left: to processes, and to files in shared memory."""


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_left(machine, name: str) -> None:
    lines, groups, left, for_files = MACHINES[name]
    machine(lines, groups)
    assert left_to_machine() == left * GIB
    assert left_to_process() == left * GIB
    assert left_for_files() == pytest.approx(for_files * GIB, abs=2)
    assert is_scarce(int(left * GIB / 2), 2) == (left < 0)
    assert is_scarce(int(max(left, 0) * GIB / 2) + 1, 2)


def test_where_nothing_says_there_is_room(tmp_path: Path, monkeypatch) -> None:
    """As on a system without /proc."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "none")
    assert left_to_machine() == left_to_process() == left_for_files() == math.inf
    assert not is_scarce(1 << 60, 4)


@pytest.mark.linux
def test_what_this_machine_says() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < left_for_files() < left_to_machine()
    assert left_to_machine() <= total or left_to_machine() == math.inf


LIMITED = """
import resource, sys
from pathlib import Path
from sparkdl.process import memory
for memory.PROC in map(Path, sys.argv[2:]):
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(kind, (int(sys.argv[1]), -1))
        print(int(memory.left_to_process()))
        resource.setrlimit(kind, (-1, -1))
"""


def test_a_limit_of_the_process_counts(tmp_path: Path) -> None:
    """Less what it has already, where the system says how much that is."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/statm").write_text(f"{1 << 20} 7 7 7 0 7 0\n")
    limit, used = 3 << 40, (1 << 20) * os.sysconf("SC_PAGE_SIZE")
    run = run_fresh(LIMITED, str(limit), str(tmp_path / "none"), str(tmp_path))
    assert list(map(int, run.stdout.split())) == [limit] * 2 + [limit - used] * 2, run.stderr


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Shared memory with a disk behind it, and how much memory files may take: a list of answers."""
    shared, disk = tmp_path / "shm", tmp_path / "local"
    shared.mkdir()
    answers: list[float] = []
    monkeypatch.setattr(root, "SHARED_MEMORY", shared)
    monkeypatch.setattr(
        root, "left_for_files", lambda: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(disk))
    config = SlabConfig.new("auto", "app-memory")
    yield config, answers, shared / config.name, disk / config.name
    close_partitions()
    release(config.name)
    remove_root(config)


@pytest.mark.parametrize(("left", "on_disk"), [(300_000, False), (100_000, True)])
def test_a_buffer_goes_to_disk_where_memory_is_short(places, left, on_disk) -> None:
    config, answers, shared, disk = places
    answers.append(left)
    open_root(config, create=True)
    with open_pool(config).claim("state", 200_000, 1, 1) as claim:
        assert Path(claim.reference.path).parent == (disk if on_disk else shared)


def test_samples_stay_below_the_reserve(places, monkeypatch) -> None:
    """Memory runs short as they are written: the rows that follow go to disk, and all are read."""
    monkeypatch.setattr("sparkdl.data.partition_writer.CHECKED_BYTES", 100_000)
    config, answers, shared, disk = places
    answers += [1e9, 1e9, 50_000]
    writer = PartitionWriter(config)
    rows = np.arange(200_000, dtype=np.float32).reshape(10, -1, 4)
    for some in rows:
        writer.add(["x"], [some])
    handle = writer.finish()
    parents = [Path(segment.path).parent for segment in handle.segments]
    assert parents == [shared, disk]
    partition = open_partition(handle)
    assert partition is not None
    found = np.concatenate([segment.num_rows for segment in handle.segments], axis=None)
    assert found.sum() == 50_000
    assert 0 < handle.segments[0].num_rows < 30_000


def test_a_directory_that_was_asked_for_is_taken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(root, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(root, "left_for_files", lambda: 0)
    config = SlabConfig.new(str(tmp_path / "slabs"), "app-asked")
    open_root(config, create=True)
    with pool.Pool(config).claim("state", 200_000, 1, 1) as claim:
        assert Path(claim.reference.path).is_relative_to(tmp_path / "slabs")
    remove_root(config)


RESIDENT = """
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
"""
SCRIPT = (
    RESIDENT
    + """
import ctypes
from sparkdl.process.memory import keep_heap, memory_given_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def kept(nbytes):
    # Whether most of it stays when all of 64 such pieces are let go of.
    pieces = [libc.malloc(nbytes) for _ in range(64)]
    for piece in pieces:
        ctypes.memset(piece, 1, nbytes)
    before = resident()
    for piece in pieces:
        libc.free(piece)
    return before - resident() < 32 * nbytes

print(kept(2 << 20))
with memory_given_back():
    print(kept(2 << 20))
print(kept(2 << 20))
print(kept(33 << 20))
"""
)


@pytest.mark.linux
@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ["False", "False", "True", "False"]),
        pytest.param({"MALLOC_TRIM_THRESHOLD_": "131072"}, ["False"] * 4, marks=pytest.mark.soak),
    ],
    ids=["by itself", "as the user says"],
)
def test_what_is_let_go_of_is_kept_afterwards_but_for_what_is_large(environment, found):
    run = run_fresh(SCRIPT, **environment)
    assert run.stdout.split() == found, run.stderr


FORGET = (
    RESIDENT
    + """
import torch
from sparkdl.process.memory import forget_values

whole = torch.ones(16 << 20)
middle = whole[1000:-1000]
before = resident()
forget_values(middle)
print(before - resident() > 0.9 * middle.nbytes)
forget_values(whole[:5])  # less than a page
print(bool(whole[:1000].eq(1).all() and whole[-1000:].eq(1).all()))
middle.fill_(2.0)
print(bool(middle.eq(2).all()), int(whole[999]), int(whole[-1000]))
"""
)


@pytest.mark.linux
def test_the_memory_of_values_that_are_forgotten_is_given_back_and_of_no_others():
    run = run_fresh(FORGET)
    assert run.stdout.split() == ["True", "True", "True", "1", "1"]

"""What shared memory may still take: the machine and control groups have a say."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkdl.data.partition_writer import PartitionWriter, close_partitions, open_partition
from sparkdl.slab import memory, pool, root
from sparkdl.slab.memory import for_files
from sparkdl.slab.pool import close_pool, open_pool
from sparkdl.slab.root import SlabConfig, open_root, remove_root

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A machine of 64 GiB, of which 20 can still be had; the directory of its control groups."""

    def make(*lines: str) -> Path:
        proc, groups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        kib = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {20 * GIB // 1024} kB\n"
        (proc / "meminfo").write_text(kib)
        (proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(memory, "PROC", proc)
        monkeypatch.setattr(memory, "CGROUPS", groups)
        return groups

    return make


def version_2(folder: Path, limit: object, current: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    stat = f"anon 5\nshmem 7\ninactive_file {cache // 2}\nactive_file {cache // 2}\n"
    (folder / "memory.stat").write_text(stat)


def test_the_machine_keeps_a_reserve(machine) -> None:
    machine()
    assert for_files() == 18 * GIB


def test_a_container_is_its_own_root(machine) -> None:
    """Of a limit of 8 GiB 5 are in use, of which 2 are cache that anybody may have."""
    version_2(machine("0::/"), 8 * GIB, 5 * GIB, cache=2 * GIB)
    assert for_files() == 5 * GIB - 0.1 * 8 * GIB


def test_the_scarcest_of_the_groups_around_counts(machine) -> None:
    groups = machine("0::/pods/ours")
    version_2(groups / "pods/ours", "max", 1 * GIB)
    version_2(groups / "pods", 10 * GIB, 9 * GIB)
    assert for_files() == 0


@pytest.mark.parametrize("seen", ["docker/ours", ""])
def test_version_1(machine, seen: str) -> None:
    """Inside a container its path is often not to be seen, and the root is its own."""
    folder = machine("4:memory:/docker/ours", "0::/") / "memory" / seen
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}")
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\ntotal_active_file 0\n")
    assert for_files() == 2 * GIB - 0.1 * 4 * GIB


def test_where_nothing_says_there_is_room(tmp_path: Path, monkeypatch) -> None:
    """As on a system without /proc."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "none")
    assert for_files() == math.inf


# Where files go


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Shared memory with a disk behind it, and how much memory files may take: a list of answers."""
    shared, disk = tmp_path / "shm", tmp_path / "local"
    shared.mkdir()
    answers: list[float] = []
    monkeypatch.setattr(root, "SHARED_MEMORY", shared)
    monkeypatch.setattr(
        root, "for_files", lambda: answers.pop(0) if len(answers) > 1 else answers[0]
    )
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(disk))
    config = SlabConfig.new("auto", "app-memory")
    yield config, answers, shared / config.name, disk / config.name
    close_partitions()
    close_pool(config)
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
    monkeypatch.setattr(root, "for_files", lambda: 0)
    config = SlabConfig.new(str(tmp_path / "slabs"), "app-asked")
    open_root(config, create=True)
    with pool.Pool(config).claim("state", 200_000, 1, 1) as claim:
        assert Path(claim.reference.path).is_relative_to(tmp_path / "slabs")
    remove_root(config)

"""The fault harness itself, where it could harm this machine or fool a test. No JVM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import fork_server
import launch
import pytest
from harness import inject, processes
from harness.inject import at
from pyspark import TaskContext

pytestmark = [pytest.mark.faults, pytest.mark.linux]


class Attempt:
    """A task's attempt, as far as faults look at it."""

    def __init__(self, partition: int, number: int) -> None:
        self.partitionId, self.attemptNumber = lambda: partition, lambda: number


@pytest.fixture
def attempt(monkeypatch):
    """Makes this process look like a task."""

    def become(partition: int, number: int) -> None:
        monkeypatch.setattr(TaskContext, "get", lambda: Attempt(partition, number))

    return become


def test_a_fault_strikes_as_often_as_it_says_and_tells(tmp_path, attempt, monkeypatch):
    killed = []
    monkeypatch.setattr(inject, "_KINDS", {"kill_worker": killed.append})
    fault = at(job="sync", iteration=3, partition=1).kill_worker(times=2).into(tmp_path)
    for number in range(4):
        for partition in range(2):
            attempt(partition, number)
            for iteration in (2, 3):
                fault.strike("fb", iteration)
                fault.strike("sync", iteration)
    assert len(killed) == 2
    assert [note["attempt"] for note in fault.told()] == [0, 1]
    assert [note["attempt"] for note in fault.told("passed")] == [2, 3]
    assert {note["worker"] for note in fault.told()} == {os.getpid()}


def test_no_fault_strikes_outside_of_a_task(tmp_path):
    fault = at(job="fb", iteration=1, partition=0).raise_once().into(tmp_path)
    fault.strike("fb", 1)
    assert fault.told() == fault.told("passed") == []


def test_jobs_have_the_names_that_they_have():
    with pytest.raises(AssertionError, match="forward"):
        at(job="forward", iteration=1, partition=0)


def test_a_large_disk_is_not_filled(tmp_path, attempt, monkeypatch):
    large = SimpleNamespace(f_blocks=1 << 30, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: large)
    fault = at(job="fb", iteration=1, partition=0).fill_disk(tmp_path).into(tmp_path / "notes")
    attempt(0, 0)
    with pytest.raises(AssertionError):
        fault.strike("fb", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_slabs_are_deleted_where_they_are_and_counted(tmp_path, attempt):
    for name in ("sparkdl-app-1/gradient-8-a", "sparkdl-app-1/state-8-a", "other/gradient-8-a"):
        (tmp_path / "slabs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "slabs" / name).touch()
    site, slabs = at(job="fb", iteration=1, partition=0), str(tmp_path / "slabs")
    attempt(0, 0)
    for number, files in enumerate(("gradient-*", "*")):
        fault = site.delete_slabs(files).into(tmp_path / str(number), slabs)
        fault.strike("fb", 1)
        assert [note["deleted"] for note in fault.told("deleted")] == [1]
    left = sorted(str(path.relative_to(tmp_path / "slabs")) for path in tmp_path.glob("slabs/**/*"))
    assert left == ["other", "other/gradient-8-a"]


def test_a_session_of_processes_ends_with_those_in_other_groups():
    """As the daemon of Python workers is, which makes a group of its own."""
    script = "import os, time; os.fork() or os.setpgid(0, 0); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    processes.wait_until(lambda: len(processes.of_session(leader.pid)) == 2, 20, "two processes")
    began = time.monotonic()
    processes.kill_session(leader.pid)
    leader.wait()
    assert not [pid for pid in processes.of_session(leader.pid) if processes.alive(pid)]
    assert time.monotonic() - began < 10


@pytest.mark.soak
def test_a_script_that_waits_says_where(tmp_path):
    """Also what it has forked, as a daemon does."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, sys, time\n"
        "def in_vain():\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(600)\n"
        "os.fork()\n"
        "in_vain()\n"
    )
    command = [fork_server.start(), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as waiting:
        try:
            assert [waiting.stdout.readline() for _ in range(2)] == [b"begun\n"] * 2
            launch.ask_for_stacks(waiting.pid)
            stacks = 0
            while stacks < 2:
                stacks += b" in in_vain" in waiting.stdout.readline()
        finally:
            waiting.kill()  # and with it the forks

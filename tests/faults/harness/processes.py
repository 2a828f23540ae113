"""Processes of a cluster, found in /proc: executors, and all that a session of processes started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server

EXECUTOR = b"org.apache.spark.executor.CoarseGrainedExecutorBackend"


def fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the third on: state, parent, group, session, ...; empty: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def alive(pid: int) -> bool:
    found = fields(pid)
    return bool(found) and found[0] != "Z"


def parent(pid: int) -> int:
    return fork_server.parents()[pid]


def command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_executor(pid: int) -> bool:
    return EXECUTOR in command(pid)


def all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))


def of_session(leader: int) -> list[int]:
    """Processes of the session (``setsid``) that ``leader`` began; those of a dead leader too."""
    return [pid for pid in all_pids() if (found := fields(pid)) and int(found[3]) == leader]


def driver(context: Any) -> bytes:
    """By what its executors name it. The application's id would not do: two masters of one machine
    give the same one where their applications begin in the same second."""
    return f":{context.getConf().get('spark.driver.port')}".encode()


def executors(driver: bytes) -> list[int]:
    """The JVMs of its executors."""
    found = ((pid, command(pid)) for pid in all_pids())
    return [
        pid
        for pid, line in found
        if EXECUTOR in line and line[line.index(b"--driver-url") + 1].endswith(driver)
    ]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_session(leader: int, seconds: float = 10.0) -> None:
    """SIGKILL all of a session, until none is left: a process may be forking meanwhile."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in of_session(leader) if alive(pid)]) and (
        time.monotonic() < deadline
    ):
        for pid in left:
            kill(pid)
        time.sleep(0.02)


def wait_until(happens: Callable[[], object], seconds: float, what: str) -> None:
    """Return when ``happens()``; AssertionError, which says ``what``, where it does not in time."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)

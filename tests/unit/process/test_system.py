"""What takes the place of Linux's own on other systems, tried here without it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

from sparkdl.process import system

ELSEWHERE = ROOT / "tests" / "as_on_macos"
FAST = ("unit/slab/test_root.py", "gang/test_arrivals.py")
"""Those that go through what differs."""

ASK = """
import json, os, socket, sys
from sparkdl.process import system
one, other = socket.socketpair()
found = {
    "linux": system.on_linux(),
    "boot": system.boot_id(),
    "namespace": system.pid_namespace(),
    "started": system.start_time(os.getpid()),
    "same": system.start_time(os.getpid()) == system.start_time(os.getpid()),
    "nobody": system.start_time(2**22 + 1),
    "parent": system.parent(os.getpid()) == os.getppid(),
    "open": system.has_hung_up(one),
}
other.sendall(b"x")
found["unread"] = system.has_hung_up(one)
one.recv(1)
other.close()
found["closed"] = system.has_hung_up(one)
print(json.dumps(found))
"""


def elsewhere() -> dict[str, str]:
    """The environment of a process without what macOS lacks."""
    known = os.environ.get("PYTHONPATH", "")
    paths = [str(ELSEWHERE), str(Path(system.__file__).parents[2]), *known.split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.soak
def test_what_is_asked_of_the_system_is_answered_without_proc() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ASK], env=elsewhere(), capture_output=True, text=True, timeout=120
    )
    found = json.loads(run.stdout)
    assert found.pop("started")
    found.pop("boot")  # sysctl of Linux has no such name
    assert found == {
        **dict.fromkeys(("linux", "open", "unread"), False),
        **dict.fromkeys(("same", "parent", "closed"), True),
        **dict.fromkeys(("namespace", "nobody"), ""),
    }


@pytest.mark.linux
def test_this_process_is_found_in_proc() -> None:
    assert system.on_linux()
    assert system.parent(os.getpid()) == os.getppid()
    assert system.start_time(os.getpid())
    assert system.boot_id()


def test_a_hang_up_is_seen() -> None:
    one, other = socket.socketpair()
    with one:
        with other:
            assert not system.has_hung_up(one)
        assert system.has_hung_up(one)


@pytest.mark.soak
def test_fast_tests_pass_without_what_only_linux_has() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "not spark and not linux"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in FAST)],
        cwd=ROOT,
        env=elsewhere(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]

"""When a rank keeps its heap, and when it does not; in processes of its own, which have limits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkdl.train import rank_memory
from sparkdl.train.rank_memory import HEAP_SHARE, is_scarce, left_to_machine, left_to_process

GIB = 1 << 30
LIMITED = """
import resource, sys
from sparkdl.train.rank_memory import is_scarce, left_to_process
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), -1))
print(left_to_process(), is_scarce(int(sys.argv[3]), 1))
"""
GIVEN_BACK = """
import ctypes, sys
from pathlib import Path
from sparkdl.train.rank_memory import memory_given_back
allocate, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
allocate.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def kept(nbytes):
    # Of 64 such pieces, of which every second is let go of: what the process then still has.
    pieces = [allocate(nbytes) for _ in range(64)]
    for piece in pieces:
        ctypes.memset(piece, 1, nbytes)
    before = resident()
    for piece in pieces[::2]:
        free(piece)
    after = resident()
    for piece in pieces[1::2]:
        free(piece)
    return (before - after) < 16 * nbytes

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

with memory_given_back():
    inside = kept(2 << 20)
print(inside, kept(2 << 20))
"""


def run(script: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_counts(kind):
    left, scarce = run(LIMITED, kind, 64 * GIB, 9 * GIB)
    assert 0 < float(left) < 64 * GIB
    assert scarce == "True"


def test_without_a_limit_it_is_the_machine_s():
    assert left_to_process() == float("inf")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < left_to_machine() <= total
    assert not is_scarce(1, 1)
    assert is_scarce(total // HEAP_SHARE + 1, 1)
    assert is_scarce(total // HEAP_SHARE // 4 + 1, 4)


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    """As version 2 of control groups tells it."""
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"file 77\nanon {1 * GIB}\n")
    files = (tmp_path / "memory.max", tmp_path / "memory.stat", "anon")
    monkeypatch.setattr(rank_memory, "_LIMITS", (files,))
    assert left_to_machine() == 3 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert left_to_machine() > 0


def test_what_is_let_go_of_is_given_back_inside_and_kept_afterwards():
    assert run(GIVEN_BACK) == ["False", "True"]

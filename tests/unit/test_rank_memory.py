"""When memory is scarce; in processes of their own, which have limits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkdl.process import available_memory as rank_memory
from sparkdl.process.available_memory import HEAP_SHARE, is_scarce, left_to_machine, left_to_process

GIB = 1 << 30
LIMITED = """
import resource, sys
from sparkdl.process.available_memory import is_scarce, left_to_process
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), -1))
print(left_to_process(), is_scarce(int(sys.argv[3]), 1))
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

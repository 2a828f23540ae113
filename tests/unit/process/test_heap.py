"""Memory that a process keeps or gives back; in processes of their own."""

from __future__ import annotations

import pytest
from fork_server import run_fresh

SCRIPT = """
import ctypes
from pathlib import Path
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

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

print(kept(2 << 20))
with memory_given_back():
    print(kept(2 << 20))
print(kept(2 << 20))
print(kept(33 << 20))
"""


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


FORGET = """
from pathlib import Path
import torch
from sparkdl.process.memory import forget_values

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

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


@pytest.mark.linux
def test_the_memory_of_values_that_are_forgotten_is_given_back_and_of_no_others():
    run = run_fresh(FORGET)
    assert run.stdout.split() == ["True", "True", "True", "1", "1"]

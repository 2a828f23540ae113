"""Who keeps something on a GPU lets go of it in time. A list stands for what is kept."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkdl.engines.resources import clean_here
from sparkdl.replica import run
from sparkdl.replica.run import live_replica
from sparkdl.slab import gpu_memory
from sparkdl.slab.gpu_memory import Idle, hold, holders_awaited, kept_while_used
from sparkdl.slab.root import SlabConfig, open_root


def holder(root, notes):
    """Another worker of the node, which has no task just now."""

    def let_go():
        time.sleep(0.3)  # of something large
        (notes / str(os.getpid())).touch()

    thread = hold(root, let_go)
    (notes / "holds").touch()
    thread.join()


def test_after_a_run_every_process_of_the_node_has_let_go(tmp_path):
    root, notes = tmp_path / "root", tmp_path / "notes"
    root.mkdir()
    notes.mkdir()
    kept = [1]
    hold(root, kept.clear)  # the one that cleans holds something itself
    other = multiprocessing.get_context("fork").Process(target=holder, args=(root, notes))
    other.start()
    while not (notes / "holds").exists():
        time.sleep(0.01)
    with holders_awaited([root]):
        assert kept == [1]
        shutil.rmtree(root)
    assert kept == []
    assert (notes / str(other.pid)).exists()
    other.join(20)
    assert other.exitcode == 0


def test_a_holder_that_was_killed_is_not_waited_for(tmp_path):
    other = multiprocessing.get_context("fork").Process(target=holder, args=(tmp_path, tmp_path))
    other.start()
    while not (tmp_path / "holds").exists():
        time.sleep(0.01)
    other.kill()
    other.join()
    began = time.monotonic()
    with holders_awaited([tmp_path, tmp_path / "none"]):
        pass
    assert time.monotonic() - began < gpu_memory.AWAITED_SECONDS / 2


def test_what_predicts_is_kept_while_it_is_used():
    kept = [1]
    idle = Idle(kept.clear, seconds=0.4)
    for _ in range(4):
        idle.used()
        time.sleep(0.2)
        assert kept == [1]
    time.sleep(0.6)
    assert kept == []
    kept.append(2)
    idle.used()
    time.sleep(0.8)
    assert kept == []


def test_a_replica_on_a_gpu_is_held_and_finds_room(monkeypatch):
    """Of this process no GPU is asked for more than its name."""
    gpu, done = torch.device("cuda", 0), []
    monkeypatch.setattr(gpu_memory, "_idle", [])
    kept_while_used(lambda: done.append("room"))
    monkeypatch.setattr(run, "task_device", lambda: gpu)
    monkeypatch.setattr(run, "_live", type(run._live)())
    monkeypatch.setattr(run.LiveReplica, "of", lambda recipe, device: done.append("built"))
    live_replica("run", lambda: done.append("read"), lambda: done.append("held"))
    assert done == ["room", "held", "read", "built"]


def test_the_replica_of_a_run_goes_with_the_run(monkeypatch, tmp_path):
    """Of a process that has no task when the run ends, too."""
    slab = SlabConfig.new(str(tmp_path), "app-1")
    open_root(slab, create=True)
    numerics = SimpleNamespace(use=lambda: None)
    made: Any = SimpleNamespace(key=slab.name, slab=slab, threads=1, numerics=numerics)
    monkeypatch.setattr(run, "task_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(run, "_live", type(run._live)())
    monkeypatch.setattr(run.LiveReplica, "of", lambda recipe, device: recipe)
    monkeypatch.setattr(run, "_load_recipe", lambda made: "replica")
    for _ in range(2):
        assert run.build_replica(made) == "replica"
    assert [thread.name for thread in threading.enumerate()].count("sparkdl-gpu") == 1
    clean_here(slab)
    assert not run._live
    until = time.monotonic() + 10
    while run._holding[slab.name].is_alive():
        assert time.monotonic() < until


def test_what_is_given_back_is_looked_for_where_it_is_frozen(monkeypatch):
    class Cycle:
        pass

    thing = Cycle()
    thing.own = thing
    seen = weakref.ref(thing)
    del thing
    gc.freeze()
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(seen()))
    gpu_memory.give_back()  # this process has not begun with CUDA
    assert emptied == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gpu_memory.give_back()
    gc.unfreeze()
    assert emptied == [None]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(gpu_memory, "LOOK_SECONDS", 0.02)

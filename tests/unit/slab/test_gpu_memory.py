"""Memory that predictions keep is released in time. A list stands for what is kept."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from sparkdl.replica import run
from sparkdl.replica.run import live_replica
from sparkdl.slab import pool
from sparkdl.slab.pool import Idle, kept_while_used
from sparkdl.slab.root import SlabConfig


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


def test_a_replica_on_a_gpu_finds_room_and_is_awaited(monkeypatch, tmp_path):
    """Of this process no GPU is asked for more than its name."""
    gpu, done, slab = torch.device("cuda", 0), [], SlabConfig.new(str(tmp_path), "app-1")
    monkeypatch.setattr(pool, "_idle", [])
    kept_while_used(lambda: done.append("room"))
    monkeypatch.setattr(run, "task_device", lambda: gpu)
    monkeypatch.setattr(run, "_live", type(run._live)())
    monkeypatch.setattr(run, "watch", lambda slab, awaited: done.append(("watched", awaited)))
    monkeypatch.setattr(run.LiveReplica, "of", lambda recipe, device: done.append("built"))
    live_replica(slab, lambda: done.append("read"))
    assert done == ["room", ("watched", True), "read", "built"]


@pytest.mark.parametrize(("free", "emptied"), [(7, 0), (5, 1)])
def test_a_worker_leaves_the_next_as_much_as_it_has_taken(monkeypatch, free, emptied):
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 16))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    pool.leave_room(torch.device("cpu"))
    pool.leave_room(torch.device("cuda", 0))
    assert len(calls) == emptied


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
    pool.give_back()  # this process has not begun with CUDA
    assert emptied == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pool.give_back()
    gc.unfreeze()
    assert emptied == [None]

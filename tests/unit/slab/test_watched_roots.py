"""Whatever a process keeps of a run is released when the run ends on its node."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from innards import eventually

from sparkdl.replica import run
from sparkdl.slab import pool
from sparkdl.slab.pool import clean_here, open_pool
from sparkdl.slab.root import SlabConfig, open_root, remove_root

pytestmark = pytest.mark.linux


def claim(slab: SlabConfig) -> None:
    """Write a buffer of 8 MB, which stays mapped."""
    with open_pool(slab).claim("gradient", 8 << 20, 1, 1) as claimed:
        claimed.bytes[:] = 1


def mapped(slab: SlabConfig, process: int | str = "self") -> bool:
    return slab.name in Path(f"/proc/{process}/maps").read_text()


def keep(slab: SlabConfig, notes: Path, awaited: bool) -> None:
    """Be another worker of the node, which has no task when the run ends."""
    pool.LOOK_SECONDS = 0.02

    @pool.released
    def slow(name: str) -> None:
        time.sleep(0.3)
        if not mapped(slab):
            (notes / "released").touch()

    claim(slab)
    pool.watch(slab, awaited)
    (notes / "keeps").touch()
    time.sleep(60)


@contextlib.contextmanager
def other_worker(slab: SlabConfig, notes: Path, awaited: bool) -> Iterator[int]:
    fork = multiprocessing.get_context("fork")
    other = fork.Process(target=keep, args=(slab, notes, awaited))
    other.start()
    assert eventually((notes / "keeps").exists)
    assert mapped(slab, other.pid or 0)
    yield other.pid or 0
    other.kill()
    other.join()


@pytest.fixture
def slab(tmp_path: Path) -> SlabConfig:
    config = SlabConfig.new(str(tmp_path / "slabs"), "app-1")
    open_root(config, create=True)
    return config


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.02)


@pytest.mark.parametrize("awaited", [False, True])
def test_every_process_of_the_node_releases_what_it_keeps(
    slab: SlabConfig, tmp_path: Path, awaited: bool
) -> None:
    with other_worker(slab, tmp_path, awaited) as other:
        claim(slab)
        clean_here(slab)
        assert not mapped(slab)
        assert (tmp_path / "released").exists() == awaited
        assert eventually((tmp_path / "released").exists)
        assert not mapped(slab, other)


def test_a_process_that_was_killed_is_not_waited_for(slab: SlabConfig, tmp_path: Path) -> None:
    with other_worker(slab, tmp_path, True) as other:
        os.kill(other, 9)
        began = time.monotonic()
        clean_here(slab)
        assert time.monotonic() - began < pool.AWAITED_SECONDS / 2


def test_a_root_that_was_made_again_is_watched_again(slab: SlabConfig) -> None:
    for _ in range(2):
        open_root(slab, create=True)
        claim(slab)
        assert mapped(slab)
        remove_root(slab)
        assert eventually(lambda: not mapped(slab))


def test_a_claim_goes_on_when_its_run_has_ended(slab: SlabConfig) -> None:
    """A task that Spark has cancelled may still write."""
    with open_pool(slab).claim("gradient", 8 << 20, 1, 1) as claimed:
        clean_here(slab)
        claimed.bytes[:] = 1
    del claimed
    assert not mapped(slab)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_replica_of_a_run_is_released_with_it(
    slab: SlabConfig, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    numerics = SimpleNamespace(use=lambda: None)
    made: Any = SimpleNamespace(key=slab.name, slab=slab, threads=1, numerics=numerics)
    monkeypatch.setattr(run, "task_device", lambda: torch.device(device))
    monkeypatch.setattr(run, "_live", type(run._live)())
    monkeypatch.setattr(run.LiveReplica, "of", lambda recipe, device: recipe)
    monkeypatch.setattr(run, "_load_recipe", lambda made: "replica")
    for _ in range(2):
        assert run.build_replica(made) == "replica"
    remove_root(slab)
    assert eventually(lambda: not run._live)

"""Large bytes on their way to the driver, and into snapshots: from slabs, and in parts."""

from __future__ import annotations

import pickle
import resource
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from nodes_here import Machine

from sparkdl.engines import delivery
from sparkdl.engines.delivery import bring, not_here
from sparkdl.engines.gang.snapshots import SnapshotFiles
from sparkdl.engines.shuffle.replica_context import (
    at_owner,
    copy_slice,
    map_slice,
    read_parts,
    recount,
)
from sparkdl.engines.shuffle.state_reads import TakeSnapshot, restore_slice
from sparkdl.errors import StaleReferenceError
from sparkdl.slab import pool
from sparkdl.slab.pool import (
    LARGE_BYTES,
    Left,
    Reference,
    left_where_large,
    open_pool,
    read_part,
    release,
)
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.slices.slice_file import PackSlice, unpack

CONTENT = np.random.default_rng(0).integers(256, size=300_000).astype(np.uint8)


@pytest.fixture
def slab(slab):
    open_root(slab, create=True)
    return slab


class Owners:
    """Who is asked for parts: how many bytes at a time."""

    def __init__(self, config: SlabConfig) -> None:
        self.pool, self.asked = open_pool(config), list[int]()

    def __call__(self, wanted: Mapping[int, Reference]) -> list[bytes]:
        self.asked.append(sum(reference.nbytes for reference in wanted.values()))
        return [read_part(self.pool, wanted[number]) for number in sorted(wanted)]


def test_what_is_small_travels_itself(slab: SlabConfig) -> None:
    pool = open_pool(slab)
    for result in (b"small", {"file": 1}, CONTENT[:LARGE_BYTES]):
        assert left_where_large(pool, result, 1) is result
    assert isinstance(left_where_large(pool, CONTENT, 1), Left)
    assert isinstance(left_where_large(pool, CONTENT.tobytes(), 1), Left)


def test_results_of_before_make_room(slab: SlabConfig) -> None:
    (directory,) = open_root(slab).directories
    first = left_where_large(open_pool(slab), CONTENT, 1)
    left_where_large(open_pool(slab), CONTENT, 2)
    assert len(list(directory.glob("result-*"))) == 1
    with pytest.raises(StaleReferenceError):
        read_part(open_pool(slab), first.reference)


def test_what_finds_no_room_travels_itself(slab: SlabConfig, monkeypatch) -> None:
    monkeypatch.setattr("sparkdl.slab.pool._reserve", lambda path, nbytes: False)
    assert left_where_large(open_pool(slab), CONTENT, 1) is CONTENT


def test_what_finds_its_slabs_deleted_travels_itself(slab: SlabConfig) -> None:
    pool = open_pool(slab)
    assert isinstance(left_where_large(pool, CONTENT, 1), Left)
    for directory in open_root(slab).directories:
        shutil.rmtree(directory)
    assert left_where_large(pool, CONTENT, 2) is CONTENT


@pytest.mark.parametrize("here", [True, False])
def test_bytes_arrive_whole_and_in_parts_of_bounded_size(slab: SlabConfig, here: bool) -> None:
    """Two owners, one of which has two pieces; on this node nobody is asked for any."""
    owners, pool = Owners(slab), open_pool(slab)
    pieces = [CONTENT, CONTENT[:100_000], CONTENT[5:70_000]]
    wanted = []
    for number, piece in zip((3, 7, 7), pieces, strict=True):
        reference = left_where_large(pool, piece, len(wanted)).reference
        node_id = reference.node_id if here else "another node's"
        wanted.append((number, replace(reference, node_id=node_id), np.zeros_like(piece)))
    bring(not_here(slab, wanted), owners, 50_000)
    for (_, _, found), piece in zip(wanted, pieces, strict=True):
        np.testing.assert_array_equal(found, piece)
    assert bool(owners.asked) != here
    assert max(owners.asked, default=0) <= 50_000


def test_who_has_lost_it_says_so(slab: SlabConfig) -> None:
    """The driver looks for it on its own node first, and finds nothing there."""
    reference = left_where_large(open_pool(slab), CONTENT, 1).reference
    Path(reference.path).unlink()
    release(slab.name)
    far = not_here(slab, [(0, reference, np.zeros_like(CONTENT))])
    with pytest.raises(StaleReferenceError):
        bring(far, Owners(slab), 50_000)


def test_many_owners_are_asked_by_turns(slab: SlabConfig, monkeypatch) -> None:
    monkeypatch.setattr(delivery, "LEAST_BYTES", 40_000)
    owners = Owners(slab)
    reference = left_where_large(open_pool(slab), CONTENT, 1).reference
    far = replace(reference, node_id="far")
    wanted = [(number, far, np.zeros_like(CONTENT)) for number in range(3)]
    bring(not_here(slab, wanted), owners, 100_000)
    assert all((found == CONTENT).all() for _, _, found in wanted)
    assert max(owners.asked) <= 100_000


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes that have trained; no frame is longer than 100 bytes."""
    made = Machine(tmp_path, "ab", "ab", [8, 8])
    for _ in range(2):
        made.plain()
    monkeypatch.setattr(pool, "FRAME_BYTES", 100)
    yield made
    made.close()


def test_a_snapshot_is_made_of_short_frames_and_brings_all_of_the_state_back(machine) -> None:
    expected = machine.content()
    copy = partial(copy_slice, machine.states, "best", machine.submission)
    kept = machine.stage(partial(at_owner, copy), machine.owners, machine.slices)
    best = tuple(pickle.loads(frame) for (frame,) in kept)
    states, machine.states = machine.states, best
    weights = machine.content()
    task = TakeSnapshot(states, best)
    taken = machine.stage(task, machine.owners, machine.slices)
    assert [len(frames) for frames in taken] == [task.count] * 2
    assert max(len(frame) for frames in taken for frame in frames[1:]) == 100
    machine.plain()
    elsewhere = "ba"  # the owners' places are others now
    owners = machine.stage(partial(recount, task.count), machine.owners, machine.slices)
    restore = partial(restore_slice, machine.submission + 1)
    found = machine.stage(restore, machine.zip(taken, owners), elsewhere)
    reports = [pickle.loads(frame) for (frame,) in found]
    machine.states, machine.slices = tuple(report.state for report, _ in reports), elsewhere
    assert machine.content() == expected
    machine.states = tuple(handle for _, handle in reports)
    assert machine.content() == weights


def test_a_packed_slice_is_left_on_its_node(machine, monkeypatch) -> None:
    monkeypatch.setattr(pool, "LARGE_BYTES", 100)
    work = partial(map_slice, machine.states, PackSlice(), 9)
    (frame,), _ = machine.stage(partial(at_owner, work), machine.owners, "ab")
    left = pickle.loads(frame)
    asked = partial(read_parts, {0: left.reference})
    (found,), none = machine.stage(asked, machine.owners, "ab")
    assert unpack(found).state.weights.numpy().tobytes() == machine.content()[0]
    assert none == []


def test_of_a_file_of_a_snapshot_that_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    files, failed = SnapshotFiles(tmp_path), ""
    files.write("snapshot", 0, b"small")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # of any file, pytest's own too
    try:
        files.write("snapshot", 1, bytes(5000))
    except OSError as error:
        failed = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "too large" in failed
    assert files.there("snapshot", 2) == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-0"]

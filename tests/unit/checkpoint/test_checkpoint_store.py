"""A folder of checkpoints: committed last, found newest first, pruned, and damage passed over."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mistakes import message_of
from permissions import open_to_all, unprivileged
from test_checkpoint_manifest import MANIFEST as A_MANIFEST
from torch import nn

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.manifest import MANIFEST, Best, Manifest, ModelIdentity, StoredFile
from sparkdl.checkpoint.store import (
    HISTORY,
    CheckpointStore,
    TryFolder,
    WriteSlice,
    read_slice_files,
)
from sparkdl.codec.files import checksum
from sparkdl.connect.fit import store_rows
from sparkdl.errors import CheckpointError, DamagedCheckpoint, ParameterError
from sparkdl.model.flat import layout_of
from sparkdl.slices.spec import SliceState, slice_specs

LAYOUT = layout_of(nn.Linear(16, 5))


def flat(iteration: int) -> torch.Tensor:
    return torch.arange(LAYOUT.size, dtype=torch.float32) + 1000 * iteration


def write(
    store: CheckpointStore, iteration: int, slices: int = 2, attempts: int = 1
) -> tuple[str, Manifest]:
    """A checkpoint's slices, not committed."""
    directory = store.begin(iteration)
    files = []
    for plan in slice_specs(LAYOUT, slices):
        weights = flat(iteration)[plan.start : plan.stop]
        arrays = {"sum": -weights[: plan.trainable_length]} if plan.parameters else {}
        others = {p.number: {"step": torch.tensor(float(iteration))} for p in plan.parameters}
        held = dict.fromkeys(others, ("sum",))
        state = SliceState(weights, arrays, held, others)
        for _ in range(attempts):
            file = WriteSlice(directory, "slice")(plan.index, plan, state)
        files.append(file)
    layout = ModelIdentity.of(LAYOUT)
    return directory, replace(
        A_MANIFEST, iteration=iteration, slices=slices, layout=layout, files=tuple(files), best=None
    )


def commit(store: CheckpointStore, iteration: int, slices: int = 2) -> Path:
    directory, manifest = write(store, iteration, slices)
    store.commit(directory, manifest, b'{"iterations": []}')
    return Path(directory)


def read_all(uri: str, manifest: Manifest, slices: int = 1) -> torch.Tensor:
    states = [
        read_slice_files(uri, manifest.files, plan, torch.float32)
        for plan in slice_specs(LAYOUT, slices)
    ]
    return torch.cat([state.weights for state in states])


def probe(directory: str) -> str | CheckpointError:
    return TryFolder(directory)(0, *slice_specs(LAYOUT, 1), SliceState(flat(5)))


def iterations(store: CheckpointStore) -> list[int]:
    return [manifest.iteration for _, manifest in store.candidates()]


@pytest.fixture(name="store")
def a_store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run")


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_what_is_committed_is_found_read_and_pruned(kind: str, slices: int, tmp_path: Path) -> None:
    root = {
        "path": str(tmp_path / "run"),
        "file": (tmp_path / "run").as_uri(),
        "memory": f"memory://{secrets.token_hex(4)}/run",
    }[kind]
    store = CheckpointStore(root)
    assert list(store.candidates()) == []
    for iteration in (10, 20):
        directory, manifest = write(store, iteration, 2)
        store.commit(directory, manifest, str(iteration).encode())
    store = CheckpointStore.open(root)
    (uri, manifest), (_, older) = store.candidates()
    assert (manifest.iteration, older.iteration) == (20, 10)
    assert store.skipped == []
    assert store.read_history(uri, manifest) == b"20"
    assert torch.equal(read_all(uri, manifest, slices), flat(20))
    for plan in slice_specs(LAYOUT, slices):
        state = read_slice_files(uri, manifest.files, plan, torch.float32)
        if plan.parameters:
            expected = -flat(20)[plan.start : plan.start + plan.trainable_length]
            assert torch.equal(state.arrays["sum"], expected)
        assert state.others == {p.number: {"step": torch.tensor(20.0)} for p in plan.parameters}
    assert len(store.prune(1)) == 1
    assert iterations(store) == [20]
    assert len(store._root.entries()) == 1


def test_one_checkpoint_can_be_opened_by_its_own_path(store: CheckpointStore) -> None:
    first = commit(store, 10)
    commit(store, 20)
    assert iterations(CheckpointStore.open(store._root.uri)) == [20, 10]
    assert iterations(CheckpointStore.open(first)) == [10]
    assert iterations(CheckpointStore.open(first.as_uri())) == [10]
    renamed = first.rename(first.parent.parent / "kept for good")
    assert iterations(CheckpointStore.open(renamed)) == [10]
    (renamed / MANIFEST).unlink()
    incomplete = renamed.rename(first)
    alone = CheckpointStore.open(incomplete)
    assert iterations(alone) == []
    assert "never completed" in str(alone.none_usable())


def test_a_path_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=f"no checkpoint in {tmp_path}/none"):
        CheckpointStore.open(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("")
    store = CheckpointStore.open(tmp_path)
    assert iterations(store) == []
    assert "no checkpoint to resume from" in str(store.none_usable())


# Writing


def test_attempts_never_write_the_same_file(store: CheckpointStore) -> None:
    directory, manifest = write(store, 10, attempts=3)
    assert len(list(Path(directory).iterdir())) == 6
    store.commit(directory, manifest, b"")
    ((uri, found),) = store.candidates()
    assert torch.equal(read_all(uri, found), flat(10))


def test_a_file_that_the_driver_does_not_see_is_no_checkpoint(store: CheckpointStore) -> None:
    """As where every node wrote to a disk of its own."""
    directory, manifest = write(store, 10)
    lost = Path(directory) / manifest.files[1].name
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(CheckpointError, match=f'"{lost.name}" is missing.*all executors share'):
        store.commit(directory, manifest, b"")
    lost.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{len(content) - 1} bytes instead of"):
        store.commit(directory, manifest, b"")
    assert not {MANIFEST, HISTORY} & set(os.listdir(directory))
    lost.write_bytes(content)
    store.commit(directory, manifest, b"")
    assert iterations(store) == [10]


def test_the_files_of_the_best_weights_are_checked_too(store: CheckpointStore) -> None:
    directory, manifest = write(store, 10)
    (plan,) = slice_specs(LAYOUT, 1)
    file = WriteSlice(directory, "best")(0, plan, SliceState(flat(5)))
    best = Best(iteration=5, epoch=1, metric="loss", value=0.5, files=(file,))
    store.commit(directory, replace(manifest, best=best), b"")
    ((uri, found),) = store.candidates()
    assert found.best == best
    state = read_slice_files(uri, found.best.files, plan, torch.float32)
    assert torch.equal(state.weights, flat(5))
    (Path(directory) / file.name).unlink()
    assert iterations(store) == []


# Trying it out


def test_executors_try_a_folder_that_is_made_as_those_of_checkpoints(
    store: CheckpointStore,
) -> None:
    directory = store.begin(0)
    probes = [probe(directory), probe(directory)]
    store.check_probes(directory, probes)
    with pytest.raises(CheckpointError, match=f"wrote into {store} is not visible from"):
        store.check_probes(directory, [*probes, "probe-0123456789abcdef"])
    store.discard(directory)
    assert not Path(directory).exists()
    store.discard(directory)  # gone already


def test_what_others_cannot_write_though_the_folder_is_open_to_them() -> None:
    """The driver's umask closes the folders that it makes; here to all, whoever runs the test."""
    with open_to_all() as root:
        store = CheckpointStore(root)
        before = os.umask(0o222)
        try:
            directory = store.begin(0)
        finally:
            os.umask(before)
        with unprivileged():
            denied = probe(directory)
        assert re.fullmatch(
            rf"an executor cannot write {directory}/probe-\w+: Permission denied\. The path must "
            r"be on a file system that the driver and all executors share, and the executors' user "
            r"must be able to write to the folders that the driver creates there \(see the "
            r"driver's umask\)\.",
            message_of(CheckpointError, store.check_probes, directory, [denied]),
        )
        store.discard(directory)
        assert list(root.iterdir()) == []


def test_probes_of_a_driver_that_was_killed_are_pruned(store: CheckpointStore) -> None:
    directory = store.begin(0)
    probe(directory)
    commit(store, 10)
    assert store.prune(3) == [directory]
    assert not Path(directory).exists()


# Order and pruning


def test_the_newest_is_the_one_begun_last_whatever_the_iteration(store: CheckpointStore) -> None:
    """A run that went back to iteration 10 and on from there is newer than the old iteration 30."""
    for iteration in (10, 20, 30, 15, 16):
        commit(store, iteration)
    assert iterations(store) == [16, 15, 30, 20, 10]


def test_a_clock_that_goes_back_does_not_change_the_order(store: CheckpointStore) -> None:
    first = commit(store, 10)
    head, tail = first.name[:21], first.name[33:]
    first.rename(first.parent / f"{head}ffffff000000{tail}")  # by a clock far ahead
    commit(store, 20)
    commit(store, 30)
    assert iterations(store) == [30, 20, 10]


def test_old_checkpoints_are_pruned(store: CheckpointStore) -> None:
    folders = [commit(store, iteration) for iteration in (10, 20, 30, 40)]
    assert store.prune(None) == []
    assert store.prune(3) == [str(folders[0])]
    assert not folders[0].exists()
    assert iterations(store) == [40, 30, 20]
    assert store.prune(1) == [str(folders[2]), str(folders[1])]
    assert iterations(store) == [40]


def test_leftovers_are_pruned_once_a_newer_one_is_complete(store: CheckpointStore) -> None:
    leftover, _ = write(store, 10)
    Folder(leftover).write("slice-00007-0123456789abcdef.safetensors", b"half")
    (Path(leftover) / ".manifest.json.0123456789abcdef.part").write_bytes(b"{")
    assert store.prune(3) == []
    commit(store, 20)
    under_way, _ = write(store, 30)
    assert store.prune(3) == [leftover]
    assert not Path(leftover).exists()
    assert Path(under_way).exists()


def test_results_of_clients_that_went_away_are_deleted_by_the_next_fit(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of yesterday: another client may be fetching a newer one."""
    checkpoint, now = commit(store, 10), time.time_ns()
    left, new = [], []
    for age, names in ((25, left), (1, new)):
        monkeypatch.setattr(time, "time_ns", lambda age=age: now - age * 3_600_000_000_000)
        names.append(Path(store_rows(checkpoint.parent, {"current": b"weights"}).uri))
    monkeypatch.undo()
    mine = left[0].with_name("result-of-mine")
    mine.mkdir()
    assert (left[0] / "piece-00000").exists()
    store.prepare()
    assert {*checkpoint.parent.iterdir()} == {checkpoint, mine, *new}


def test_nothing_that_is_not_ours_is_deleted(store: CheckpointStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / MANIFEST).write_text("{}")
    oldest = commit(store, 10)
    root = oldest.parent
    kept = [
        oldest / "notes.txt",
        oldest / "model.safetensors",
        root / "other" / MANIFEST,
        root / "iteration-0000000001-short" / MANIFEST,
        root / "iteration-0000000002-0123456789abcdef0123",
        oldest / "mine" / MANIFEST,
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    link = root / "iteration-0000000003-00000000000000000000"
    link.symlink_to(outside)
    inner = oldest / HISTORY
    inner.unlink()
    inner.symlink_to(outside / MANIFEST)
    commit(store, 20)
    assert store.prune(1) == [str(oldest)]
    assert all(path.exists() for path in kept)
    assert (outside / MANIFEST).exists()
    assert link.is_symlink()
    assert inner.is_symlink()
    assert not (oldest / MANIFEST).exists()
    assert iterations(store) == [20]


def test_a_folder_that_cannot_be_pruned_does_not_keep_the_others() -> None:
    """Another user's checkpoints are in the folder: one to read only, one not even that."""
    with open_to_all() as root:
        store = CheckpointStore(root)
        closed, listed, first, second, third = [commit(store, i) for i in (10, 20, 30, 40, 50)]
        for folder, mode in ((closed, 0o311), (listed, 0o555), (first, 0o777), (second, 0o777)):
            folder.chmod(mode)
        with unprivileged():
            with pytest.raises(CheckpointError, match=f"cannot list {closed}: Permission denied"):
                store.prune(1)
            left = sorted(path.name for path in root.iterdir())
            assert left == [closed.name, listed.name, third.name]
            assert iterations(store) == [50, 20]


# Damage


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())


def first_slice(folder: Path) -> Path:
    return folder / manifest_of(folder)["files"][0]["name"]


def link(path: Path) -> None:
    outside = path.parent.parent.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


SEEN_FIRST: list[tuple[str, Callable[[Path], object], str]] = [
    ("no manifest", lambda f: (f / MANIFEST).unlink(), "has no manifest"),
    ("slice is a folder", lambda f: (first_slice(f).unlink(), first_slice(f).mkdir()), "not a reg"),
]


def test_a_folder_that_is_a_link_is_no_checkpoint(store: CheckpointStore) -> None:
    commit(store, 10)
    link(commit(store, 20))
    assert iterations(store) == [10]


@pytest.mark.parametrize(
    ("damage", "says"), [c[1:] for c in SEEN_FIRST], ids=[c[0] for c in SEEN_FIRST]
)
def test_a_damaged_checkpoint_is_passed_over(
    store: CheckpointStore, damage: Callable[[Path], object], says: str
) -> None:
    commit(store, 10)
    newest = commit(store, 20)
    damage(newest)
    ((uri, manifest),) = store.candidates()
    assert manifest.iteration == 10
    assert torch.equal(read_all(uri, manifest), flat(10))
    (skipped,) = store.skipped
    assert skipped.uri == str(newest)
    assert says in skipped.reason
    assert f"{newest}: {skipped.reason}" in str(store.none_usable())


def test_files_with_right_checksums_and_wrong_content_are_found(store: CheckpointStore) -> None:
    """The two slices under each other's names; bytes that are no safetensors; one slice only."""
    folder = commit(store, 10)
    ((uri, manifest),) = store.candidates()
    one, other = manifest.files
    (whole,) = slice_specs(LAYOUT, 1)

    def read(*files: StoredFile) -> None:
        read_slice_files(uri, files, whole, torch.float32)  # type: ignore[arg-type]

    swapped = replace(one, name=other.name, checksum=other.checksum, nbytes=other.nbytes)
    with pytest.raises(DamagedCheckpoint, match=f"{other.name}: it holds another slice"):
        read(swapped, other)
    with pytest.raises(DamagedCheckpoint, match="exactly once"):
        read(one)
    (folder / one.name).write_bytes(b"12345")
    with pytest.raises(DamagedCheckpoint, match=f"{one.name}: it is not a slice"):
        read(replace(one, nbytes=5, checksum=checksum(b"12345")), other)

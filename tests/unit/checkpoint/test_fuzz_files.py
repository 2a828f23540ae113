"""Damaged and forged files, ten thousand in the soak: each is refused with its error, or read right;
nothing is written, no link is followed, no pickle is opened, and memory stays bounded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import torch
from test_state_access import RUN, Made, Store, some_history, written
from torch import nn
from trained import trained_model

import sparkdl
from sparkdl.checkpoint.resume import RestoredRun, ResumeCandidates
from sparkdl.codec.files import MAX_HEADER_BYTES, checksum, json_checksum
from sparkdl.data.fields import Field
from sparkdl.errors import CheckpointError, ModelError, ParameterError, TrustError
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.outputs import Output
from sparkdl.infer.saved import save
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState

CASES = {
    "model.json": 2200,
    "model.safetensors": 1500,
    "buffers.safetensors of a model": 800,
    "history.json of a model": 800,
    "manifest.json": 2500,
    "manifest.json to load": 800,
    "slice": 2200,
    "residual": 1000,
    "history.safetensors": 800,
}
MEMORY_BYTES = 200 << 20
"""The most that the process may grow by, for a while; the files have some kilobytes."""
MUTATIONS = {"json": fuzzing.JSON, "safetensors": fuzzing.TENSORS}


class Net(nn.Module):
    """What a folder names: it is up to the class which arguments it takes."""

    def __init__(self, width: int = 3, *, layers: list[int] | None = None) -> None:
        super().__init__()
        sizes = [2, *(layers or []), width]
        if not all(type(size) is int and 0 < size < 100 for size in sizes):
            raise ValueError(f"no such sizes: {sizes}")
        self.body = nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("angles", torch.rand(width, 2), persistent=False)


# What is mutated: real files.


def save_a_model(folder: Path, model: Any = None) -> None:
    model = model or partial(Net, 4, layers=(5, 3))  # a tuple is told as one
    columns = {"a": sparkdl.Image(size=(4, 4)), "b": sparkdl.Sequence(max_length=7, lengths=True)}
    numbers, words = Field("a", "float32", (2,)), Field("b", "int64", (), columns["b"].rule)
    trained = trained_model(
        model(),
        model=model,
        features=("a", "b"),
        label=("y",),
        columns=columns,
        fields=(numbers, words, Field("y", "float32", ())),
        output=Output((4,), "float32"),
        history=some_history(),
    )
    save(trained, folder)


# How it is read: by what ``sparkdl.load`` and ``fit(resume=...)`` call.


def read_model(folder: Path) -> object:
    trained = load(folder)
    assert isinstance(trained.module, Net)
    assert all(type(name) is str for name in (*trained.features, *trained.label))
    use_history(trained.history)
    return values_of(trained)


def values_of(trained: TrainedModel) -> object:
    tensors = {**trained.module.state_dict(), **dict(trained.module.named_buffers())}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def load_the_checkpoint(root: Path) -> object:
    trained = load(root)
    assert isinstance(trained.module, Made)
    use_history(trained.history)
    return values_of(trained), values_of(trained.best) if trained.best else None


def read_checkpoint(root: Path) -> object:
    store = Store(slices=1)
    found = ResumeCandidates(None, root).restore(store, RUN)
    assert isinstance(found, RestoredRun)
    use_history(found.history)
    assert isinstance(found.state, TrainState)
    return store.plain(), found.history.to_json_bytes()


def use_history(history: History) -> None:
    assert len(list(history)) == len(history.losses)
    assert isinstance(history._repr_html_(), str)
    assert isinstance(history.timing_table(), str)
    assert isinstance(history.to_json_bytes(), bytes)
    assert isinstance(history.to_bytes(), bytes)


# Where it happens


class Watch:
    """What this process opens, imports and runs meanwhile, as CPython's audit events tell."""

    def __init__(self) -> None:
        self.on, self.forbidden, self.seen = False, "", list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes or (isinstance(path, str) and path.startswith(self.forbidden)):
                self.seen.append(f"open {path}")
        elif event.startswith(("pickle.", "subprocess.", "os.", "shutil.", "socket.")) and (
            event not in ("os.listdir", "os.scandir", "os.putenv", "os.unsetenv")
        ):
            self.seen.append(event)


WATCH = Watch()


class Place:
    """A folder to read from, with files around it that nobody may touch."""

    def __init__(self, top: Path) -> None:
        self.top, self.target = top, top / "a" / "target"
        self.outside = top / "sentinel"
        for folder in (self.target, self.outside, top / "cwd"):
            folder.mkdir(parents=True)
        for path in (self.outside / "x", top / "a" / "x", top / "cwd" / "x"):
            path.write_text("mine")

    def snapshot(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, files in os.walk(self.top):
            for name in files:
                status = os.lstat(f"{folder}/{name}")
                found[f"{folder}/{name}"] = (status.st_size, status.st_mtime_ns)
        return found


@pytest.fixture(name="place")
def a_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk takes 1 ms a file
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        place = Place(Path(folder) / "top")
        monkeypatch.chdir(place.top / "cwd")
        WATCH.forbidden, WATCH.seen = str(place.outside), []
        yield place
        WATCH.on = False
        monkeypatch.undo()


def peak_bytes() -> int:
    """The most memory this process had since :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def repair_model(folder: Path) -> None:
    """Let ``model.json`` have the checksums of the files that are there: a forgery."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        content = json.loads((folder / "model.json").read_bytes())
        for name in filter(lambda name: (folder / name).is_file(), content["files"]):
            content["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        content["checksum"] = json_checksum(content)
        (folder / "model.json").write_text(json.dumps(content))


def repair_checkpoint(folder: Path) -> None:
    """Let the manifest have the sizes and checksums of the files that are there, and its own."""
    content = json.loads((folder / "manifest.json").read_bytes())
    best = content["best"]["files"]
    for file in [*content["files"], *content["residuals"], *best, content["history"]]:
        data = (folder / file["name"]).read_bytes()
        file |= {"nbytes": len(data), "checksum": checksum(data)}
    write_manifest(folder, content)


def write_manifest(folder: Path, content: Any) -> None:
    """With its right checksum, as far as it can have one."""
    if isinstance(content, dict):
        content.pop("checksum", None)
        content["checksum"] = json_checksum(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def forge_manifest(data: bytes, chance: random.Random, folder: Path) -> None:
    content = json.loads(data)
    for _ in range(chance.choice([1, 1, 2])):
        content = fuzzing.edit(content, chance)
    write_manifest(folder, content)


def files_of(case: str, place: Place) -> tuple[Path, list[Path], Callable[[], object]]:
    """Folder, the files of which one is mutated at a time, and how to read."""
    if "model" in case:
        save_a_model(place.target)
        name = case.partition(" ")[0]
        return place.target, [place.target / name], partial(read_model, place.target)
    written(place.target)
    (folder,) = place.target.glob("iteration-*")
    names = sorted(folder.glob(f"{case.partition(' ')[0]}*"))
    read = load_the_checkpoint if "load" in case else read_checkpoint
    return folder, names, partial(read, place.target)


@pytest.mark.linux
@pytest.mark.parametrize("part", [16, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES)
def test_a_mutated_file_is_refused_or_read_right(case: str, part: int, place: Place) -> None:
    count = CASES[case] // part
    chance = random.Random(f"sparkdl, {case}")
    folder, paths, read = files_of(case, place)
    wholes = {path: path.read_bytes() for path in [*paths, *folder.glob("m*.json")]}
    right = read()
    around = place.snapshot()
    kind = "json" if paths[0].suffix == ".json" else "safetensors"
    outcomes: Counter[str] = Counter()
    forget_peak()
    before = peak_bytes()
    for _ in range(count):
        path = chance.choice(paths)
        forged = mutate(path, wholes[path], kind, chance, folder, case)
        there = place.snapshot()
        WATCH.on = True
        try:
            found = read()
            outcomes["forged and read" if forged else "read"] += 1
            assert forged or found == right  # such as white space in JSON
        except (CheckpointError, ParameterError, ModelError, TrustError) as error:
            outcomes[type(error).__name__] += 1
        finally:
            WATCH.on = False
        assert WATCH.seen == []
        assert place.snapshot() == there
        for one, whole in wholes.items():
            one.write_bytes(whole)
    assert peak_bytes() - before < MEMORY_BYTES
    assert place.snapshot().keys() == around.keys()
    assert outcomes["forged and read"] > 0  # the forged ones get past the checksums
    assert sum(outcomes.values()) == count
    assert outcomes["forged and read"] < 0.9 * count


def mutate(
    path: Path, whole: bytes, kind: str, chance: random.Random, folder: Path, case: str
) -> bool:
    """Write a mutated file; whether the checksums were made to fit, where there are any."""
    if path.name == "manifest.json" and chance.random() < 0.7:
        forge_manifest(whole, chance, folder)
        return True
    choices = fuzzing.BYTES if chance.random() < 0.4 else MUTATIONS[kind]
    path.write_bytes(chance.choice(choices)(whole, chance))
    if path.name == "manifest.json":
        return False
    if forged := chance.random() < 0.8:
        (repair_model if "model" in case else repair_checkpoint)(folder)
    return forged


@pytest.mark.parametrize("case", CASES)
def test_a_link_is_never_followed(case: str, place: Place) -> None:
    """It leads to the very file that was there, so nothing but the link is wrong."""
    _, paths, read = files_of(case, place)
    right = read()
    for path in paths:
        elsewhere = place.outside / path.name
        os.replace(path, elsewhere)
        path.symlink_to(elsewhere)
        WATCH.on = True
        with pytest.raises((CheckpointError, ModelError)):
            read()
        WATCH.on = False
        assert WATCH.seen == [] or path.name == "model.json"  # opened in vain: O_NOFOLLOW
        os.replace(elsewhere, path)
        assert read() == right


def test_saving_replaces_a_link_and_writes_nothing_through_it(place: Place) -> None:
    for name in ("model.json", "model.safetensors", "history.json", "recipe.pkl"):
        (place.target / name).symlink_to(place.outside / "x")
    model = lambda: Net()  # noqa: E731
    with pytest.raises(FileExistsError):
        save_a_model(place.target, model)
    (place.target / "model.json").unlink()
    save_a_model(place.target, model)
    assert (place.outside / "x").read_text() == "mine"
    assert not any(path.is_symlink() for path in place.target.iterdir())


@pytest.mark.linux
def test_a_header_too_large_is_not_read(place: Place) -> None:
    """A sparse file that has all the bytes that it says."""
    save_a_model(place.target)
    path = place.target / "model.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(1 << 40)
    began = time.monotonic()
    forget_peak()
    before = peak_bytes()
    with pytest.raises(ModelError, match="its header has 33,554,433 bytes: more than 33,554,432"):
        load(place.target)
    trainer = sparkdl.Trainer(model=Net, loss=nn.MSELoss(), optimizer=torch.optim.SGD, weights=path)
    from sparkdl.train.prepare import prepare

    with pytest.raises(ParameterError, match="its header has 33,554,433 bytes"):
        prepare(trainer, None)
    assert peak_bytes() - before < MAX_HEADER_BYTES
    assert time.monotonic() - began < 10


@pytest.mark.linux
@pytest.mark.parametrize("name", ["model.json", "manifest.json"])
def test_json_too_large_is_not_read(name: str, place: Place) -> None:
    _, (path,), read = files_of(name, place)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    forget_peak()
    before = peak_bytes()
    with pytest.raises((CheckpointError, ModelError), match="33,554,432 at most are expected"):
        read()
    assert peak_bytes() - before < 32 << 20


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("case", CASES)
def test_no_pickle_is_opened(case: str, place: Place) -> None:
    """In the place of any file, though the checksums fit."""
    folder, paths, read = files_of(case, place)
    mark = place.top / "exploded"
    for path in paths:
        path.write_bytes(pickle.dumps(Bomb(mark)))
        if path.name not in ("manifest.json", "model.json"):
            (repair_model if "model" in case else repair_checkpoint)(folder)
        with pytest.raises((CheckpointError, ModelError)):
            read()
    assert not mark.exists()


def test_the_pickle_of_a_recipe_is_opened_with_trust_alone(place: Place) -> None:
    save_a_model(place.target, lambda: Net())
    mark = place.top / "exploded"
    (place.target / "recipe.pkl").write_bytes(pickle.dumps(Bomb(mark)))
    repair_model(place.target)
    with pytest.raises(TrustError, match="a pickle, which can run any code"):
        load(place.target)
    load(place.target, model=lambda: Net())
    assert not mark.exists()
    with pytest.raises(ModelError, match="NoneType' object is not callable"):
        load(place.target, trust=True)
    assert mark.exists()

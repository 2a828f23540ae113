"""Each file that a run keeps, cut in half, emptied, with one bit flipped, or deleted: the error names
it, or an older one takes its place. None is read as something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from test_fuzz_files import load_the_checkpoint, read_checkpoint, read_model, save_a_model
from test_state_access import some_history, written

from sparkdl.checkpoint.files import Folder
from sparkdl.collectives.key_range import (
    Gradient,
    KeyRange,
    KeySpec,
    Manifest,
    new_name,
    read_ranges,
    write_ranges,
)
from sparkdl.errors import CheckpointError, ModelError, ParameterError
from sparkdl.tune.folder import Objective, SearchFolder, TrialOutcome, TrialRecord

ERRORS = (CheckpointError, FileNotFoundError, ModelError, ParameterError)
FLIPS = 10


def flipped(data: bytes, place: float) -> bytes:
    """One bit of another value, at this share of the file."""
    at = int(place * (len(data) - 1))
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": lambda data: None,
    **{
        f"bit {n}": lambda data, n=n: flipped(data, n / (FLIPS - 1))  # type: ignore[misc]
        for n in range(FLIPS)
    },
}


def two_checkpoints(root: Path) -> None:
    written(root)
    written(root)


def a_search(root: Path) -> SearchFolder:
    return SearchFolder.open(root, {"space": "{}"}, Objective("loss", higher=False, best=False))


def trials(root: Path) -> None:
    search = a_search(root)
    for number, value in enumerate([2.0, 1.0, 3.0]):
        record = TrialRecord(
            number=number, arguments={"lr": 0.1 * number}, status="completed", value=value
        )
        search.add(TrialOutcome(record, {"last": torch.arange(40.0) * value}, some_history()))


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("writes", range(7))
def test_a_search_whose_process_ends_at_any_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Its folder, those of the models of best trials, and the trials; half a file may be left."""
    left, write = [writes], Folder.write

    def ends(self: Folder, name: str, data: bytes) -> None:
        if not left[0]:
            (Path(self.uri) / f".{name}.{'0' * 16}.part").write_bytes(data[:9])
            raise Killed
        left[0] -= 1
        write(self, name, data)

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(Folder, "write", ends)
        trials(tmp_path / "search")
    trials(tmp_path / "search")
    trials(tmp_path / "whole")
    assert read_trials(tmp_path / "search") == read_trials(tmp_path / "whole")


def read_trials(root: Path) -> list[Any]:
    search = a_search(root)
    weights, history = search.model(1)
    return [*map(str, search.records.values()), str(weights), str(list(history))]


SPECS = [KeySpec.of("w", 0, [6, 4], torch.float32, 2), KeySpec.of("b", 1, [5], torch.float64, 2)]


def adam(values: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(values, lr=0.1)


def server(root: Path) -> None:
    torch.manual_seed(2)
    saved = Manifest(root, new_name(), 2, "Adam", tuple(SPECS))
    for place in range(2):
        ranges = {
            spec.number: KeyRange(
                torch.randn(spec.range_shape(place), dtype=spec.dtype), adam, True
            )
            for spec in SPECS
        }
        for its in ranges.values():
            its.step([Gradient(torch.randn_like(its.values), None)])
        write_ranges(saved.file_of(place), ranges)
    saved.write()


def read_server(root: Path) -> list[str]:
    saved = Manifest.read(root)
    ranges = [read_ranges(saved, SPECS, place, adam, True).values() for place in range(2)]
    return [str((its.values, its.state)) for one in ranges for its in one]


FOLDERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "checkpoints": (two_checkpoints, lambda root: [read_checkpoint(root)]),
    "checkpoints, loaded": (two_checkpoints, lambda root: [load_the_checkpoint(root)]),
    "model": (save_a_model, lambda root: [read_model(root)]),
    "search": (trials, read_trials),
    "parameter server": (server, read_server),
}


@pytest.mark.parametrize(
    "damage", soak_but(["half", "empty", "gone", "bit 0", "bit 4", "bit 9"], DAMAGES)
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_damaged_file_is_named_or_an_older_one_is_read(
    folder: str, damage: str, tmp_path: Path
) -> None:
    make, read = FOLDERS[folder]
    make(tmp_path)
    right = read(tmp_path)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert len(files) >= 3
    for path in files:
        data = path.read_bytes()
        damaged = DAMAGES[damage](data)
        path.unlink() if damaged is None else path.write_bytes(damaged)
        said = None
        try:
            found = read(tmp_path)
            assert all(part in right for part in found), path  # a trial may have to be made again
        except ERRORS as error:
            said = str(error)
        if said is not None:
            assert "checkpoints" not in folder, (path, said)
            assert path.name in said or damaged is None, (path, said)
        path.write_bytes(data)

"""Checkpoints that ranks write while they train: the files of those for which training waits."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from gang_training import same
from gang_training import trainer_of as any_trainer
from launch import soak_but
from pyspark import cloudpickle

import sparkdl
from sparkdl import CheckpointError, ParameterError
from sparkdl.checkpoint import save as checkpointing
from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.store import CheckpointStore, WriteSlice

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def trainer_of(path: Path, asynchronous: bool = True, **changes: Any) -> sparkdl.Trainer:
    every = changes.pop("every", 2)
    kept = sparkdl.Checkpoint(path, every=sparkdl.every(every), asynchronous=asynchronous)
    return any_trainer(**{"checkpoint": kept, **changes})


def contents(path: Path) -> list[dict[str, Any]]:
    """What is in the checkpoints of a folder, the newest first: tensors as lists, by file and name."""
    return [
        {
            "iteration": manifest.iteration,
            "slices": tensors(uri, manifest.files),
            "best": tensors(uri, manifest.best.files) if manifest.best else {},
            "residuals": tensors(uri, manifest.residuals),
        }
        for uri, manifest in CheckpointStore.open(path).candidates()
    ]


def tensors(uri: str, files: Any) -> dict[tuple[int, str], list]:
    found = {}
    for number, file in enumerate(files):
        for name, tensor in safetensors.torch.load(Folder(uri).read(file.name)).items():
            found[number, name] = tensor.tolist()
    return found


CASES: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1", "ema": 0.9},
    "pipeline": {"strategy": "pipeline"},
    "compressed": {"compression": sparkdl.PowerSGD(1)},
}


@pytest.mark.parametrize("case", soak_but(["pipeline", "compressed"], CASES))
def test_the_files_are_those_of_one_that_training_waited_for(parts, tmp_path, case):
    rows = parts(20, 12)
    how = {
        **CASES[case],
        "validation": sparkdl.Validation(rows, best="loss", every=sparkdl.every(2)),
    }
    one = trainer_of(tmp_path / "waited", asynchronous=False, **how).fit(rows)
    other = trainer_of(tmp_path / "not", **how).fit(rows)
    same(one, other)
    waited, found = contents(tmp_path / "waited"), contents(tmp_path / "not")
    assert [entry["iteration"] for entry in found] == [6, 4, 2]
    assert found == waited
    assert all(entry["best"] for entry in found)
    assert all(bool(entry["residuals"]) == (case == "compressed") for entry in found)


@dataclass(frozen=True)
class Held(WriteSlice):
    """Writes when a file is there; fails where it says so."""

    gate: str = ""

    def __call__(self, index: int, plan: Any, state: Any) -> Any:
        deadline = time.monotonic() + 60
        while not Path(self.gate).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if Path(self.gate).read_text():
            raise CheckpointError("the disk is full")
        return super().__call__(index, plan, state)


class Open(sparkdl.Callback):
    """Lets the writers go on after iteration ``at``; notes when a checkpoint was complete."""

    def __init__(self, gate: Path, at: int, text: str = "") -> None:
        self.gate, self.at, self.text = gate, at, text
        self.complete: list[tuple[int, str]] = []

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        if state.iteration >= self.at and not self.gate.exists():
            draft = self.gate.with_name("draft")
            draft.write_text(self.text)
            draft.rename(self.gate)  # whoever sees it reads all of it
        if self.gate.exists():
            time.sleep(0.2)  # until it is written

    def on_checkpoint(self, trainer: Any, state: Any) -> None:
        self.complete.append((state.iteration, state.checkpoint))


@pytest.fixture
def held(monkeypatch, tmp_path) -> Path:
    gate = tmp_path / "gate"

    def made(directory: str, kind: str) -> Held:
        return Held(directory, kind, str(gate))

    monkeypatch.setattr(checkpointing, "WriteSlice", made)
    return gate


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_training_goes_on_and_the_state_is_that_of_when_it_began(
    parts, tmp_path, held, monkeypatch, strategy
):
    rows, stop = parts(20, 12), sparkdl.max_iteration(9)
    opened = Open(held, at=5)
    run = trainer_of(tmp_path / "kept", every=3, strategy=strategy, stop=sparkdl.max_iteration(7))
    replace(run, callbacks=[opened]).fit(rows)
    (first, uri), (second, _), (last, end) = opened.complete
    assert first in (6, 7)  # begun after 3, complete when the next begins, if not before
    assert (second, last) == (7, 7)  # begun after 6; and the run's last
    assert "iteration-0000000007-" in end
    assert "iteration-0000000003-" in uri
    assert [entry["iteration"] for entry in contents(tmp_path / "kept")] == [7, 6, 3]
    monkeypatch.undo()
    whole = any_trainer(strategy=strategy, stop=stop).fit(rows)
    same(whole, any_trainer(strategy=strategy, stop=stop).fit(rows, resume=uri))


def test_a_failure_is_told_with_the_iteration_it_began_after(parts, tmp_path, held):
    opened = Open(held, at=4, text="full")
    run = trainer_of(tmp_path / "kept", every=2, callbacks=[opened])
    with pytest.raises(CheckpointError) as caught:
        run.fit(parts(20, 12))
    message = "after iteration 2 no checkpoint could be written: the disk is full"
    assert str(caught.value).startswith(message)
    assert contents(tmp_path / "kept") == []


def test_other_engines_do_not_write_in_the_background(parts, tmp_path):
    for engine in ("shuffle", "local"):
        with pytest.raises(ParameterError) as caught:
            trainer_of(tmp_path, engine=engine).fit(parts(12, 12))
        assert str(caught.value) == (
            f'Checkpoint(asynchronous=True) with engine="{engine}": only the ranks of a gang write '
            'checkpoints while they train. Use engine="gang", or leave asynchronous out.'
        )

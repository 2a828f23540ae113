"""The history: what was recorded, epoch by epoch, and on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sparkdl.train.history import History
from sparkdl.train.state import TrainState

ROWS = [  # epoch, loss, samples of the batch, seconds since the start, learning rates
    (1, 4.0, 10, 1.0, (0.5, 0.9)),
    (1, 2.0, 10, 1.5, (0.4, 0.9)),
    (1, 1.0, 5, 1.75, (0.3, 0.9)),
    (2, 0.5, 10, 3.0, (0.2, 0.9)),
    (2, 0.25, 15, 4.0, (0.1, 0.9)),
]


def some_history() -> History:
    history, samples = History(), 0
    for iteration, (epoch, loss, count, seconds, rates) in enumerate(ROWS, start=1):
        samples += count
        state = TrainState(
            iteration=iteration, samples=samples, loss=loss, seconds=seconds, learning_rates=rates
        )
        history.append(state, epoch)
    return history


def test_one_record_an_iteration() -> None:
    records = list(some_history())
    assert records[0] == {
        "iteration": 1,
        "epoch": 1,
        "loss": 4.0,
        "learning_rate": 0.5,
        "samples": 10,
        "seconds": 1.0,
    }
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["epoch"] for record in records] == [1, 1, 1, 2, 2]
    assert [record["samples"] for record in records] == [10, 20, 25, 35, 50]
    assert [record["learning_rate"] for record in records] == [0.5, 0.4, 0.3, 0.2, 0.1]


def test_losses_and_length() -> None:
    history = some_history()
    assert len(history) == 5
    assert history.losses == [4.0, 2.0, 1.0, 0.5, 0.25]


def test_an_epoch_weighs_its_batches_by_their_samples() -> None:
    assert some_history().epochs() == [
        {"epoch": 1, "loss": 2.6, "iterations": 3, "samples": 25, "seconds": 1.75},
        {"epoch": 2, "loss": 0.35, "iterations": 2, "samples": 25, "seconds": 2.25},
    ]


def test_nothing_yet() -> None:
    assert list(History()) == []
    assert History().epochs() == []
    assert History().losses == []


def test_an_optimizer_without_a_learning_rate() -> None:
    history = History()
    history.append(TrainState(iteration=1, samples=1, loss=1.0), 1)
    assert math.isnan(next(iter(history))["learning_rate"])


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    history = some_history()
    history.save(tmp_path / "history.json")
    loaded = History.load(str(tmp_path / "history.json"))
    assert list(loaded) == list(history)
    assert loaded.epochs() == history.epochs()


@pytest.mark.parametrize("history", [History(), some_history()])
def test_the_file_is_json_for_anyone(tmp_path: Path, history: History) -> None:
    path = tmp_path / "history.json"
    history.save(path)
    assert path.read_text().endswith("}\n")
    assert json.loads(path.read_text()) == {
        "iterations": list(history),
        "epochs": history.epochs(),
    }


def test_an_iteration_takes_a_few_bytes() -> None:
    history = History()
    for iteration in range(1000):
        history.append(TrainState(iteration=iteration, samples=iteration, loss=0.1), 1)
    columns = list(vars(history).values())
    assert sum(len(column) * column.itemsize for column in columns) == 1000 * 40

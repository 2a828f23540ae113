"""Files of the history, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import summary_runs as runs
from mistakes import message_of

import sparkdl
from sparkdl.loop.history import History
from sparkdl.loop.state import Validated
from sparkdl.summaries import HistoryFile, Report


class Watch(sparkdl.Callback):
    """What the file holds after each iteration, and after its validation."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, []

    def look(self, *_: Any) -> None:
        history = History.load(self.path) if self.path.exists() else History()
        self.seen.append((len(history), len(history.validations)))

    on_iteration_end = on_validation_end = look


@pytest.mark.parametrize("name", ["history.json", "deep/er/history.csv"])
def test_the_file_grows_with_the_run(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    watch = Watch(path)
    runs.play([HistoryFile(path), watch], runs.states(last=9))
    none, one, two = (0, 0), (4, 1), (8, 2)
    assert watch.seen == [none, none, none, (4, 0), one, one, one, one, (8, 1), two, two]
    history = History.load(path)
    assert [row["loss"] for row in history] == [8.0 / i for i in range(1, 10)]
    assert [row["epoch"] for row in history] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [row["skipped"] for row in history] == [i == 3 for i in range(1, 10)]
    assert history.validations[1]["metrics"] == {"loss": 9.0 / 8, "accuracy": 0.8}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["history.json", "history.csv"])
def test_a_resumed_run_goes_on_with_its_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = HistoryFile(tmp_path / f"whole-{name}", every=sparkdl.every(1))
    runs.play([whole], runs.states())
    runs.play([HistoryFile(path, every=sparkdl.every(1))], runs.states(last=7), finish=False)
    runs.play([HistoryFile(path, every=sparkdl.every(1))], runs.states(first=6))
    assert path.read_text() == (tmp_path / f"whole-{name}").read_text()


@pytest.mark.parametrize("name", ["history.json", "history.csv"])
def test_a_file_that_began_late_reports_no_skip_that_was_before_it(tmp_path, name: str) -> None:
    path = tmp_path / name
    runs.play([HistoryFile(path, every=sparkdl.every(1))], runs.states(first=5, last=6))
    runs.play([HistoryFile(path, every=sparkdl.every(1))], runs.states(first=7))
    found = History.load(path)
    assert [row["iteration"] for row in found] == [5, 6, 7, 8]
    assert not any(row["skipped"] for row in found)


def test_a_run_that_goes_on_from_a_checkpoint_within_an_epoch_finds_all_before(
    tmp_path: Path,
) -> None:
    path, states = tmp_path / "history.json", runs.states(last=7)
    callback = HistoryFile(path)
    runs.play([callback], states[:6], finish=False)
    callback.on_checkpoint(runs.a_trainer(), states[5])
    assert len(History.load(path)) == 5  # an epoch is four


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    callback = HistoryFile(tmp_path / "history.json")
    for _ in range(2):
        runs.play([callback], runs.states())
        assert len(History.load(tmp_path / "history.json")) == 8


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    callback = HistoryFile(path)
    runs.play([callback], runs.states(last=4))
    before = path.read_bytes()
    callback.history.append_validation(Validated(iteration=1, epoch=1, metrics={"x": "no number"}))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="no number"):
        callback.write(runs.a_trainer(), runs.states()[-1])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", ["s3://bucket/model", "hdfs:///models/m", "dbfs:/m"])
@pytest.mark.parametrize(("make", "name"), [(HistoryFile, "/h.csv"), (Report, "/r.html")])
def test_a_uri_is_no_path_here(path: str, make: Any, name: str) -> None:
    assert message_of(sparkdl.ParameterError, make, path + name) == (
        f'"{path}{name}" is a URI, which only checkpoints and models support: give a path on the '
        "driver's file system, and copy the files there yourself."
    )


def test_a_file_of_no_history_and_what_is_no_trigger() -> None:
    told = message_of(sparkdl.ParameterError, HistoryFile, "history.txt")
    assert told == 'HistoryFile("history.txt"): end the name in .csv or .json.'
    told = message_of(sparkdl.ParameterError, Report, "runs/report")
    assert told == 'Report("runs/report"): end the name in .html.'
    told = message_of(sparkdl.ParameterError, HistoryFile, "history.csv", every=5)
    assert told == "HistoryFile(every=5): give a trigger, such as sparkdl.every(5)."


@pytest.mark.parametrize(("make", "name"), [(Report, "a.HTML"), (HistoryFile, "a.json")])
def test_a_path_that_cannot_be_written_is_told_as_the_fit_starts(
    tmp_path: Path, make: Any, name: str
) -> None:
    def start(path: Path) -> None:
        runs.play([make(path)], runs.states(last=0), finish=False)

    folder, path = tmp_path / name, tmp_path / "file" / "deep" / name
    folder.mkdir()
    (tmp_path / "file").touch()
    assert message_of(sparkdl.ParameterError, start, folder) == (
        f'{make.__name__}("{folder}") is a folder: give the name of a file in it.'
    )
    assert message_of(sparkdl.ParameterError, start, path) == (
        f'{make.__name__}("{path}"): no file can be written there (Not a directory: {path.parent}). '
        "Give a path in a folder that you may write to."
    )
    start(tmp_path / "new" / name)
    assert list((tmp_path / "new").iterdir()) == []


def test_the_report_of_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    callback = Report(path, every=sparkdl.every(1))
    runs.play([callback], runs.states(last=1), finish=False)
    assert "1 iteration up to epoch 1" in path.read_text()
    runs.play([callback], runs.states())
    page = path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert "8 iterations up to epoch 2" in page
    assert "torch.optim.sgd:SGD(lr=0.5, momentum=0.25)" in page

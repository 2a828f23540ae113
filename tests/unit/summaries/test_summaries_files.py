"""Files of the history, and its curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import summary_runs as runs
from mistakes import message_of

import sparkdl
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated
from sparkdl.summaries import Curves, HistoryFile, plot_history


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


@pytest.mark.parametrize("name", ["runs/curves", "c.pgn", ".png"])
def test_a_picture_of_no_known_kind(name: str) -> None:
    assert message_of(sparkdl.ParameterError, Curves, name) == (
        f'Curves("{name}"): end the name in .png, .svg, .pdf or another kind of file that matplotlib '
        "writes."
    )


@pytest.mark.parametrize("path", ["s3://bucket/model", "hdfs:///models/m", "dbfs:/m"])
@pytest.mark.parametrize(("make", "name"), [(HistoryFile, "/h.csv"), (Curves, "/c.png")])
def test_a_uri_is_no_path_here(path: str, make: Any, name: str) -> None:
    assert message_of(sparkdl.ParameterError, make, path + name) == (
        f'"{path}{name}" is a URI, which only checkpoints and models support: give a path on the '
        "driver's file system, and copy the files there yourself."
    )


def test_a_file_of_no_history_and_what_is_no_trigger() -> None:
    told = message_of(sparkdl.ParameterError, HistoryFile, "history.txt")
    assert told == 'HistoryFile("history.txt"): end the name in .csv or .json.'
    told = message_of(sparkdl.ParameterError, HistoryFile, "history.csv", every=5)
    assert told == "HistoryFile(every=5): give a trigger, such as sparkdl.every(5)."


@pytest.mark.parametrize(("make", "name"), [(Curves, "a.PNG"), (HistoryFile, "a.json")])
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


def pixels(path: Path) -> np.ndarray:
    from matplotlib import image

    return image.imread(path)


def has(path: Path, colour: str) -> bool:
    """Whether the picture shows a colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return bool((np.abs(pixels(path)[..., :3] - wanted).max(axis=-1) < 0.01).any())


TRAINING, MEAN, RATE = "#a9c4de", "#1f4e79", "#7a7a7a"
VALIDATION, FIRST, SECOND, THIRD = "#c8553d", "#588157", "#8e5aa8", "#d99a2b"


def test_curves_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "curves.png"
    runs.play([Curves(path, every=sparkdl.every(4))], runs.states())
    assert [p.name for p in path.parent.iterdir()] == ["curves.png"]
    assert pixels(path).shape == (756, 960, 4)  # loss, accuracy and the learning rate
    for colour in (MEAN, RATE, VALIDATION, FIRST):
        assert has(path, colour)
    assert not has(path, SECOND)


def a_history(metrics: dict[str, float]) -> History:
    history = History()
    for i in range(1, 5):
        state = TrainState(iteration=i, samples=i, loss=1.0 / i, learning_rates=(0.1,))
        history.append(state, 1 + i // 3)
        if metrics:
            history.append_validation(Validated(iteration=i, epoch=i // 3, metrics=metrics))
    return history


@pytest.mark.parametrize(
    ("metrics", "height", "there", "missing"),
    [
        ({}, 540, [MEAN, RATE], [VALIDATION, FIRST]),
        ({"loss": 0.7}, 540, [MEAN, RATE, VALIDATION], [FIRST]),
        ({"accuracy": 0.5, "f1": 0.2}, 756, [FIRST, SECOND], [VALIDATION, THIRD]),
        ({"accuracy": 0.5, "mse": 40.0, "bias": -2.0}, 1188, [FIRST, SECOND, THIRD], []),
    ],
)
def test_a_panel_for_each_scale(
    tmp_path: Path, metrics: dict[str, float], height: int, there: list[str], missing: list[str]
) -> None:
    path = tmp_path / "a.png"
    plot_history(a_history(metrics), path)
    assert pixels(path).shape == (height, 960, 4)
    assert [has(path, colour) for colour in there] == [True] * len(there)
    assert [has(path, colour) for colour in missing] == [False] * len(missing)


@pytest.mark.parametrize("losses", [[], [1.0], [float("nan")] * 3, [float("inf"), 1.0, 0.0]])
@pytest.mark.filterwarnings("error")
def test_any_history_can_be_drawn(tmp_path: Path, losses: list[float]) -> None:
    history = History()
    for i, loss in enumerate(losses, start=1):
        history.append(TrainState(iteration=i, samples=i, loss=loss), i)
    plot_history(history, tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").shape == (540, 960, 4)


def test_curves_as_svg_and_as_a_notebook_shows_them(tmp_path: Path) -> None:
    figure = plot_history(a_history({}), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(plot_history(a_history({})).axes) == len(figure.axes)

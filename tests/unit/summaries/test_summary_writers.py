"""One table over all summary writers: whoever adds one adds a row. The first row is the smallest."""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import summary_runs as runs
import torch
from trained import trained_model

import sparkdl
from sparkdl import mlflow
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.slices.update import Histogram
from sparkdl.summaries import MLflow, Report, Summaries, TensorBoard

Shown = dict[str, dict[int, float]]
"""Values by name and iteration."""


class Lines:
    """A writer of JSON lines: everything that a new writer has to define."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, params: Mapping[str, str], iteration: int) -> None:
        self._add("open", iteration, dict(params))

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        self._add("scalars", iteration, dict(values))

    def histograms(self, values: Mapping[str, Histogram], iteration: int) -> None:
        self._add("histograms", iteration, {n: int(h.counts.sum()) for n, h in values.items()})

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self, status: str) -> None:
        self._add("close", 0, status)

    def _add(self, *line: Any) -> None:
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)


class Row:
    """A writer, and how to read what it wrote."""

    histograms = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def callback(self, every: sparkdl.Trigger) -> Summaries:
        """A callback that shows a run with it."""
        raise NotImplementedError

    def scalars(self) -> Shown:
        """The scalars that are on disk."""
        raise NotImplementedError

    def histogram_iterations(self) -> list[int]:
        """The iterations whose weights are shown as histograms."""
        return []

    def params(self) -> dict[str, str] | None:
        """The parameters of the run; None if it shows none."""

    def status(self) -> str | None:
        """The end of the run; None if it shows none."""


class LinesRow(Row):
    def callback(self, every: sparkdl.Trigger) -> Summaries:
        return Summaries(Lines(self.folder / "lines"), every)

    def lines(self, kind: str) -> list[Any]:
        lines = map(json.loads, (self.folder / "lines").read_text().splitlines())
        return [(iteration, content) for of, iteration, content in lines if of == kind]

    def scalars(self) -> Shown:
        found: Shown = {}
        for iteration, values in self.lines("scalars"):
            for name, value in values.items():
                found.setdefault(name, {})[iteration] = value
        return found

    def histogram_iterations(self) -> list[int]:
        return [at for at, values in self.lines("histograms") if values == {"weights/weight": 5}]

    def params(self) -> dict[str, str]:
        return self.lines("open")[-1][1]

    def status(self) -> str:
        return self.lines("close")[-1][1]


class TensorBoardRow(Row):
    def callback(self, every: sparkdl.Trigger) -> Summaries:
        return TensorBoard(self.folder, every)

    def scalars(self) -> Shown:
        return runs.tensorboard_scalars(self.folder)

    def histogram_iterations(self) -> list[int]:
        events = runs.tensorboard_events(self.folder)
        return [event.step for event in events.Histograms("weights/weight")]


class MLflowRow(Row):
    histograms = False

    def callback(self, every: sparkdl.Trigger) -> Summaries:
        made = MLflow(every=every)
        self.run_id = lambda run=made._run: run.run_id
        return made

    def run(self) -> Any:
        import mlflow

        return mlflow.MlflowClient().get_run(self.run_id())

    def scalars(self) -> Shown:
        import mlflow

        history = mlflow.MlflowClient().get_metric_history
        return {
            name: {metric.step: metric.value for metric in history(self.run_id(), name)}
            for name in self.run().data.metrics
        }

    def params(self) -> dict[str, str]:
        return self.run().data.params

    def status(self) -> str:
        return self.run().info.status.lower()


WRITERS = {"lines": LinesRow, "tensorboard": TensorBoardRow, "mlflow": MLflowRow}
MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow"}


@pytest.fixture(params=WRITERS)
def row(request: pytest.FixtureRequest, mlflow_store: Path) -> Row:
    if request.param in MODULES:
        pytest.importorskip(MODULES[request.param])
    return WRITERS[request.param](mlflow_store)


def same(found: Shown, expected: Shown) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values), name


def figures(steps: list[int]) -> Shown:
    return {
        "loss": {i: 8.0 / i for i in steps},
        "learning_rate": {i: 0.5 / i for i in steps},
        "samples_per_second": dict.fromkeys(steps, 40.0),
        "gradient_norm": {i: 2.0 * i for i in steps},
        "loss_scale": dict.fromkeys(steps, 4.0),
        "timings/forward": {i: 0.01 * i for i in steps},
        "timings/iteration": {i: 0.02 * i for i in steps},
        "validation/loss": {i: 9.0 / i for i in (4, 8)},
        "validation/accuracy": {i: 0.1 * i for i in (4, 8)},
    }


def test_every_figure_when_it_is_due_and_at_the_end(row: Row) -> None:
    """Histograms and validations are shown whenever they are made."""
    runs.play([row.callback(sparkdl.every(3))], runs.states())
    same(row.scalars(), figures([3, 6, 8]))
    assert row.histogram_iterations() == ([3, 6] if row.histograms else [])
    assert row.status() in (None, "finished")


def test_learning_rates_of_several_groups(tmp_path: Path) -> None:
    row = LinesRow(tmp_path)
    state = TrainState(iteration=1, samples=2, loss=1.0, learning_rates=(0.5, 0.25))
    runs.play([row.callback(sparkdl.every(1))], [TrainState(), state])
    expected = {"loss": 1.0, "learning_rate/0": 0.5, "learning_rate/1": 0.25, "loss_scale": 1.0}
    same(row.scalars(), {name: {1: value} for name, value in expected.items()})


def test_an_epoch_is_on_disk_when_it_ends_and_a_failed_fit_is_ended(row: Row) -> None:
    callback = row.callback(sparkdl.every(1))
    runs.play([callback], runs.states(last=4), finish=False)
    assert list(row.scalars()["loss"]) == [1, 2, 3, 4]
    assert list(row.scalars()["validation/loss"]) == [4]
    time.sleep(1.1)  # TensorBoard takes the files in the order of their seconds
    runs.play([callback], runs.states(first=5, last=6), finish=False)  # opened again
    del callback
    gc.collect()
    assert list(row.scalars()["loss"])[-2:] == [5, 6]
    assert row.status() in (None, "failed")


def test_parameters_without_secrets(row: Row) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.5, password="hunter2")
    trainer = runs.a_trainer(optimizer=optimizer, replicas=2)
    runs.play([row.callback(sparkdl.every(1))], runs.states(last=0), trainer)
    found = row.params()
    if found is not None:
        assert (found["optimizer"], found["optimizer.lr"], found["replicas"]) == ("SGD", "0.5", "2")
    written = [path.read_bytes() for path in row.folder.rglob("*") if path.is_file()]
    assert written
    assert not any(b"hunter2" in content for content in written)


def test_it_can_be_pickled_before_a_fit(row: Row) -> None:
    callback = row.callback(sparkdl.every(1))
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)


def test_what_is_no_trigger(row: Row) -> None:
    with pytest.raises(sparkdl.ParameterError, match=r"\(every=10\): give a trigger, such as"):
        row.callback(10)  # type: ignore[arg-type]


LIBRARIES = {
    "bokeh": ("bokeh", "report", [partial(Report, "a.html"), partial(History().report, "a.html")]),
    "torch.utils.tensorboard": ("tensorboard", "tensorboard", [partial(TensorBoard, "logs")]),
    "mlflow": (
        "mlflow-skinny",
        "mlflow",
        [MLflow, partial(mlflow.log_model, trained_model(torch.nn.Linear(1, 1))), mlflow.autolog],
    ),
}


@pytest.mark.parametrize("module", LIBRARIES)
def test_a_library_that_is_missing_is_told(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, extra, uses = LIBRARIES[module]
    monkeypatch.setitem(sys.modules, module, None)
    for use in uses:
        with pytest.raises(
            sparkdl.ParameterError, match=f'pip install {name} .the extra "{extra}"'
        ):
            use()

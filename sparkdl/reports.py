"""Reports of runs that lie in folders, several runs beside each other, and reports of searches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from sparkdl.checkpoint.resume import history_in
from sparkdl.codec.charts import COLOURS, Line, Page, Panel, as_svg
from sparkdl.codec.describe import table, without_credentials
from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError, SparkdlError, kind_of
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.history import History
from sparkdl.loop.history_tables import duration
from sparkdl.loop.report import run_page
from sparkdl.tune.folder import SEARCH, finished_trials
from sparkdl.tune.result import search_page

Run: TypeAlias = "TrainedModel | History | str | os.PathLike[str]"
HISTORIES = ("history.json", "model/history.json", "history.csv")
"""Where a run folder and a saved model have their history; else it is that of a checkpoint."""


@dataclass(frozen=True)
class Comparison:
    """Several runs beside each other; :func:`compare` returns it, and a notebook shows it.

    Attributes:
        histories: The histories by the names of the runs.
    """

    histories: dict[str, History]

    def rows(self) -> list[list[str]]:
        """Return how the runs ended, and below it whatever differed: a name, then a text for each
        run. The first row is the head."""
        ends = [_end(history) for history in self.histories.values()]
        facts = [_settings(history) for history in self.histories.values()]
        names = {name: None for end in ends for name in end}
        differing = {
            name: None
            for each in facts
            for name in each
            if len({one.get(name, "") for one in facts}) > 1
        }
        return [
            ["", *self.histories],
            *([name, *(end.get(name, "") for end in ends)] for name in names),
            *([name, *(each.get(name, "") for each in facts)] for name in differing),
        ]

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with the table and the curves, which needs no network, and return its path.

        Raises:
            ParameterError: The extra ``report`` is not installed.
        """
        page = Page(f"{len(self.histories)} runs")
        page.heading("How they ended, and what differed")
        page.table(self.rows() if len(self.histories) > 1 else [["", "", ""], *self.rows()])
        page.heading("Curves")
        for panel in self._panels():
            page.chart(panel)
        return page.save(path_here(path))

    def _panels(self) -> list[Panel]:
        panels: dict[tuple[str, str], list[Line]] = {}
        for number, (name, history) in enumerate(self.histories.items()):
            for title, across, points, dots in _curves(history):
                line = Line(name, points, COLOURS[number % len(COLOURS)], dots=dots)
                panels.setdefault((title, across), []).append(line)
        return [Panel(title, lines, across=across) for (title, across), lines in panels.items()]

    def __str__(self) -> str:
        rows = [
            [cell if len(cell) < 60 else f"{cell[:58]}…" for cell in row] for row in self.rows()
        ]
        widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the table and the curves."""
        head, *rows = self.rows()
        return table(head, rows) + "".join(map(as_svg, self._panels()))


def compare(
    runs: Sequence[Run] | Mapping[str, Run], path: str | os.PathLike[str] | None = None
) -> Comparison:
    """Put several runs beside each other: how they ended, what differed, and their curves.

    Args:
        runs: Trained models, histories, and paths: of run folders, of saved models, of checkpoints,
            or of a history's file; a mapping gives them names.
        path: A file of HTML to write as well, as :meth:`sparkdl.reports.Comparison.report` does.

    Returns:
        The comparison, which prints as a table; a notebook shows it with curves.

    Raises:
        ParameterError: There is no run, or one of them has no history.
    """
    if isinstance(runs, (str, os.PathLike, History, TrainedModel)) or not len(runs):
        raise ParameterError("compare: give a list of runs, such as [trained, other, 'runs/a'].")
    pairs = list(runs.items()) if isinstance(runs, Mapping) else [(_name(run), run) for run in runs]
    histories: dict[str, History] = {}
    for number, (name, run) in enumerate(pairs, start=1):
        named = name or f"run {number}"
        histories[f"{named} ({number})" if named in histories else named] = history_of(run)
    found = Comparison(histories)
    if path is not None:
        found.report(path)
    return found


def report_of(path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run folder, a saved model, checkpoints or a search, and return its path.

    That is ``to``, or ``report.html`` in the folder.
    """
    folder = path_here(path)
    inside = folder if folder.is_dir() else folder.parent
    target = inside / "report.html" if to is None else path_here(to)
    for search in (folder, folder / "trials"):
        if (search / SEARCH).is_file():
            return search_page(*finished_trials(search), folder.absolute().name).save(target)
    return run_page(history_of(folder), folder.absolute().name, inside.absolute()).save(target)


def history_of(run: Run) -> History:
    """Return the history of a run, which may be a path. Raises ParameterError."""
    if isinstance(run, History):
        return run
    if isinstance(run, TrainedModel):
        return run.history
    if not isinstance(run, (str, os.PathLike)):
        raise ParameterError(f"compare: a run is {kind_of(run)}: give a trained model or a path.")
    path = Path(run)
    if path.is_file():
        return History.load(path)
    for name in HISTORIES:
        if (path / name).is_file():
            return History.load(path / name)
    for folder in (path / "checkpoints", run):
        try:
            return history_in(os.fspath(folder))
        except (SparkdlError, StopIteration, OSError):
            continue
    raise ParameterError(
        f"{path} has no history: give a run folder, a saved model, a checkpoint, or a file of "
        "history.save."
    )


def _name(run: Run) -> str:
    return without_credentials(os.fspath(run)) if isinstance(run, (str, os.PathLike)) else ""


def _curves(history: History) -> Iterator[tuple[str, str, np.ndarray, bool]]:
    """Yield the title, the horizontal axis and the points of each curve, and whether they are few."""
    columns, epochs = history.arrays(), history.epochs()
    title, rows = "mean loss of an epoch", np.cumsum([each["iterations"] for each in epochs]) - 1
    losses = np.array([each["loss"] for each in epochs])
    if len(epochs) < 3:
        title, rows, losses = "loss", np.arange(len(history)), columns["loss"]
    for across, column in (("iteration", "iteration"), ("seconds", "seconds")):
        yield title, across, np.stack([columns[column][rows], losses], 1), len(rows) < 60
    metrics: dict[str, list[tuple[float, float]]] = {}
    for one in history.validations:
        for metric, value in one["metrics"].items():
            metrics.setdefault(metric, []).append((one["iteration"], value))
    for metric, points in metrics.items():
        yield f"validation {metric}", "iteration", np.array(points), True
    rates = np.stack([columns["iteration"], columns["learning_rate"]], 1)
    yield "learning rate", "iteration", rates, False


def _end(history: History) -> dict[str, str]:
    """Return how a run ended, in words."""
    epochs, validations = history.epochs(), history.validations
    if not epochs:
        return {"iterations": "0"}
    seconds, samples = (sum(epoch[name] for epoch in epochs) for name in ("seconds", "samples"))
    last = validations[-1]["metrics"] if validations else {}
    lost = [event for event in history.events if event["kind"] == "recovery"]
    return {
        "epochs": f"{epochs[-1]['epoch']:,}",
        "iterations": f"{len(history):,}",
        "mean loss of the last epoch": f"{epochs[-1]['loss']:.5g}",
        **{f"validation {n}": f"{v:.5g}" for n, v in last.items()},
        "time": duration(seconds),
        "samples a second": f"{samples / seconds:,.0f}" if seconds > 0 else "",
        **({"faults survived": str(len(lost))} if lost else {}),
        **history.end,
    }


def _settings(history: History) -> dict[str, str]:
    """Return what a run was, in words by names; arguments win over what follows from them."""
    facts = history.facts
    settings = {name: str(value) for name, value in history.settings.items()}
    for title in ("Environment", "Training", "Arguments"):
        settings |= {row[0]: row[1] for row in facts.get(title, []) if len(row) == 2}
    return settings

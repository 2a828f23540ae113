"""The report of a run: a page with its curves, times, faults, and what was trained where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.codec.charts import COLOURS, Line, Page, Panel
from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError, counted
from sparkdl.loop.history_tables import TIMING_HEAD, WHOLE, cells, figures, panels

STRETCHES = 150
"""The number of stretches of the run whose means show times and speed."""
MODELS = ("model", ".")
"""The folders beside a report in which its model may lie."""


def write(history: Any, path: str | Path, title: str) -> Path:
    """Write the report of a history; see :meth:`sparkdl.History.report`."""
    path = path_here(path)
    if path.is_dir():
        raise ParameterError(f'report("{path}") is a folder: give the name of a file in it.')
    return run_page(history, title, path.absolute().parent).save(path)


def run_page(history: Any, title: str, folder: Path | None = None) -> Page:
    """Return the page of a run; ``folder`` is looked at for its model."""
    page = Page(title)
    _add_summary(page, history)
    table = history.arrays()
    recoveries = [event for event in history.events if event["kind"] == "recovery"]
    if len(history):
        page.heading("Curves")
        if recoveries:
            page.line("A dashed line is a recovery from a fault.")
        for panel in run_panels(history, table, [event["iteration"] for event in recoveries]):
            page.chart(panel)
        _add_arrays(page, history.validations[-1:])
        page.heading(
            "Where the time of an iteration went",
            "Tasks run side by side and the slowest one counts, so shares need not add up to 100 %.",
        )
        page.chart(_times(history.timings(), table))
        page.chart(Panel("samples a second", [_speed(table)], from_zero=True))
        page.table([list(TIMING_HEAD), *map(list, cells(history.timings()))])
    _add_events(page, history.events)
    facts = history.facts
    if facts:
        page.heading("What was trained")
    if history.plan is not None:
        page.line(
            f"A plan chose the engine: {1e3 * history.plan['seconds']:.3g} ms were predicted."
        )
    for name, rows in facts.items():
        if name == "Environment":
            page.heading(name)
        page.table(rows, "" if name in ("Training", "Environment") else name)
    epochs = [
        [str(e["epoch"]), f"{e['loss']:.5g}", f"{e['iterations']:,}", f"{e['seconds']:,.1f}"]
        for e in history.epochs()
    ]
    if epochs:
        page.heading("Epochs")
        first = ", the last 200" if len(epochs) > 200 else ""
        page.table(
            [["epoch", "mean loss", "iterations", "seconds"], *epochs[-200:]],
            f"{counted(len(epochs), 'epoch')}{first}",
            folded=True,
        )
    page.heading("Load the model")
    page.line(_loading(history.events, folder), "code")
    return page


def _add_summary(page: Page, history: Any) -> None:
    """Add the figures that matter most, and what a reader must know of the run."""
    page.line(history.summary())
    stopped, losses = history.stopped, np.asarray(history.losses)
    if stopped == "interrupted":
        page.line("The run was interrupted: the model is that of the last iteration.", "alert")
    elif stopped is not None:
        page.line(f"The run ended before its stop trigger was true: {stopped}.", "alert")
    wrong = np.flatnonzero(~np.isfinite(losses))
    if len(wrong):
        page.line(
            f"The loss of {counted(len(wrong), 'iteration')} is not finite, the first of them "
            f"iteration {int(history.arrays()['iteration'][wrong[0]]):,}.",
            "alert",
        )
    if not len(losses):
        return
    lost = [event for event in history.events if event["kind"] == "recovery"]
    cost = f" ({sum(event['seconds'] for event in lost):.1f} s)" if lost else ""
    shown = figures(history.losses, history.epochs(), history.validations)
    page.figures({**shown, "faults survived": f"{len(lost)}{cost}"})


def _add_arrays(page: Page, validations: Sequence[Mapping[str, Any]]) -> None:
    """Add matrices, curves and points of a validation; their first column is the horizontal axis.

    Where that is in order they make a curve."""
    for name, value in (validations[0].get("arrays", {}) if validations else {}).items():
        title = f"{name} of the last validation"
        if isinstance(value, Mapping):
            columns = {str(key): each for key, each in value.items() if np.ndim(each) == 1}
            across, *others = columns or [""]
            steps = np.diff(columns.get(across, []))
            curve = bool((steps >= 0).all() or (steps <= 0).all())
            style = (COLOURS[0], 2.0, False) if curve else (COLOURS[0], 0.0, True)
            lines = [
                Line(name, list(zip(columns[across], columns[name], strict=False)), *style)
                for name in others[:1]
            ]
            page.chart(Panel(title, lines, across=across))
        elif (
            len({len(row) if isinstance(row, list) else 0 for row in value}) == 1
            and np.ndim(value) == 2
        ):
            page.matrix(title, np.asarray(value, np.float64))


def run_panels(
    history: Any, table: Mapping[str, np.ndarray], marks: Sequence[int]
) -> Iterator[Panel]:
    """Yield the curves of a run, with the times of faults."""
    iterations = table["iteration"]
    for panel in panels(iterations, table["loss"], history.epochs(), history.validations):
        yield Panel(panel.title, panel.lines, marks)
    yield Panel("learning rate", [_line("learning rate", iterations, table["learning_rate"])])
    named = {name.removeprefix("losses/"): table[name] for name in table if name[:7] == "losses/"}
    if named:
        yield Panel("named losses", _lines(iterations, named))
    norms = np.where(table["gradient_norm"] < 0, np.nan, table["gradient_norm"])
    yield Panel("norm of the gradient", [_line("before clipping", iterations, norms)])
    if len(np.unique(table["loss_scale"])) > 1:
        yield Panel("loss scale", [_line("loss scale", iterations, table["loss_scale"])])
    decisions = history.decisions
    ages = {n: [age for _, age, _ in row] for n, row in history.commits.items()}
    chosen = {
        name: np.array([made.get(name, 0) for made in decisions.values()], np.float64)
        for name in dict.fromkeys(n for made in decisions.values() for n in made)
        if not name.startswith("commits")
    }
    if ages:
        chosen["age of the gradients"] = np.array(
            [np.mean(ages[n]) if n in ages else np.nan for n in decisions]
        )
    if chosen:
        lines = [
            Line(name, _means(iterations, values), COLOURS[n % len(COLOURS)])
            for n, (name, values) in enumerate(list(chosen.items())[:12])
        ]
        yield Panel("decisions of the consistency model", lines)


def _line(name: str, iterations: np.ndarray, values: np.ndarray, number: int = 6) -> Line:
    return Line(name, np.stack([iterations, values], 1), COLOURS[number % len(COLOURS)], 1.5)


def _lines(iterations: np.ndarray, columns: Mapping[str, np.ndarray]) -> list[Line]:
    return [_line(name, iterations, values, n) for n, (name, values) in enumerate(columns.items())]


def _means(iterations: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the means of stretches of a run, each in the middle of its stretch."""
    points = np.stack([iterations, values], 1)[np.isfinite(values)]
    parts = np.array_split(points, min(STRETCHES, max(1, len(points))))
    return np.array([part.mean(0) for part in parts if len(part)]).reshape(-1, 2)


def _times(timings: Mapping[str, Any], table: Mapping[str, np.ndarray]) -> Panel:
    iterations = table["iteration"]
    lines = [
        Line(
            "whole iteration" if name == WHOLE else name,
            _means(iterations, 1e3 * table[f"timings/{name}"]),
            "#7f8c99" if name == WHOLE else COLOURS[n % len(COLOURS)],
            3.0 if name == WHOLE else 1.5,
        )
        for n, name in enumerate(timings)
    ]
    return Panel("milliseconds of an iteration", lines, from_zero=True)


def _speed(table: Mapping[str, np.ndarray]) -> Line:
    """Return the samples a second over the run."""
    ends = np.unique(np.linspace(0, len(table["samples"]) - 1, STRETCHES + 1).astype(int))
    seconds, samples = np.diff(table["seconds"][ends]), np.diff(table["samples"][ends])
    speed = np.divide(samples, seconds, out=np.full(len(seconds), np.nan), where=seconds > 0)
    middles = (table["iteration"][ends][1:] + table["iteration"][ends][:-1]) / 2
    return Line("samples a second", np.stack([middles, speed], 1), COLOURS[4])


def _add_events(page: Page, events: Sequence[Mapping[str, Any]]) -> None:
    for kind, title in (("recovery", "Faults survived"), ("checkpoint", "Checkpoints")):
        rows = [
            [f"{event['iteration']:,}", f"{event['seconds']:.2f}", event["text"]]
            for event in events
            if event["kind"] == kind
        ]
        if rows:
            page.heading(title)
            last = "" if len(rows) <= 100 else f"The last 100 of {len(rows):,}."
            page.line(last) if last else None
            page.table([["after iteration", "seconds", "what"], *rows[-100:]])


def _loading(events: Sequence[Mapping[str, Any]], folder: Path | None) -> str:
    """Return the code that loads the model, as far as it is known where that is."""
    places = [] if folder is None else [folder / name for name in MODELS]
    saved = [str(place) for place in places if (place / "model.json").is_file()]
    saved += [event["text"] for event in events[::-1] if event["kind"] == "checkpoint"]
    if saved:
        return f"import sparkdl\n\ntrained = sparkdl.load({saved[0]!r})"
    return (
        'trained.save("model")  # the result of the fit\n\n'
        'import sparkdl\n\ntrained = sparkdl.load("model")'
    )

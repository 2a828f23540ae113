"""The columns of a history, as CSV, as tables and as curves for reading."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparkdl.codec.charts import COLOURS, THICK, THIN, Line, Panel, as_svg
from sparkdl.codec.describe import table, two_columns
from sparkdl.errors import counted
from sparkdl.replica.iteration import COMMITS, INNER_STEPS, MICRO_BATCHES, STALENESS

KINDS: dict[str, type] = {  # the columns of every history in their order -> type of the values
    "iteration": int,
    "epoch": int,
    "loss": float,
    "learning_rate": float,
    "samples": int,
    "seconds": float,
    "gradient_norm": float,
    "loss_scale": float,
    "skipped": bool,  # in the table a count
    "bytes_sent": int,
}
TIMINGS, LOSSES, METRICS = "timings/", "losses/", "validation/"
_DECIDED = (STALENESS, MICRO_BATCHES, INNER_STEPS, COMMITS)
EMPTY = {"q": 0, "d": math.nan}
DTYPES = {"q": "int64", "d": "float64"}
WHOLE = "iteration"
_ORDER = (
    "schedule",
    "data",
    "fetch",
    "forward",
    "backward",
    "pipeline",
    "compress",
    "publish",
    "reduce",
    "update",
)
TIMING_HEAD = "activity", "mean ms", "median ms", "share"


def code_of(name: str) -> Any:
    """Return the type code of a column."""
    if name in KINDS:
        return "d" if KINDS[name] is float else "q"
    return "q" if is_decision(name) else "d"


def is_decision(name: str) -> bool:
    """Return whether a column holds what a consistency model decided."""
    return name not in KINDS and not name.startswith((TIMINGS, LOSSES, METRICS))


def with_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose names begin with ``prefix``, by the rest of their names."""
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


def to_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return columns as CSV; None is empty."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()


def from_csv(text: str) -> dict[str, Any]:
    """Return the content of a history whose columns :func:`to_csv` wrote."""
    header, *lines = filter(None, csv.reader(io.StringIO(text, newline="")))
    columns = {
        name: [_parsed(name, line[i]) for line in lines]
        for i, name in enumerate(header)
        if name in KINDS or name.startswith((TIMINGS, LOSSES, METRICS, *_DECIDED))
    }
    rows = [{n: columns[n][i] for n in KINDS if n in columns} for i in range(len(lines))]
    validations = []
    for i, row in enumerate(rows):
        values = {name: column[i] for name, column in with_prefix(columns, METRICS).items()}
        metrics = {name: value for name, value in values.items() if value is not None}
        if metrics:
            validations.append({**row, "metrics": metrics})
    return {
        "iterations": rows,
        "timings": with_prefix(columns, TIMINGS),
        "losses": with_prefix(columns, LOSSES),
        "decisions": {n: column for n, column in columns.items() if n.startswith(_DECIDED)},
        "validations": validations,
    }


def _parsed(name: str, text: str) -> Any:
    """Return a value of a CSV; None if there is none."""
    if text == "":
        return None
    return text == "True" if name == "skipped" else (int if code_of(name) == "q" else float)(text)


def timings(columns: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return mean and median seconds and the share of the total by activity; NaN means "not
    measured"."""
    known = [name for name in _ORDER if name in columns]
    others = [name for name in columns if name not in (*_ORDER, WHOLE)]
    whole = np.asarray(columns.get(WHOLE, ()), np.float64)
    found = {}
    for name in [*known, *others, *([WHOLE] if WHOLE in columns else [])]:
        seconds = np.asarray(columns[name], np.float64)
        measured = ~np.isnan(seconds)
        if not measured.any():
            continue
        both = measured & ~np.isnan(whole) if len(whole) else np.zeros(len(seconds), bool)
        total = whole[both].sum() if both.any() else 0.0
        found[name] = {
            "mean": float(seconds[measured].mean()),
            "median": float(np.median(seconds[measured])),
            "share": float(seconds[both].sum() / total) if total > 0 else math.nan,
        }
    return found


def cells(found: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str, str]]:
    """Return for each activity its name, mean and median in milliseconds, and share in percent."""
    return [
        (
            name,
            f"{1e3 * row['mean']:,.1f}",
            f"{1e3 * row['median']:,.1f}",
            "" if math.isnan(row["share"]) else f"{row['share']:.0%}",
        )
        for name, row in found.items()
    ]


def timing_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line for each activity."""
    if not found:
        return "no timings were recorded"
    width = max(map(len, (TIMING_HEAD[0], *found)))
    rows = [
        f"{n:<{width}}{a:>10}{m:>12}{s:>8}".rstrip() for n, a, m, s in [TIMING_HEAD, *cells(found)]
    ]
    return "\n".join(rows)


def as_line(iterations: int, epoch: int, loss: float, end: Mapping[str, str]) -> str:
    """Return in one line how far a run went, its last loss, and why it ended."""
    if not iterations:
        return "no iterations"
    parts = [f"{counted(iterations, 'iteration')} up to epoch {epoch:,}", f"last loss {loss:.4g}"]
    return ", ".join([*parts, *(f"{name}: {reason}" for name, reason in end.items())])


def duration(seconds: float) -> str:
    """Return a time in words: "12.3 s", "4 min 5 s", "2 h 10 min"."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def figures(
    losses: Sequence[float],
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """Return the figures of a run that matter most: progress, losses, speed, and the last metrics."""
    rows: dict[str, str] = {"iterations": f"{len(losses):,}"}
    if epochs:
        seconds = sum(epoch["seconds"] for epoch in epochs)
        samples = sum(epoch["samples"] for epoch in epochs)
        rows["epochs"] = f"{epochs[-1]['epoch']:,}"
        rows["loss of the last iteration"] = f"{losses[-1]:.4g}"
        rows["mean loss of the last epoch"] = f"{epochs[-1]['loss']:.4g}"
        rows["time"] = duration(seconds)
        rows["samples a second"] = f"{samples / seconds:,.0f}" if seconds > 0 else "–"
    for name, value in validations[-1]["metrics"].items() if validations else ():
        rows[f"validation {name} (iteration {validations[-1]['iteration']:,})"] = f"{value:.4g}"
    return rows


def as_html(
    iterations: Sequence[int],
    losses: Sequence[float],
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> str:
    """Return :func:`figures` as a small table, and the curves."""
    drawn = curves(iterations, losses, epochs, validations)
    rows = two_columns(figures(losses, epochs, validations), numbers=True)
    return rows + (f"<div>{drawn}</div>" if drawn else "")


def timings_as_html(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return :func:`timing_table` as a table in HTML; empty if no timings were recorded."""
    return table(TIMING_HEAD, cells(found), numbers=True) if found else ""


def panels(
    iterations: Sequence[int] | np.ndarray,
    losses: Sequence[float] | np.ndarray,
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> list[Panel]:
    """Return the losses, and the other metrics of the validations: those from 0 to 1 together.

    An epoch has "loss" and "iterations", a validation has "iteration" and "metrics".
    """
    first = iterations[0] - 1 if len(iterations) else 0
    ends = itertools.accumulate((epoch["iterations"] for epoch in epochs), initial=first)
    means = [
        ((before + 1 + end) / 2, epoch["loss"])  # in the middle of the epoch
        for (before, end), epoch in zip(itertools.pairwise(ends), epochs, strict=True)
    ]
    validated: dict[str, list[tuple[float, float]]] = {}
    for record in validations:
        for name, value in record["metrics"].items():
            validated.setdefault(name, []).append((record["iteration"], value))
    loss = [
        Line("iteration", np.stack([iterations, losses], 1), THIN, 1.0),
        Line("epoch", means, THICK, dots=len(means) < 60),
    ]
    if "loss" in validated:
        loss.append(Line("validation", validated.pop("loss"), COLOURS[0], dots=True))
    lines = [
        Line(name, points, COLOURS[1 + i % (len(COLOURS) - 1)], dots=True)
        for i, (name, points) in enumerate(validated.items())
    ]
    shared = [line for line in lines if all(0 <= value <= 1 for _, value in line.points)]
    alone = [[line] for line in lines if line not in shared]
    groups = [shared, *alone] if shared else alone
    return [Panel("loss", loss), *(Panel("validation", group) for group in groups)]


def curves(
    iterations: Sequence[int],
    losses: Sequence[float],
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> str:
    """Return :func:`panels` as pictures for a notebook."""
    if len(iterations) < 2:
        return ""
    return "".join(map(as_svg, panels(iterations, losses, epochs, validations)))

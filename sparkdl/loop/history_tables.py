"""The columns of a history, as CSV, as tables and as curves for reading.

Curves are SVG in a notebook's page: no file, no library, no network.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
_HEAD = "activity", "mean ms", "median ms", "share"
WIDTH, HEIGHT = 300, 150
_LEFT, _TOP, _BOTTOM = 52, 22, 18
MOST_POINTS = 400
"""The most points of a line; a longer one is drawn with every n-th of them."""
_THIN, _THICK = "#7ba5cf", "#1f4e79"
_COLOURS = ("#c8553d", "#588157", "#8e5aa8", "#d99a2b", "#2a9d8f", "#8d6e63")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line of a panel; ``dots`` marks its points."""

    name: str
    points: Points
    colour: str
    width: float = 2.0
    dots: bool = False


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


def _cells(found: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str, str]]:
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
    width = max(map(len, (_HEAD[0], *found)))
    rows = [f"{n:<{width}}{a:>10}{m:>12}{s:>8}".rstrip() for n, a, m, s in [_HEAD, *_cells(found)]]
    return "\n".join(rows)


def as_line(iterations: int, epoch: int, loss: float, reason: str | None) -> str:
    """Return in one line how far a run went, its last loss, and why it ended."""
    if not iterations:
        return "no iterations"
    parts = [f"{counted(iterations, 'iteration')} up to epoch {epoch:,}", f"last loss {loss:.4g}"]
    return ", ".join([*parts, *([] if reason is None else [f"stopped: {reason}"])])


def as_html(
    iterations: Sequence[int],
    losses: Sequence[float],
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> str:
    """Return a small table and the curves: progress, losses, speed, and the last metrics."""
    rows: dict[str, str] = {"iterations": f"{len(iterations):,}"}
    if epochs:
        seconds = sum(epoch["seconds"] for epoch in epochs)
        samples = sum(epoch["samples"] for epoch in epochs)
        rows["epochs"] = f"{epochs[-1]['epoch']:,}"
        rows["loss of the last iteration"] = f"{losses[-1]:.4g}"
        rows["mean loss of the last epoch"] = f"{epochs[-1]['loss']:.4g}"
        rows["seconds"] = f"{seconds:,.1f}"
        rows["samples/s"] = f"{samples / seconds:,.0f}" if seconds > 0 else "–"
    if validations:
        last = validations[-1]
        for name, value in last["metrics"].items():
            rows[f"validation {name} (iteration {last['iteration']:,})"] = f"{value:.4g}"
    drawn = curves(iterations, losses, epochs, validations)
    return two_columns(rows, numbers=True) + (f"<div>{drawn}</div>" if drawn else "")


def timings_as_html(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return :func:`timing_table` as a table in HTML; empty if no timings were recorded."""
    return table(_HEAD, _cells(found), numbers=True) if found else ""


def curves(
    iterations: Sequence[int],
    losses: Sequence[float],
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> str:
    """Return the panels: the losses, and the other metrics of the validations.

    An epoch has "loss" and "iterations", a validation has "iteration" and "metrics".
    """
    if len(iterations) < 2:
        return ""
    ends = itertools.accumulate(
        (epoch["iterations"] for epoch in epochs), initial=iterations[0] - 1
    )
    means = [
        ((before + 1 + end) / 2, epoch["loss"])  # in the middle of the epoch
        for (before, end), epoch in zip(itertools.pairwise(ends), epochs, strict=True)
    ]
    validated: dict[str, list[tuple[float, float]]] = {}
    for record in validations:
        for name, value in record["metrics"].items():
            validated.setdefault(name, []).append((record["iteration"], value))
    loss = [
        Line("iteration", list(zip(iterations, losses, strict=True)), _THIN, 1.0),
        Line("epoch", means, _THICK),
    ]
    if "loss" in validated:
        loss.append(Line("validation", validated.pop("loss"), _COLOURS[0], dots=True))
    metrics = [
        Line(name, points, _COLOURS[1 + i % (len(_COLOURS) - 1)], dots=True)
        for i, (name, points) in enumerate(validated.items())
    ]
    return _panel("loss", loss) + (_panel("validation", metrics) if metrics else "")


def _panel(title: str, lines: Sequence[Line]) -> str:
    """Return one picture with its axes; values that are not finite are left out."""
    kept = [_thinned(_finite(line.points)) for line in lines]
    xs, ys = _all(kept, 0), _all(kept, 1)
    if not ys:
        return ""
    # single iterations may be far off, such as a last batch of two samples
    steady = _all([p for p, line in zip(kept, lines, strict=True) if line.width > 1], 1) or ys
    log = min(ys) > 0 and max(steady) > 20 * min(steady)
    low, high = min(ys), max(ys)
    scale = math.log if log else float

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - min(xs)) / ((max(xs) - min(xs)) or 1)
        up = (scale(point[1]) - scale(low)) / ((scale(high) - scale(low)) or 1)
        inner = HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * (WIDTH - _LEFT - 8), _TOP + (1 - up) * inner

    drawn, legend, at = [], [], max(_LEFT, 6.2 * len(title) + 12)
    axis = "log scale" if log else ""
    for line, points in zip(lines, kept, strict=True):
        placed = [place(point) for point in points]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn.append(
            f"<polyline points='{text}' fill='none' stroke='{line.colour}' "
            f"stroke-width='{line.width}'/>"
        )
        if line.dots or len(placed) == 1:
            drawn += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{line.colour}'/>"
                for x, y in placed
            ]
        name = html.escape(line.name)
        legend.append(f"<text x='{at:.0f}' y='12' fill='{line.colour}'>{name}</text>")
        at += 6.2 * len(line.name) + 12
    marks = (
        f"<text x='{_LEFT - 4}' y='{_TOP + 4}' text-anchor='end'>{high:.3g}</text>"
        f"<text x='{_LEFT - 4}' y='{HEIGHT - _BOTTOM}' text-anchor='end'>{low:.3g}</text>"
        f"<text x='4' y='12'>{html.escape(title)}</text>"
        f"<text x='{WIDTH - 8}' y='12' text-anchor='end' fill='#999'>{axis}</text>"
        f"<text x='{_LEFT}' y='{HEIGHT - 4}'>{min(xs):,.0f}</text>"
        f"<text x='{WIDTH - 8}' y='{HEIGHT - 4}' text-anchor='end'>iteration {max(xs):,.0f}</text>"
        f"<path d='M{_LEFT},{_TOP}V{HEIGHT - _BOTTOM}H{WIDTH - 8}' fill='none' stroke='#999'/>"
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        "style='font:10px sans-serif;margin-right:16px' fill='currentColor'>"
        f"{marks}{''.join(drawn)}{''.join(legend)}</svg>"
    )


def _finite(points: Points) -> Points:
    return [point for point in points if math.isfinite(point[1])]


def _thinned(points: Points) -> Points:
    """Return at most :data:`MOST_POINTS` of the points, with the last one."""
    step = -(-len(points) // MOST_POINTS) or 1
    return [*points[:-1:step], *points[-1:]]


def _all(lines: Iterable[Points], axis: int) -> list[float]:
    return [point[axis] for points in lines for point in points]

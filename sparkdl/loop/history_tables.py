"""Tables and texts of a history for reading: the time by activity, and the view in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas

from sparkdl.codec.describe import table, two_columns
from sparkdl.errors import counted
from sparkdl.loop.history_files import KINDS
from sparkdl.loop.history_svg import curves

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


def timing_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line for each activity: mean and median in milliseconds, share in percent."""
    if not found:
        return "no timings were recorded"
    width = max(len("activity"), *map(len, found))
    lines = [f"{'activity':<{width}}   mean ms   median ms   share"]
    for name, row in found.items():
        share = "" if math.isnan(row["share"]) else f"{row['share']:.0%}"
        mean, median = 1e3 * row["mean"], 1e3 * row["median"]
        lines.append(f"{name:<{width}}{mean:>10,.1f}{median:>12,.1f}{share:>8}".rstrip())
    return "\n".join(lines)


def to_pandas(content: Mapping[str, Any]) -> pandas.DataFrame:
    """Return one row for each iteration, with the columns of the CSV.

    What was not measured is NaN.
    """
    import pandas

    found = pandas.DataFrame(content["iterations"], columns=list(KINDS))
    found["gradient_norm"] = found["gradient_norm"].astype("float64")
    for kind in ("timings", "losses"):
        for name, values in content.get(kind, {}).items():
            found[f"{kind}/{name}"] = pandas.Series(values, found.index, "float64")
    for name, numbers in content.get("decisions", {}).items():
        found[name] = pandas.Series(numbers, found.index, "int64")
    validated: dict[str, dict[int, float]] = {}
    for record in content["validations"]:
        for name, value in record["metrics"].items():
            validated.setdefault(name, {})[record["iteration"]] = value
    for name, measured in validated.items():
        found[f"validation/{name}"] = found["iteration"].map(measured).astype("float64")
    return found


def as_line(iterations: int, epoch: int, loss: float, stopped: str | None) -> str:
    """Return in one line how far a run went, its last loss, and why it ended early."""
    if not iterations:
        return "no iterations"
    parts = [f"{counted(iterations, 'iteration')} up to epoch {epoch:,}", f"last loss {loss:.4g}"]
    return ", ".join([*parts, *([] if stopped is None else [f"stopped: {stopped}"])])


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
    rows = [
        (
            name,
            f"{1e3 * row['mean']:,.1f}",
            f"{1e3 * row['median']:,.1f}",
            "" if math.isnan(row["share"]) else f"{row['share']:.0%}",
        )
        for name, row in found.items()
    ]
    head = "activity", "mean ms", "median ms", "share"
    return table(head, rows, numbers=True) if rows else ""

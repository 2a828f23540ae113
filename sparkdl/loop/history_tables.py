"""Tables and texts of a history for reading: the time by activity, and the view in a notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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


def as_line(iterations: int, epoch: int, loss: float, stopped: str | None) -> str:
    """Return in one line how far a run went, its last loss, and why it ended early.

    Args:
        iterations: The number of iterations.
        epoch: The epoch of the last one.
        loss: The loss of the last one.
        stopped: Why the run ended early, or None.
    """
    if not iterations:
        return "no iterations"
    parts = [f"{counted(iterations, 'iteration')} up to epoch {epoch:,}", f"last loss {loss:.4g}"]
    return ", ".join([*parts, *([] if stopped is None else [f"stopped: {stopped}"])])


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 iteration", "1,200 iterations"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def as_html(
    iterations: int,
    loss: float,
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
) -> str:
    """Return a small table: progress, losses, speed, and the metrics of the last validation.

    Args:
        iterations: The number of iterations.
        loss: The loss of the last one.
        epochs: A mapping for each epoch, with "epoch", "seconds", "samples" and "loss".
        validations: A mapping for each validation, with "iteration" and "metrics".
    """
    rows: dict[str, str] = {"iterations": f"{iterations:,}"}
    if epochs:
        seconds = sum(epoch["seconds"] for epoch in epochs)
        samples = sum(epoch["samples"] for epoch in epochs)
        rows["epochs"] = f"{epochs[-1]['epoch']:,}"
        rows["loss of the last iteration"] = f"{loss:.4g}"
        rows["mean loss of the last epoch"] = f"{epochs[-1]['loss']:.4g}"
        rows["seconds"] = f"{seconds:,.1f}"
        rows["samples/s"] = f"{samples / seconds:,.0f}" if seconds > 0 else "–"
    if validations:
        last = validations[-1]
        for name, value in last["metrics"].items():
            rows[f"validation {name} (iteration {last['iteration']:,})"] = f"{value:.4g}"
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:right'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{cells}</table>"

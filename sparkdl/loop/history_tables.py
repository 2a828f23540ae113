"""The figures of a history for reading: where the time went, and a notebook's view."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sparkdl.loop.history import History

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
    """Activity -> mean and median seconds, share of the whole; NaN stands for "not measured"."""
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
    """One line an activity: mean and median in milliseconds, share in percent."""
    if not found:
        return "no timings were recorded"
    width = max(len("activity"), *map(len, found))
    lines = [f"{'activity':<{width}}   mean ms   median ms   share"]
    for name, row in found.items():
        share = "" if math.isnan(row["share"]) else f"{row['share']:.0%}"
        mean, median = 1e3 * row["mean"], 1e3 * row["median"]
        lines.append(f"{name:<{width}}{mean:>10,.1f}{median:>12,.1f}{share:>8}".rstrip())
    return "\n".join(lines)


def as_line(history: History) -> str:
    """How far it went, the last loss, and why it ended before its time, in one line."""
    if not len(history):
        return "no iterations"
    (last,) = history.last(1)
    done = f"{counted(len(history), 'iteration')} up to epoch {last['epoch']:,}"
    parts = [done, f"last loss {last['loss']:.4g}"]
    if history.stopped is not None:
        parts.append(f"stopped: {history.stopped}")
    return ", ".join(parts)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 iteration", "1,200 iterations"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def as_html(history: History) -> str:
    """A small table: how far, losses, speed, and the metrics of the last validation."""
    rows: dict[str, str] = {"iterations": f"{len(history):,}"}
    epochs = history.epochs()
    if epochs:
        seconds = sum(epoch["seconds"] for epoch in epochs)
        samples = sum(epoch["samples"] for epoch in epochs)
        rows["epochs"] = f"{epochs[-1]['epoch']:,}"
        rows["loss of the last iteration"] = f"{history.losses[-1]:.4g}"
        rows["mean loss of the last epoch"] = f"{epochs[-1]['loss']:.4g}"
        rows["seconds"] = f"{seconds:,.1f}"
        rows["samples/s"] = f"{samples / seconds:,.0f}" if seconds > 0 else "–"
    if history.validations:
        last = history.validations[-1]
        for name, value in last["metrics"].items():
            rows[f"validation {name} (iteration {last['iteration']:,})"] = f"{value:.4g}"
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:right'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{cells}</table>"

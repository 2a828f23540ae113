"""The curves of a history as an SVG picture in a notebook's page: no file, no library, no network."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

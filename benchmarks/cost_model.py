"""Seconds of an iteration's overhead as a formula: fitted by least squares, and carried further.

    t = a + b M + c P + d P / N

M replicas, N slices, P bytes of parameters: a fixed part, one for each pair of tasks, one for what each
replica does with all parameters, one for what each owner does with its slice. ``topologies.py`` has
terms of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Point:
    """``size`` is P in MB; ``seconds`` is None where it is only asked for."""

    replicas: int
    slices: int
    size: float
    seconds: float = float("nan")


Term = Callable[[Any], float]
"""A function of a :class:`Point`, or of anything else with ``seconds``."""
TERMS: dict[str, Term] = {
    "a, fixed": lambda p: 1.0,
    "b, each pair of tasks (x M)": lambda p: p.replicas,
    "c, each MB at a replica (x P)": lambda p: p.size,
    "d, each MB at an owner (x P / N)": lambda p: p.size / p.slices,
}
SQUARE: dict[str, Term] = {"e, each block of the shuffle (x M N)": lambda p: p.replicas * p.slices}


@dataclass(frozen=True)
class Fit:
    """Constants by name, in seconds."""

    terms: dict[str, Term]
    constants: dict[str, float]

    def __call__(self, point: Any) -> float:
        return sum(self.constants[name] * term(point) for name, term in self.terms.items())


def fit(points: Sequence[Any], terms: dict[str, Term]) -> Fit:
    """Least squares of the relative error, so that a small iteration counts as much as a large one."""
    rows = np.array([[term(point) / point.seconds for term in terms.values()] for point in points])
    found = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    return Fit(terms, dict(zip(terms, map(float, found), strict=True)))


def error(guess: Fit, points: Sequence[Any]) -> float:
    """Mean of the relative errors, without their signs."""
    return float(np.mean([abs(guess(point) / point.seconds - 1) for point in points]))


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(what is fixed, what each one adds), by least squares."""
    x, y = np.array(points).T
    each, fixed = np.polyfit(x, y, 1)
    return float(fixed), float(each)

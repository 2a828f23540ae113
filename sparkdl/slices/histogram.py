"""Histograms of weights and gradients over fixed, logarithmic bins, so that those of slices can be
added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

_POSITIVE = 1e-12 * 10 ** (np.arange(0, 161) / 10)  # 1e-12 ... 1e4, ten bins a decade
EDGES = np.concatenate([[-np.inf], -_POSITIVE[::-1], _POSITIVE, [np.inf]])
"""The edges of the bins, ascending, float64. The middle bin contains 0."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bin with the extremes and sums of the values.

    Attributes:
        counts: ``counts[i]`` is the number of values in [EDGES[i], EDGES[i + 1]).
        smallest: The smallest value, infinity if there is none.
        largest: The largest value, minus infinity if there is none.
        total: The sum of the values, in float64.
        squares: The sum of their squares, in float64.
    """

    counts: np.ndarray
    smallest: float
    largest: float
    total: float
    squares: float

    @staticmethod
    def of(values: torch.Tensor) -> Histogram:
        """Return the histogram of all finite elements of a tensor."""
        numbers = values.detach().double().reshape(-1).cpu().numpy()
        numbers = numbers[np.isfinite(numbers)]
        bins = np.searchsorted(EDGES, numbers, side="right") - 1
        return Histogram(
            np.bincount(bins, minlength=len(EDGES) - 1),
            float(numbers.min(initial=np.inf)),
            float(numbers.max(initial=-np.inf)),
            float(numbers.sum()),
            float(np.square(numbers).sum()),
        )

    @staticmethod
    def join(parts: Iterable[Histogram]) -> Histogram:
        """Return the histogram of all elements that are in ``parts``."""
        many = list(parts)
        return Histogram(
            np.sum([part.counts for part in many], axis=0),
            min(part.smallest for part in many),
            max(part.largest for part in many),
            sum(part.total for part in many),
            sum(part.squares for part in many),
        )

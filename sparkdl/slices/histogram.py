"""Histograms of weights and gradients over fixed, logarithmic bins, so that those of slices can be
added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.spec import Fragment

_POSITIVE = 1e-12 * 10 ** (np.arange(0, 161) / 10)  # 1e-12 ... 1e4, ten bins a decade
EDGES = np.concatenate([[-np.inf], -_POSITIVE[::-1], _POSITIVE, [np.inf]])
"""The edges of the bins, ascending, float64. The middle bin contains 0."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bin with the extremes and sums of the values."""

    counts: np.ndarray  # [i]: the values in [EDGES[i], EDGES[i + 1])
    smallest: float  # infinity if there is no value
    largest: float  # minus infinity if there is no value
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


def histograms_of(
    fragments: Sequence[Fragment], weights: torch.Tensor, reduced: ReducedGradient
) -> dict[tuple[str, int], Histogram]:
    """Return histograms of the weights and the gradient of each fragment of a slice."""
    found = {}
    for fragment in fragments:
        here = slice(fragment.start, fragment.stop)
        found["weights", fragment.number] = Histogram.of(weights[here])
        if fragment.sparse:
            if fragment.number in reduced.tables:
                values = reduced.tables[fragment.number][1]
                found["gradients", fragment.number] = Histogram.of(values)
        elif fragment.number not in reduced.absent:
            found["gradients", fragment.number] = Histogram.of(reduced.gradient[here])
    return found

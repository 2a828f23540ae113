"""Metrics of binary labels over all thresholds, exact: areas, curves, and the best threshold.

Each looks at the distinct scores, with the samples of each class at each score. Equal scores have no
order, and no order is invented for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sparkdl.metrics.classes import Judged, Judging

MOST_POINTS = 200
"""The most points of a curve; of more, these are chosen evenly by their number."""


class ScoreRun(NamedTuple):
    """The distinct scores of some samples, ascending, with the number of samples of each class at
    each score."""

    scores: np.ndarray
    """float64, shape (n,)."""
    positives: np.ndarray
    """int64, shape (n,)."""
    negatives: np.ndarray
    """int64, shape (n,)."""


Runs = tuple[ScoreRun, ...]


@dataclass(frozen=True, kw_only=True)
class ScoreMetric(Judged):
    """A metric of binary labels, whose state is the distinct scores.

    ``output`` is one score (for example a logit) for each sample, shape (B,) or (B, 1), or two
    scores, (B, 2), whose difference is used. ``target`` is 0 or 1, shape (B,) or (B, 1).

    The state is a few :class:`ScoreRun`, each less than half as long as the one before it, so that
    n samples cost O(n log n) in total, however they are batched. A run contains each distinct score
    once.
    """

    figure: Callable[[Cuts], Any]
    title: str  # in messages
    scalar: bool = True

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> Runs:
        scores = self._scores(output)
        if target.numel() != len(scores):
            raise ValueError(f"{self.title} needs one label for each sample")
        labels = target.reshape(-1).double().numpy()
        positive = labels == 1
        if not (positive | (labels == 0)).all():
            wrong = labels[~(positive | (labels == 0))][0]
            raise ValueError(f"{self.title} needs labels that are 0 or 1, but found {wrong:g}")
        return (_sum_equal(scores, positive.astype(np.int64), (~positive).astype(np.int64)),)

    def join(self, one: Runs, other: Runs) -> Runs:
        return _settled([*one, *other])

    def value(self, state: Runs) -> Any:
        scores, positives, negatives = (part[::-1].copy() for part in _join(list(state)))
        true, false = (np.cumsum(part) * 1.0 for part in (positives, negatives))
        return self.figure(Cuts(scores, true, false, self.judging))

    def _scores(self, output: torch.Tensor) -> np.ndarray:
        """Return one float64 score for each sample, shape (B,)."""
        if output.ndim == 2 and output.shape[1] == 2:
            output = output.double()
            return (output[:, 1] - output[:, 0]).numpy()
        if output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1):
            return output.reshape(-1).double().numpy()
        raise ValueError(
            f"{self.title} needs one score for each sample, or two, whose difference it takes"
        )


class Cuts(NamedTuple):
    """The samples above each threshold, from the highest score to the lowest, in float64."""

    scores: np.ndarray  # the lowest above the threshold
    true: np.ndarray  # positives above
    false: np.ndarray  # negatives above
    judging: Judging

    @property
    def defined(self) -> bool:
        """Return whether there are samples of both classes, and every score is a number."""
        both = len(self.scores) and self.true[-1] > 0 and self.false[-1] > 0
        return bool(both and not np.isnan(self.scores[0]))

    @property
    def precision(self) -> np.ndarray:
        return self.true / (self.true + self.false)

    @property
    def recall(self) -> np.ndarray:
        return self.true / (self.true[-1] or np.nan)

    @property
    def false_rate(self) -> np.ndarray:
        return self.false / (self.false[-1] or np.nan)

    @property
    def thresholds(self) -> np.ndarray:
        """Return the probabilities of class 1 that the scores mean."""
        return self.judging.probabilities(torch.from_numpy(self.scores)).numpy()


def _area(cuts: Cuts) -> float:
    """Return the area under the receiver operating characteristic of binary labels, exact.

    It is the probability that a positive sample scores higher than a negative one, with ties
    counted as half: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27,
    2006, section 7. The value is nan if there is only one class, or if a score is nan.
    """
    if not cuts.defined:
        return float("nan")
    positives, negatives = (np.diff(part, prepend=0.0) for part in (cuts.true, cuts.false))
    below = cuts.false[-1] - cuts.false
    won = (positives * (below + negatives / 2)).sum()
    return float(won / (cuts.true[-1] * cuts.false[-1]))


def _average_precision(cuts: Cuts) -> float:
    """Return the precision at each threshold, weighted by the gain of recall, as scikit-learn does.

    The value is nan without a positive sample, or if a score is nan.
    """
    if np.isnan(cuts.scores[0]):
        return float("nan")
    return float((np.diff(cuts.recall, prepend=0.0) * cuts.precision).sum())


def _roc_curve(cuts: Cuts) -> dict[str, list[float]]:
    """Return the shares of negatives and positives above each threshold, from the highest."""
    return _thinned(
        false_positive_rate=np.append(0.0, cuts.false_rate),
        true_positive_rate=np.append(0.0, cuts.recall),
        threshold=np.append(np.inf, cuts.thresholds),
    )


def _precision_recall_curve(cuts: Cuts) -> dict[str, list[float]]:
    """Return precision and recall of each threshold, from the lowest; the last point is (1, 0)."""
    return _thinned(
        precision=np.append(cuts.precision[::-1], 1.0),
        recall=np.append(cuts.recall[::-1], 0.0),
        threshold=np.append(cuts.thresholds[::-1], np.inf),
    )


_FIGURES: dict[str, tuple[Callable[[Cuts], Any], str, bool]] = {
    "auc": (_area, "AUC", True),
    "average_precision": (_average_precision, "the average precision", True),
    "roc_curve": (_roc_curve, "a ROC curve", False),
    "precision_recall_curve": (_precision_recall_curve, "a curve of precision and recall", False),
}
SCORES = {
    name: partial(ScoreMetric, name, figure=figure, title=title, scalar=scalar)
    for name, (figure, title, scalar) in _FIGURES.items()
}
"""The metrics of scores by name."""


Counts = np.ndarray
Objective = Callable[[Counts, Counts, Counts, Counts], Any]
"""The value that a threshold shall bring to its highest: a function of the numbers of true positives,
false positives, false negatives and true negatives."""


def _share(one: Counts, whole: Counts) -> np.ndarray:
    return np.divide(one, whole, out=np.zeros_like(one), where=whole > 0)


OBJECTIVES: dict[str, Objective] = {
    "f1": lambda tp, fp, fn, tn: _share(2 * tp, 2 * tp + fp + fn),
    "accuracy": lambda tp, fp, fn, tn: _share(tp + tn, tp + fp + fn + tn),
    "balanced_accuracy": lambda tp, fp, fn, tn: (_share(tp, tp + fn) + _share(tn, tn + fp)) / 2,
}


def best_threshold(objective: Objective = OBJECTIVES["f1"]) -> ScoreMetric:
    """Return the metric that finds the probability above which deciding for class 1 is best.

    It lies in the middle between two scores. The highest of several that are equally good counts.
    """
    figure = partial(_best, objective=objective)
    return ScoreMetric("best_threshold", figure=figure, title="a threshold", scalar=False)


def _best(cuts: Cuts, objective: Objective) -> dict[str, float]:
    if not cuts.defined:
        return {"threshold": float("nan"), "value": float("nan")}
    above = cuts.thresholds
    last = np.append(above[1:] != above[:-1], True)  # of scores with one probability
    true, false = (np.append(0.0, part[last]) for part in (cuts.true, cuts.false))
    values = np.asarray(objective(true, false, true[-1] - true, false[-1] - false), np.float64)
    if values.shape != true.shape:
        raise ValueError(
            f"the objective gives {list(values.shape)} for arrays of {list(true.shape)}: it must "
            "return one value for each threshold"
        )
    best = int(np.nanargmax(values))
    lowest = 0.0 if above[-1] > 0 else float(np.nextafter(0, -1))
    high, low = np.concatenate([[1.0], above[last], [lowest]])[best : best + 2]
    middle = (high + low) / 2
    threshold = middle if low <= middle < high or not best else low
    return {"threshold": float(threshold), "value": float(values[best])}


def _thinned(**columns: np.ndarray) -> dict[str, list[float]]:
    """Return columns of a curve as lists, with :data:`MOST_POINTS` of their points at most."""
    count = len(next(iter(columns.values())))
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    return {name: column[chosen].tolist() for name, column in columns.items()}


def _join(runs: list[ScoreRun]) -> ScoreRun:
    return _sum_equal(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))


def _sum_equal(scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> ScoreRun:
    unique, place = np.unique(scores, return_inverse=True)
    counts = (np.bincount(place.reshape(-1), n, len(unique)) for n in (positives, negatives))
    return ScoreRun(unique, *(count.astype(np.int64) for count in counts))


def _settled(runs: list[ScoreRun]) -> Runs:
    """Join runs from the end until each is more than twice as long as the one after it."""
    settled: list[ScoreRun] = []
    for run in runs:
        while settled and len(settled[-1].scores) <= 2 * len(run.scores):
            run = _join([settled.pop(), run])
        settled.append(run)
    return tuple(settled)

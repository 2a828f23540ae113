"""Metrics of binary labels over all thresholds, exact: areas, curves, and the best threshold.

Each looks at the distinct scores, with the samples of each class at each score. Equal scores have no
order, and no order is invented for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from sparkdl.metrics.base import Metric
from sparkdl.metrics.classes import AS_LOGITS, Judging

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


@dataclass(frozen=True)
class ScoreMetric(Metric):
    """The base of metrics of binary labels, whose state is the distinct scores.

    ``output`` is one score (for example a logit) for each sample, shape (B,) or (B, 1), or two
    scores, (B, 2), whose difference is used. ``target`` is 0 or 1, shape (B,) or (B, 1).

    The state is a few :class:`ScoreRun`, each less than half as long as the one before it, so that
    n samples cost O(n log n) in total, however they are batched. A run contains each distinct score
    once.
    """

    name: str
    judging: Judging = AS_LOGITS
    title: ClassVar[str]

    def start(self) -> Runs:
        return ()

    def update(self, state: Runs, output: torch.Tensor, target: torch.Tensor) -> Runs:
        scores = self._scores(output)
        if target.numel() != len(scores):
            raise ValueError(f"{self.title} needs one label for each sample")
        labels = target.reshape(-1).double().numpy()
        positive = labels == 1
        if not (positive | (labels == 0)).all():
            wrong = labels[~(positive | (labels == 0))][0]
            raise ValueError(f"{self.title} needs labels that are 0 or 1, but found {wrong:g}")
        return _settled([*state, _run(scores, positive.astype(np.int64))])

    def merge(self, one: Runs, other: Runs) -> Runs:
        return _settled([*one, *other])

    def is_empty(self, state: Runs) -> bool:
        return not state

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

    def _thresholds(self, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities of class 1 that scores mean."""
        return self.judging.probabilities(torch.from_numpy(scores)).numpy()


class Cuts(NamedTuple):
    """The samples above each threshold, from the highest score to the lowest, in float64."""

    scores: np.ndarray  # the lowest above the threshold
    true: np.ndarray  # positives above
    false: np.ndarray  # negatives above

    @staticmethod
    def of(state: Runs) -> Cuts:
        """Return the cuts of all samples of a state."""
        scores, positives, negatives = (part[::-1].copy() for part in _join(list(state)))
        return Cuts(scores, np.cumsum(positives) * 1.0, np.cumsum(negatives) * 1.0)

    @property
    def defined(self) -> bool:
        """Return whether there are samples of both classes, and every score is a number."""
        both = self.true[-1] > 0 and self.false[-1] > 0
        return bool(both and not np.isnan(self.scores[0]))

    @property
    def precision(self) -> np.ndarray:
        return self.true / (self.true + self.false)

    @property
    def recall(self) -> np.ndarray:
        return self.true / self.true[-1] if self.true[-1] else np.full(len(self.true), np.nan)

    @property
    def false_rate(self) -> np.ndarray:
        return self.false / self.false[-1] if self.false[-1] else np.full(len(self.false), np.nan)


@dataclass(frozen=True)
class AUC(ScoreMetric):
    """The area under the receiver operating characteristic of binary labels, exact.

    It is the probability that a positive sample scores higher than a negative one, with ties
    counted as half: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27,
    2006, section 7. The value is nan if there is only one class, or if a score is nan.
    """

    name: str = "auc"
    title = "AUC"

    def value(self, state: Runs) -> float:
        if not state:
            return float("nan")
        scores, positives, negatives = _join(list(state))
        pairs = float(positives.sum()) * float(negatives.sum())
        if not pairs or np.isnan(scores[-1]):
            return float("nan")
        below = np.cumsum(negatives) - negatives
        won = (positives.astype(np.float64) * (below + negatives / 2)).sum()
        return float(won / pairs)


@dataclass(frozen=True)
class AveragePrecision(ScoreMetric):
    """The precision at each threshold, weighted by the gain of recall: scikit-learn's
    ``average_precision_score``. The value is nan without a positive sample, or if a score is nan."""

    name: str = "average_precision"
    title = "the average precision"

    def value(self, state: Runs) -> float:
        if not state:
            return float("nan")
        cuts = Cuts.of(state)
        if np.isnan(cuts.scores[0]):
            return float("nan")
        return float((np.diff(cuts.recall, prepend=0.0) * cuts.precision).sum())


@dataclass(frozen=True)
class RocCurve(ScoreMetric):
    """The shares of negatives and positives above each threshold, from the highest."""

    name: str = "roc_curve"
    title = "a ROC curve"
    scalar = False

    def value(self, state: Runs) -> dict[str, list[float]]:
        cuts = Cuts.of(state)
        return _thinned(
            false_positive_rate=np.concatenate([[0.0], cuts.false_rate]),
            true_positive_rate=np.concatenate([[0.0], cuts.recall]),
            threshold=np.concatenate([[np.inf], self._thresholds(cuts.scores)]),
        )


@dataclass(frozen=True)
class PrecisionRecallCurve(ScoreMetric):
    """Precision and recall of each threshold, from the lowest; the last point is (1, 0)."""

    name: str = "precision_recall_curve"
    title = "a curve of precision and recall"
    scalar = False

    def value(self, state: Runs) -> dict[str, list[float]]:
        cuts = Cuts.of(state)
        return _thinned(
            precision=np.concatenate([cuts.precision[::-1], [1.0]]),
            recall=np.concatenate([cuts.recall[::-1], [0.0]]),
            threshold=np.concatenate([self._thresholds(cuts.scores)[::-1], [np.inf]]),
        )


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


@dataclass(frozen=True)
class BestThreshold(ScoreMetric):
    """The threshold of the probability above which deciding for class 1 is best, and how good it is.

    It lies in the middle between two scores. The highest of several that are equally good counts.
    """

    name: str = "best_threshold"
    title = "a threshold"
    scalar = False
    objective: Objective = OBJECTIVES["f1"]

    def value(self, state: Runs) -> dict[str, float]:
        cuts = Cuts.of(state)
        if not cuts.defined:
            return {"threshold": float("nan"), "value": float("nan")}
        above = self._thresholds(cuts.scores)
        last = np.append(above[1:] != above[:-1], True)  # of scores with one probability
        true, false = (np.concatenate([[0.0], part[last]]) for part in cuts[1:])
        values = np.asarray(
            self.objective(true, false, true[-1] - true, false[-1] - false), np.float64
        )
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


def _run(scores: np.ndarray, positives: np.ndarray) -> ScoreRun:
    """Return the run of one batch; ``positives`` is 0 or 1 for each score."""
    return _sum_equal(scores, positives, 1 - positives)


def _join(runs: list[ScoreRun]) -> ScoreRun:
    return _sum_equal(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))


def _sum_equal(scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> ScoreRun:
    unique, place = np.unique(scores, return_inverse=True)
    counts = []
    for count in (positives, negatives):
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, place.reshape(-1), count)
        counts.append(total)
    return ScoreRun(unique, *counts)


def _settled(runs: list[ScoreRun]) -> Runs:
    """Join runs from the end until each is more than twice as long as the one after it."""
    settled: list[ScoreRun] = []
    for run in runs:
        while settled and len(settled[-1].scores) <= 2 * len(run.scores):
            run = _join([settled.pop(), run])
        settled.append(run)
    return tuple(settled)

"""Metrics of classes: what a model decides, beside the label, as counts that merge exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from sparkdl.metrics.base import Folded
from sparkdl.model.loss import ClassLoss, unmasked, unwrapped

BINS = 15
"""The number of equal intervals of probability that a calibration looks at."""
MOST_CLASSES = 256
"""The most classes of a confusion matrix, which a history holds once for each validation."""
EPSILON = float(np.finfo(np.float64).eps)
AVERAGES = ("macro", "micro", "weighted")


class Decisions(NamedTuple):
    """The classes that a model decides for, and the right ones, for each sample or element."""

    predicted: torch.Tensor
    actual: torch.Tensor
    classes: int | None  # None: each column is a label of its own, which a row has or has not

    def counts(self) -> torch.Tensor:
        """Return, by class, how many decisions were right, how many there were, and how many labels,
        (3, C) in int64."""
        if self.classes is None:
            predicted, actual = (part.flatten(1).long() for part in self[:2])
            return torch.stack([(predicted * actual).sum(0), predicted.sum(0), actual.sum(0)])
        actual = self._numbers()
        predicted, count = self.predicted.reshape(-1).long(), self.classes
        right = predicted[predicted == actual]
        return torch.stack(
            [numbers.bincount(minlength=count) for numbers in (right, predicted, actual)]
        )

    def matrix(self) -> torch.Tensor:
        """Return how often a class (row) was taken for another one (column), (C, C) in int64."""
        count = self.classes
        if count is None:
            raise ValueError("a confusion matrix needs one class for each sample")
        if count > MOST_CLASSES:
            raise ValueError(
                f"a confusion matrix of {count:,} classes is too large to keep: at most {MOST_CLASSES}"
            )
        pairs = self._numbers() * count + self.predicted.reshape(-1).long()
        return pairs.bincount(minlength=count * count).reshape(count, count)

    def _numbers(self) -> torch.Tensor:
        assert self.classes is not None
        return class_numbers(self.actual.reshape(-1), self.classes)


def class_numbers(target: torch.Tensor, count: int) -> torch.Tensor:
    """Return labels as class numbers in int64. Raises ValueError for what is none."""
    numbers = target.long()
    if (numbers != target).any() or (
        len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count
    ):
        raise ValueError(f"the label must be a class number from 0 to {count - 1}")
    return numbers


@dataclass(frozen=True, kw_only=True)
class Judging:
    """The interpretation of output and label by a metric of classes: that of the loss. A saved
    model, which has no loss, stores this.
    """

    threshold: float = 0.0  # an output above it means class 1
    classes: bool = False  # a label with the output's shape is a probability of each class
    ignored: int | None = None

    @staticmethod
    def of(loss: Any) -> Judging:
        """Return the interpretation of a loss.

        BCELoss takes a probability; CrossEntropyLoss and NLLLoss take classes and may ignore one.
        """
        loss = unmasked(loss)
        function, _ = unwrapped(loss)
        if isinstance(function, nn.BCELoss) or function is nn.functional.binary_cross_entropy:
            return Judging(threshold=0.5)
        of_classes = ClassLoss.of(loss)
        return (
            Judging() if of_classes is None else Judging(classes=True, ignored=of_classes.ignored)
        )

    def decisions(self, output: torch.Tensor, target: torch.Tensor) -> Decisions:
        """Return the decisions of a batch.

        Classes are the argmax over dimension 1. One output for each sample is a logit, positive for
        class 1.
        """
        output, target = _aligned(output, target)
        if self._soft(output, target):
            return Decisions(output.argmax(dim=1), target.argmax(dim=1), output.shape[1])
        if output.ndim == target.ndim + 1:
            count, output = output.shape[1], output.argmax(dim=1)
            target = same_shape(output, target)
            kept = slice(None) if self.ignored is None else target != self.ignored
            return Decisions(output[kept], target[kept], count)
        target = same_shape(output, target)
        return Decisions(output > self.threshold, target > 0.5, 2 if output.ndim == 1 else None)

    def log_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return minus the logarithm of the right class's probability, for each sample or element.

        A probability counts as at least 2.2e-16, as in scikit-learn.
        """
        output, target = _aligned(output.double(), target)
        if self._soft(output, target):
            return -(target * self._logs(output)).sum(1)
        if output.ndim == target.ndim + 1:
            logs = self._logs(output).movedim(1, -1)
            target = same_shape(logs[..., 0], target)
            if self.ignored is not None:
                logs, target = logs[target != self.ignored], target[target != self.ignored]
            return -logs.gather(-1, class_numbers(target, logs.shape[-1])[..., None])[..., 0]
        right = same_shape(output, target).double()
        one = self.probabilities(output).clamp(EPSILON, 1 - EPSILON)
        return -(right * one.log() + (1 - right) * (1 - one).log())

    def probabilities(self, output: torch.Tensor) -> torch.Tensor:
        """Return the probabilities of class 1 that single outputs mean, in float64."""
        return output.double() if self.threshold == 0.5 else output.double().sigmoid()

    def confidences(
        self, output: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities, and whether what they are of is so.

        That is class 1 where there are two, and the most likely class where there are more.
        """
        decided = self.decisions(output, target)
        output, target = _aligned(output.double(), target)
        if output.ndim == target.ndim:
            return self.probabilities(output).reshape(-1), (target > 0.5).reshape(-1)
        likely = self._logs(output).exp().movedim(1, -1)
        if self.ignored is not None:
            likely = likely[target != self.ignored]
        if decided.classes == 2:
            return likely[..., 1].reshape(-1), (decided.actual == 1).reshape(-1)
        return likely.amax(-1).reshape(-1), (decided.predicted == decided.actual).reshape(-1)

    def _soft(self, output: torch.Tensor, target: torch.Tensor) -> bool:
        return self.classes and output.ndim > 1 and output.shape == target.shape

    def _logs(self, output: torch.Tensor) -> torch.Tensor:
        return output.log_softmax(1).clamp(min=math.log(EPSILON))


AS_LOGITS = Judging()
"""The interpretation where nothing is known of the loss."""


def _aligned(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return without_ones(output, target) if output.ndim <= 2 else (output, target)


def without_ones(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape (B, 1) to (B,), in either: torch would broadcast (B, 1) and (B,) to (B, B)."""
    pair = [
        one.reshape(-1) if one.ndim == 2 and one.shape[1] == 1 else one for one in (output, target)
    ]
    return pair[0], pair[1]


def same_shape(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``target``, or raise ValueError if its shape is not that of ``output``."""
    if output.shape != target.shape:
        raise ValueError("the label must have one value for each value of the output")
    return target


def accuracy(
    output: torch.Tensor, target: torch.Tensor, judging: Judging = AS_LOGITS
) -> torch.Tensor:
    """Return whether each prediction is right."""
    predicted, actual, _ = judging.decisions(output, target)
    return predicted == actual


def log_loss(
    output: torch.Tensor, target: torch.Tensor, judging: Judging = AS_LOGITS
) -> torch.Tensor:
    """See :meth:`Judging.log_loss`."""
    return judging.log_loss(output, target)


@dataclass(frozen=True)
class Judged(Folded):
    """A metric of what outputs mean, which depends on the loss."""

    judging: Judging = AS_LOGITS


@dataclass(frozen=True)
class ClassRatio(Judged):
    """Precision, recall or F1, as scikit-learn defines them; a ratio without a case is 0.

    A model with one output decides between two classes, and one whose label has the shape of its
    output, (B, L), decides on L labels.
    """

    kind: str = "f1"
    average: str | None = None  # None: of class 1 if there are two classes, else "macro"
    number: int | None = None  # of the one class that counts

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        decided = self.judging.decisions(output, target)
        counts = decided.counts()
        if self.number is not None and self.number >= counts.shape[1]:
            raise ValueError(f"there is no class {self.number} of {counts.shape[1]}")
        labels = torch.full_like(counts[:1], decided.classes is None)
        return torch.cat([counts, labels])

    def value(self, state: torch.Tensor) -> float:
        right, predicted, actual = (row.double() for row in state[:3])
        by_label = bool(state[3].any())
        if self.average == "micro":
            return float(self._ratio(right.sum(), predicted.sum(), actual.sum()))
        each = self._ratio(right, predicted, actual)
        if self.number is not None:
            return float(each[self.number])
        if self.average is None and len(each) == 2 and not by_label:
            return float(each[1])
        seen = torch.ones_like(each) if by_label else (predicted + actual > 0).double()
        shares = actual if self.average == "weighted" else seen
        return float((each * shares).sum() / shares.sum()) if shares.any() else math.nan

    def _ratio(
        self, right: torch.Tensor, predicted: torch.Tensor, actual: torch.Tensor
    ) -> torch.Tensor:
        below = {"precision": predicted, "recall": actual, "f1": (predicted + actual) / 2}
        return right / below[self.kind].clamp(min=0.5)


@dataclass(frozen=True)
class ConfusionMatrix(Judged):
    """How often each class (row) was taken for each other one (column)."""

    scalar = False

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.judging.decisions(output, target).matrix()

    def value(self, state: torch.Tensor) -> list[list[int]]:
        matrix: list[list[int]] = state.tolist()
        return matrix


@dataclass(frozen=True)
class CalibrationError(Judged):
    """The mean distance between a probability and how often what it is of comes true.

    The mean is over :data:`BINS` equal intervals, weighted by their samples: M. P. Naeini, G. F.
    Cooper and M. Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI
    2015.
    """

    higher_is_better = False

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        confidence, right = self.judging.confidences(output, target)
        if len(confidence) and not 0 <= float(confidence.min()) <= float(confidence.max()) <= 1:
            raise ValueError("a calibration needs probabilities from 0 to 1, or logits")
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
        sums = torch.zeros(3, BINS, dtype=torch.float64)
        values = torch.stack([torch.ones_like(confidence), confidence, right.double()])
        return sums.index_add_(1, torch.searchsorted(edges, confidence.contiguous()), values)

    def value(self, state: torch.Tensor) -> Any:
        count, confidence, right = state
        return float((confidence - right).abs().sum() / count.sum())


@dataclass(frozen=True)
class CalibrationCurve(CalibrationError):
    """The mean probability, and how often what it is of came true, of each interval with samples."""

    scalar = False

    def value(self, state: torch.Tensor) -> dict[str, list[float]]:
        count, confidence, right = state[:, state[0] > 0]
        return {
            "predicted": (confidence / count).tolist(),
            "true": (right / count).tolist(),
            "count": count.tolist(),
        }

"""Values that one sweep finds: the threshold of a classifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.errors import DataError, ParameterError, nearest, shown
from sparkdl.infer.model import TrainedModel
from sparkdl.metrics.classes import Judging
from sparkdl.metrics.scores import OBJECTIVES, BestThreshold
from sparkdl.model.recipe import Part


@dataclass(frozen=True)
class Threshold:
    """A threshold of the probability of class 1, above which a classifier decides for it.

    It is a function of a batch's output, too: ``trained.transform(df, postprocess=threshold)`` makes
    a column of classes.

    Attributes:
        threshold: The probability.
        value: What the decisions are worth, by the metric.
        judging: The way to read the model's output.
    """

    threshold: float
    value: float
    judging: Judging

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """Return the class of each row of an output, in int64."""
        scores = output[:, 1] - output[:, 0] if output.shape[1:] == (2,) else output.flatten()
        return (self.judging.probabilities(scores) > self.threshold).long()


def threshold(
    trained: TrainedModel,
    data: DataFrame | RDD[Any],
    metric: str | Callable[..., Any] = "f1",
    *,
    batch_size: int = 1024,
    output: Part = None,
) -> Threshold:
    """Return the threshold of a classifier of two classes that is best on ``data``.

    All thresholds are compared exactly, in one pass. Take rows that the model was not trained on.

    Args:
        trained: The model. It returns one logit a row (a probability, if it was trained with
            BCELoss), or a score for each of two classes.
        data: A DataFrame or an RDD with features and labels, which are 0 or 1.
        metric: What the decisions shall be best in: "f1", "accuracy" or "balanced_accuracy"; or a
            function of the numbers of true positives, false positives, false negatives and true
            negatives, as arrays, whose highest value counts.
        batch_size: The number of rows of a forward pass.
        output: The part of the model's result that has the scores, as in ``trained.evaluate``.

    Raises:
        ParameterError: The metric is not known, or the output or the labels are not of two classes.
        DataError: There is no row of one of the classes.
    """
    objective = OBJECTIVES.get(metric) if isinstance(metric, str) else metric
    if not callable(objective):
        raise ParameterError(
            f"metric={shown(metric)}: give one of {', '.join(OBJECTIVES)}, or a function of the "
            f"numbers of true and false positives and negatives.{nearest(str(metric), OBJECTIVES)}"
        )
    best = BestThreshold(objective=objective)
    found = trained.evaluate(data, [best], batch_size, output)[best.name]
    if found["threshold"] != found["threshold"]:
        raise DataError("a threshold needs rows of both classes, and scores that are numbers.")
    return Threshold(found["threshold"], found["value"], trained.judging)

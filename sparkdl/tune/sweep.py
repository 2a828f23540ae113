"""Values that one sweep finds: the threshold of a classifier, the learning rate of a trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark import RDD
from pyspark.sql import DataFrame
from torch.optim.lr_scheduler import LambdaLR

from sparkdl.codec.charts import THICK, Line, Page, Panel, as_svg
from sparkdl.codec.describe import two_columns
from sparkdl.codec.files import path_here
from sparkdl.errors import DataError, ParameterError, nearest, shown
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import Callback, StopTraining
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import max_iteration
from sparkdl.metrics.classes import Judging
from sparkdl.metrics.scores import OBJECTIVES, best_threshold
from sparkdl.model.recipe import Part
from sparkdl.plain import is_whole
from sparkdl.train.trainer import Trainer


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
        output = output.double()
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
    best = best_threshold(objective)
    alone = replace(trained, loss=None)  # labels may be of a kind that the loss does not take
    found = alone.evaluate(data, [best], batch_size, output)[best.name]
    if found["threshold"] != found["threshold"]:
        raise DataError("a threshold needs rows of both classes, and scores that are numbers.")
    return Threshold(found["threshold"], found["value"], trained.judging)


SMOOTHING = 0.95
"""The weight of the losses before in the smoothed loss."""
DIVERGED = 4.0
"""The multiple of the lowest smoothed loss at which a sweep of learning rates ends."""


@dataclass(frozen=True)
class LearningRates:
    """The losses of a sweep of learning rates, see :func:`find_lr`.

    Attributes:
        rates: The rate of each iteration.
        losses: The smoothed loss after it.
        suggestion: The rate at which the loss falls fastest; nan if it never falls.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a page of HTML with the losses over the rates, and return its path.

        Raises:
            ParameterError: The extra ``report`` is not installed.
        """
        page = Page("Learning rates")
        page.figures({"suggestion": f"{self.suggestion:.3g}"})
        page.chart(self._panel())
        return page.save(path_here(path))

    def _panel(self) -> Panel:
        points = [
            (math.log10(rate), loss) for rate, loss in zip(self.rates, self.losses, strict=True)
        ]
        marks = [math.log10(self.suggestion)] if self.suggestion > 0 else []
        return Panel("smoothed loss", [Line("loss", points, THICK)], marks, "log10 of the rate")

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the curve, and the suggestion."""
        return two_columns({"suggestion": f"{self.suggestion:.3g}"}) + as_svg(self._panel())


def find_lr(
    trainer: Trainer, data: Any, *, start: float = 1e-7, end: float = 10.0, iterations: int = 100
) -> LearningRates:
    """Train with learning rates that grow from iteration to iteration, and suggest one.

    It is the range test of L. N. Smith, "Cyclical learning rates for training neural networks", WACV
    2017. The sweep ends where the loss has become four times its lowest value. Nothing is validated,
    checkpointed or kept, and the trainer stays as it is.

    Args:
        trainer: The trainer; the learning rates of its optimizer's groups keep their ratios.
        data: The training data, as for ``Trainer.fit``.
        start: The first learning rate.
        end: The last one.
        iterations: The number of rates between them.

    Raises:
        UserError: The data, the trainer or an argument cannot work.
        TrainingError: An iteration failed for good.
    """
    if not 0 < start < end < math.inf or not is_whole(iterations, 2):
        raise ParameterError(
            f"start={shown(start)}, end={shown(end)}, iterations={shown(iterations)}: give rates "
            "above 0 that grow, and at least 2 iterations."
        )
    swept = replace(
        trainer,
        schedule=partial(_growing, start, end, iterations),
        schedule_per="iteration",
        schedule_metric=None,
        stop=max_iteration(iterations),
        on_nan="skip",
        callbacks=[_Divergence()],
        validation=None,
        checkpoint=None,
        histograms=None,
        ema=None,
    )
    history = swept.fit(data).history
    rates = [row["learning_rate"] for row in history]
    losses = smoothed(history.losses)
    count = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    rates, losses = rates[:count], losses[:count]
    lowest = losses.index(min(losses)) if losses else 0
    falls = [losses[i + 1] - losses[i - 1] for i in range(1, lowest)]
    steepest = 1 + falls.index(min(falls)) if falls else 0
    found = rates[steepest] if falls and min(falls) < 0 else math.nan
    return LearningRates(tuple(rates), tuple(losses), found)


def _growing(start: float, end: float, count: int, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Return the schedule whose first group has these rates, evenly by their logarithm."""
    first = float(optimizer.param_groups[0]["lr"])
    if not first:
        raise ParameterError(
            "find_lr: the optimizer's learning rate is 0, and grows by a factor: set lr=."
        )
    return LambdaLR(optimizer, _Factor(start / first, (end / start) ** (1 / (count - 1))))


@dataclass
class _Factor:
    """The factor of the learning rate after so many iterations."""

    first: float
    growth: float

    def __call__(self, iterations: int) -> float:
        return self.first * self.growth**iterations


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the moving averages of losses, as if each had begun with the first one."""
    found, average = [], 0.0
    for i, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING**i))
    return found


class _Divergence(Callback):
    """Ends the sweep once the loss has grown far beyond its lowest value."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self._losses.append(state.loss)
        found = smoothed(self._losses)
        lowest = min(found)
        unit = lowest if lowest > 0 else max(-lowest, found[0] - lowest)  # a loss may be below 0
        if not math.isfinite(state.loss) or found[-1] > lowest + (DIVERGED - 1) * unit:
            raise StopTraining("the loss diverges")

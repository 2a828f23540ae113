"""Metrics as sums: each batch gives (numerator, denominator), partitions add, the end divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparkdl.errors import ParameterError, nearest


@dataclass(frozen=True)
class MeanMetric:
    """A mean over samples: ``function(output, target)`` gives one value a sample (or element)."""

    name: str
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        """(sum, count) over a batch, in float64."""
        values = self.function(output, target)
        return float(values.double().sum()), float(values.numel())


def _accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Classes by argmax over dimension 1; one output a sample means a logit, positive for class 1."""
    if output.ndim > target.ndim:
        return output.argmax(dim=1) == target
    return (output > 0) == (target > 0.5)


def _absolute_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs()


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square()


METRICS = {
    "accuracy": MeanMetric("accuracy", _accuracy),
    "mae": MeanMetric("mae", _absolute_error),
    "mse": MeanMetric("mse", _squared_error),
}


def resolve(metrics: Sequence[str | MeanMetric]) -> list[MeanMetric]:
    """Names and metrics -> metrics. Raises :class:`ParameterError` with the nearest name."""
    resolved = []
    for metric in metrics:
        if isinstance(metric, MeanMetric):
            resolved.append(metric)
        elif metric in METRICS:
            resolved.append(METRICS[metric])
        elif metric != "loss":
            raise ParameterError(
                f'unknown metric "{metric}".{nearest(str(metric), METRICS)} '
                f"Known: loss, {', '.join(METRICS)}, or a sparkdl.MeanMetric."
            )
    return resolved

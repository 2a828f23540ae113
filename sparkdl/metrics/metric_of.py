"""A metric of one output and one label, for a model that has several of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ParameterError, nearest, raise_all
from sparkdl.metrics.base import Metric
from sparkdl.metrics.named import resolve
from sparkdl.model.signature import Part, problems_of_part


@dataclass(frozen=True)
class MetricOf(Metric):
    """A metric of a part of the model's output against one of several labels.

    Its name in results is ``LABEL/METRIC``, such as "returned/accuracy".
    """

    metric: Any
    """The metric: a name, a :class:`Metric`, a ``torchmetrics.Metric``, or a pair (name, metric)."""
    label: str
    """The label column."""
    output: Part
    """The part of the output, as ``Trainer.output``."""

    def __post_init__(self) -> None:
        raise_all(ParameterError, problems_of_part(self.output, "MetricOf: "))
        (metric,) = resolve([self.metric])
        object.__setattr__(self, "metric", metric)
        object.__setattr__(self, "name", f"{self.label}/{metric.name}")
        object.__setattr__(self, "higher_is_better", metric.higher_is_better)

    def start(self) -> Any:
        return self.metric.start()

    def update(self, state: Any, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.metric.update(state, output, target)

    def merge(self, one: Any, other: Any) -> Any:
        return self.metric.merge(one, other)

    def value(self, state: Any) -> float:
        return self.metric.value(state)

    def is_empty(self, state: Any) -> bool:
        return self.metric.is_empty(state)

    def place(self, labels: tuple[str, ...]) -> int:
        """Return the place of its label among all. Raises :class:`ParameterError`."""
        if self.label not in labels:
            raise ParameterError(
                f'MetricOf: "{self.label}" is no label.{nearest(self.label, labels)} The labels are: '
                f"{', '.join(labels)}."
            )
        return labels.index(self.label)

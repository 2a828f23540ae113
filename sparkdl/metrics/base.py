"""The interface of a metric: a fold over batches whose states of several partitions merge into one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Metric(ABC):
    """A metric of a model's output against the label, over any number of batches.

    A metric object is constant. All that it has seen is in the *state*, a value that can be
    pickled. Each partition folds its batches into its own state (``start``, then ``update`` batch
    by batch). The driver merges these states in the order of the partitions and calls ``value``.
    For any cut of the data into batches and partitions the value must be that of one pass over
    everything, so a state keeps sums and counts, or the samples themselves, but never averages.

    Subclass it to write a metric of your own. Objects of it must be picklable, so do not store open
    files in them.
    """

    name: str
    """The name of the value in the result."""
    higher_is_better: bool = True
    """True if more is better; early stopping and "keep the best" use it."""

    @abstractmethod
    def start(self) -> Any:
        """Return the state before the first batch, a new object at each call."""

    @abstractmethod
    def update(self, state: Any, output: torch.Tensor, target: torch.Tensor) -> Any:
        """Return the state after one more batch. ``state`` itself may be changed or consumed.

        Args:
            state: The state before the batch.
            output: The model's output, on the CPU, rows first.
            target: The label, on the CPU, rows first.

        Raises:
            ValueError: The shapes or values cannot work. The user sees the message with the
                metric's name and the shapes.
        """

    @abstractmethod
    def merge(self, one: Any, other: Any) -> Any:
        """Return the state of ``one``'s samples followed by ``other``'s. Both may be changed or
        consumed."""

    @abstractmethod
    def value(self, state: Any) -> float:
        """Return the metric over everything seen; nan if it is not defined."""

    def is_empty(self, state: Any) -> bool:
        """Return whether nothing was measured; the metric is then omitted from the result."""
        return False


@dataclass(frozen=True)
class MeanMetric(Metric):
    """A mean over samples: ``function(output, target)`` returns one value for each sample (or
    element).

    The state is (sum, count), in float64.
    """

    name: str
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    higher_is_better: bool = True

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        """Return (sum, count) over a batch, in float64."""
        values = self.function(output, target)
        if values.ndim == 0 and output.ndim and len(output) > 1:
            raise ValueError(
                "the function gave one value for the whole batch, and averages cannot be averaged: "
                'return one value for each sample, as torch\'s losses do with reduction="none"'
            )
        return float(values.double().sum()), float(values.numel())

    def start(self) -> tuple[float, float]:
        return 0.0, 0.0

    def update(
        self, state: tuple[float, float], output: torch.Tensor, target: torch.Tensor
    ) -> tuple[float, float]:
        return self.merge(state, self.sums(output, target))

    def merge(self, one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
        return one[0] + other[0], one[1] + other[1]

    def value(self, state: tuple[float, float]) -> float:
        total, count = state
        return total / count if count else float("nan")

    def is_empty(self, state: tuple[float, float]) -> bool:
        return not state[1]

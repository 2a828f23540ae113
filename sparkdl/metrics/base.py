"""What a metric is: a fold over batches whose states of several partitions merge into one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Metric(ABC):
    """A figure of merit of a model's output against the label, over any number of batches.

    A metric is a constant: what it has seen is in the *state*, a value that pickles. Each partition
    folds its batches into a state of its own (``start``, then ``update`` batch by batch); the driver
    merges these in the order of the partitions and asks for the ``value``. For any cut of the data
    into batches and partitions the value shall be that of one pass over everything, so a state keeps
    sums and counts, or what was seen, never averages.

    Subclass it for a metric of your own. An object of it must pickle, so give it no open files.
    """

    name: str
    """What the value is called in the result."""
    higher_is_better: bool = True
    """Whether more is better; early stopping and "keep the best" go by it."""

    @abstractmethod
    def start(self) -> Any:
        """The state before the first batch; a new one at each call."""

    @abstractmethod
    def update(self, state: Any, output: torch.Tensor, target: torch.Tensor) -> Any:
        """The state after a batch more. ``output`` and ``target``: tensors on the CPU, rows first.

        Go on with what is returned; ``state`` itself may have been used up. Raise ValueError for
        shapes or values that cannot work: the user sees it with the metric's name and the shapes.
        """

    @abstractmethod
    def merge(self, one: Any, other: Any) -> Any:
        """The state of ``one``'s samples followed by ``other``'s. Both may be used up."""

    @abstractmethod
    def value(self, state: Any) -> float:
        """The metric of everything seen; nan where it is not defined."""

    def is_empty(self, state: Any) -> bool:
        """Whether nothing was measured; the metric is then left out of the result."""
        return False


@dataclass(frozen=True)
class MeanMetric(Metric):
    """A mean over samples: ``function(output, target)`` gives one value a sample (or element).

    The state is (sum, count), in float64.
    """

    name: str
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    higher_is_better: bool = True

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        """(sum, count) over a batch, in float64."""
        values = self.function(output, target)
        if values.ndim == 0 and output.ndim and len(output) > 1:
            raise ValueError(
                "the function gave one value for the whole batch, and averages cannot be averaged: "
                'let it give one for each sample, as torch\'s losses do with reduction="none"'
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

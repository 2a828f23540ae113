"""The interface of a metric: a fold over batches whose states of several partitions merge into one.

Metrics of the library torchmetrics, updated on the executors and merged on the driver.

This module never imports the library; only a user who gives one of its metrics does.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparkdl.errors import ParameterError, kind_of


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
    scalar: bool = True
    """False if the value is a curve or a matrix, which validations do not compare."""

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
    def value(self, state: Any) -> Any:
        """Return the metric over everything seen; nan if it is not defined.

        If it is not :attr:`scalar`, return nested lists of numbers, or a mapping from names to such.
        """

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


@dataclass(frozen=True)
class Folded(Metric):
    """A metric whose state is that of one batch, joined with those of others; None before the first."""

    name: str
    unlike: ClassVar[str] = "all batches must have the same number of columns or classes"

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        """Return the state of one batch; None if there is nothing in it."""
        raise NotImplementedError

    def join(self, one: Any, other: Any) -> Any:
        """Return the state of two parts: the sum of tensors, unless a class defines another."""
        self.check_alike(one, other)
        return one + other

    def check_alike(self, one: torch.Tensor, other: torch.Tensor) -> None:
        if one.shape != other.shape:
            raise ValueError(self.unlike)

    def start(self) -> Any:
        return None

    def update(self, state: Any, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.merge(state, self.batch(output, target))

    def merge(self, one: Any, other: Any) -> Any:
        if one is None or other is None:
            return one if other is None else other
        return self.join(one, other)

    def is_empty(self, state: Any) -> bool:
        return state is None


State = tuple[dict[str, Any], int]
"""The metric's state by name (tensors, or lists of tensors), and the number of updates in it."""


def is_torchmetric(value: Any) -> bool:
    """Return whether ``value`` is an instance of a torchmetrics class or of a subclass."""
    return any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(value).__mro__)


@dataclass(frozen=True, eq=False)
class TorchMetric(Metric):
    """A ``torchmetrics.Metric`` as a :class:`Metric`, made by :meth:`of`.

    If torchmetrics does not say which direction is better (None), more is taken to be better. Sums,
    minima, maxima and lists are merged by ``merge_state``. A state that is a mean is weighted by
    the number of updates on each side, which ``merge_state`` ignores. The result equals that of one
    pass up to the rounding of the metric's own states, most of which are float32.
    """

    name: str
    template: Any
    """The user's metric, copied and reset. Its states are set and read for each operation."""

    @staticmethod
    def of(name: str, metric: Any) -> TorchMetric:
        """Wrap a metric that can be computed in parts."""
        problem = _why_not(metric)
        if problem:
            raise ParameterError(
                f'metric "{name}" (torchmetrics.{type(metric).__name__}): {problem}'
            )
        template = copy.deepcopy(metric).cpu()
        template.reset()
        return TorchMetric(name, template)

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]
        return self.template.higher_is_better is not False

    def start(self) -> State:
        return copy.deepcopy(dict(self.template.metric_state)), 0

    def update(self, state: State, output: torch.Tensor, target: torch.Tensor) -> State:
        metric = self._filled(state)
        with torch.inference_mode(False), torch.no_grad():
            # Clones: a list state would otherwise keep the batch, or mapped memory, alive.
            metric.update(output.clone(), target.clone())
        return dict(metric.metric_state), state[1] + 1

    def merge(self, one: State, other: State) -> State:
        if not one[1] or not other[1]:
            return one if one[1] else other
        updates = one[1] + other[1]
        first, second = self._filled(one), self._filled(other)
        second.merge_state(first)  # the given state comes first
        merged = dict(second.metric_state)
        for name in _means(self.template):
            merged[name] = (one[0][name] * one[1] + other[0][name] * other[1]) / updates
        return merged, updates

    def value(self, state: State) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example that only one class was seen
            value = self._filled(state).compute()
        parts = value if isinstance(value, (tuple, list)) else [value]
        if not all(isinstance(part, (torch.Tensor, int, float)) for part in parts):
            raise ParameterError(
                f'metric "{self.name}" gives {kind_of(value)}, and no number, curve or matrix: use '
                "another metric, or write a sparkdl.Metric."
            )
        plain = [part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]
        if parts is value:
            return plain
        single = isinstance(value, torch.Tensor) and value.numel() == 1
        return float(value) if single else plain[0]

    def is_empty(self, state: State) -> bool:
        return not state[1]

    def _filled(self, state: State) -> Any:
        metric = copy.copy(self.template)
        values, metric._update_count = state
        metric._computed = None
        metric._to_sync = False  # nor with the peers of a process group, if there is one
        for name, value in values.items():
            setattr(metric, name, value)
        return metric


def _why_not(metric: Any) -> str | None:
    """Return why the states of parts of the data cannot be merged into one; None if they can."""
    classes = {f"{cls.__module__}.{cls.__name__}" for cls in type(metric).__mro__}
    if "torchmetrics.metric.Metric" not in classes:
        return "give its metrics one by one, as a dict {name: metric}."
    base: Any = next(c for c in type(metric).__mro__ if c.__module__ == "torchmetrics.metric")
    if not hasattr(metric, "merge_state"):
        return 'this version cannot merge states: pip install "torchmetrics>=1.5".'
    if type(metric).merge_state is not base.merge_state:
        return None  # the metric has its own merge
    stacked = any(
        isinstance(default, torch.Tensor) and metric._reductions[name] is None
        for name, default in metric._defaults.items()
    )
    if metric.full_state_update is not False or metric.dist_sync_on_step or stacked:
        return (
            "its states of two parts of the data cannot be merged (merge_state needs "
            "full_state_update=False and a dist_reduce_fx for every state). Use another metric, or "
            "write a sparkdl.Metric."
        )
    if not metric._defaults:
        return (
            "it keeps its state in other metrics. Pass these one by one, as a dict {name: metric}."
        )
    return None


def _means(metric: Any) -> list[str]:
    """Return the names of the states whose reduction is ``dist_reduce_fx="mean"``."""
    return [
        name
        for name, reduction in metric._reductions.items()
        if getattr(reduction, "__name__", "") == "dim_zero_mean"
    ]

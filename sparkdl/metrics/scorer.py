"""Loss and metrics of batches, as states that merge, for both ``evaluate`` and validation.

A metric of one output and one label, for a model that has several of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from sparkdl.errors import ModelError, ParameterError, nearest, raise_all
from sparkdl.metrics.base import MeanMetric, Metric
from sparkdl.metrics.named import resolve
from sparkdl.model.loss import IGNORED, Loss, loss_of, masses_of, output_of
from sparkdl.model.recipe import Part, described, for_example, on_device, part_of, problems_of_part


@dataclass(frozen=True)
class MetricOf(Metric):
    """A metric of a part of the model's output against one of several labels.

    Its name in results is ``LABEL/METRIC``, such as "returned/accuracy".
    """

    metric: Any
    """The metric: a name, a :class:`Metric`, a ``torchmetrics.Metric``, or a pair (name, metric)."""
    label: str
    """The label column, or one value of a label that is an array: "label[0]"."""
    output: Part
    """The part of the output, as ``Trainer.output``."""

    def __post_init__(self) -> None:
        raise_all(ParameterError, problems_of_part(self.output, "MetricOf: "))
        (metric,) = resolve([self.metric])
        object.__setattr__(self, "metric", metric)
        object.__setattr__(self, "name", f"{self.label}/{metric.name}")
        object.__setattr__(self, "higher_is_better", metric.higher_is_better)
        object.__setattr__(self, "scalar", metric.scalar)

    def start(self) -> Any:
        return self.metric.start()

    def update(self, state: Any, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.metric.update(state, output, target)

    def merge(self, one: Any, other: Any) -> Any:
        return self.metric.merge(one, other)

    def value(self, state: Any) -> Any:
        return self.metric.value(state)

    def is_empty(self, state: Any) -> bool:
        return self.metric.is_empty(state)

    def target(self, targets: Sequence[torch.Tensor], labels: tuple[str, ...]) -> torch.Tensor:
        """Return its label among all. Raises :class:`ParameterError`."""
        if self.label in labels:
            return targets[labels.index(self.label)]
        match = _TASK.fullmatch(self.label)
        name, number = match.groups() if match else ("", "")
        if name not in labels:
            raise ParameterError(
                f'MetricOf: "{self.label}" is no label.{nearest(self.label, labels)} The labels are: '
                f"{', '.join(labels)}."
            )
        target = targets[labels.index(name)]
        if target.ndim < 2 or int(number) >= target.shape[1]:
            raise ParameterError(
                f'MetricOf: label "{name}" has the shape {list(target.shape)} in a batch, and no value '
                f"{number} in a row."
            )
        return target[:, int(number)]


_TASK = re.compile(r"(.*)\[(\d+)\]")
"""Matches one value of a label that is an array."""

MOST_NUMBERS = 1 << 16
"""The most numbers of a curve or a matrix in the history."""
States: TypeAlias = list[Any]
"""[samples seen, (sum of the loss, sum of its weights), a state for each metric]; can be pickled."""


@dataclass(frozen=True)
class Scorer:
    """The values to compute from the model's outputs: a loss, metrics, or both.

    Each partition folds its batches into states (``start``, then ``update``), which can be pickled.
    The driver merges the states of all partitions, in their order, and calls ``values``.
    """

    loss: Callable[..., torch.Tensor] | None
    """The loss function, which is called as in training and returns the mean over a batch or
    ``(sum, count)``. A mean is weighted by its samples: by their weights, and by
    :func:`sparkdl.model.loss.masses_of`. Metrics do not use weights."""
    metrics: tuple[Metric, ...] = ()
    dimensions: int | None = None
    """The number of dimensions of a batch's output, if it is known."""
    part: Part = None
    """The part of the model's output that the metrics get."""
    loss_part: Part = None
    """The part of the model's output that the loss gets."""
    labels: tuple[str, ...] = ()
    """The names of the labels, for a :class:`MetricOf`."""
    masked: frozenset[str] = frozenset()
    """The labels of which -100 is missing, if they are whole numbers."""

    @property
    def apart(self) -> bool:
        """Return whether the metrics get another part of the output than the loss."""
        return self.part != self.loss_part

    def on(self, device: torch.device) -> Scorer:
        """Return the scorer for outputs on ``device``."""
        return self if self.loss is None else replace(self, loss=on_device(self.loss, device))

    def start(self) -> States:
        """Return the states before the first batch."""
        return [0, (0.0, 0.0), *(metric.start() for metric in self.metrics)]

    def update(
        self,
        states: States,
        output: Any,
        targets: Sequence[torch.Tensor],
        weights: torch.Tensor | None = None,
        samples: int | None = None,
    ) -> States:
        """Return the states after one more batch. ``states`` itself may be changed or consumed.

        The loss gets several targets as a tuple; metrics need exactly one. ``weights`` are for the
        loss. ``samples`` is by default the rows of the first target or of the output.
        """
        count = _rows(output, targets) if samples is None else samples
        if not count:
            return states
        returned, output = output, self._part(output, self.loss_part, count)
        total, mass = states[1]
        try:
            if self.loss is not None:
                mean, weight = _mean(self.loss, output, targets, weights, count)
                if weight:  # otherwise the mean is nan
                    total, mass = total + float(mean) * weight, mass + weight
        except Exception as error:
            found = _shape(output) if isinstance(output, torch.Tensor) else type(output).__name__
            raise ModelError(
                f"the loss fails on output {found} and label {', '.join(map(_shape, targets))}: "
                f"{type(error).__name__}: {str(error).rstrip('. ')}. Give a label of the kind and "
                "range that the model was trained on."
            ) from error
        updated = [states[0] + count, (total, mass)]
        if self.metrics:
            whole, common = output_of(returned), None
            for metric, state in zip(self.metrics, states[2:], strict=True):
                label = self.labels[0] if self.labels else ""
                if isinstance(metric, MetricOf):
                    label = metric.label
                    own = [metric.target(targets, self.labels)]
                    plain, target = self._plain(self._part(whole, metric.output, count), own)
                else:
                    if common is None:
                        common = self._plain(self._part(whole, self.part, count), targets)
                    plain, target = common
                try:
                    marked = bool(self.masked & {label, label.partition("[")[0]})
                    plain, target = known_of(metric, plain, target, marked)
                    with torch.autocast("cpu", enabled=False):  # validation may run under autocast
                        updated.append(
                            metric.update(state, plain, target) if len(target) else state
                        )
                except Exception as error:
                    raise ParameterError(
                        f"{_failed(metric, error)}. The output is {_shape(plain)}, the label "
                        f"{_shape(target)}."
                    ) from error
        return updated

    def _part(self, returned: Any, part: Part, count: int) -> Any:
        dimensions = self.dimensions if part == self.part else None
        return in_rows(part_of(returned, part), count, dimensions)

    def merge(self, many: Sequence[States]) -> States:
        """Merge the states of several parts of the data, in order, into those of all of it."""
        merged = self.start()
        for states in many:
            if not states[0]:
                continue
            merged[0] += states[0]
            merged[1] = (merged[1][0] + states[1][0], merged[1][1] + states[1][1])
            for i, metric in enumerate(self.metrics, start=2):
                try:
                    merged[i] = metric.merge(merged[i], states[i])
                except Exception as error:
                    raise ParameterError(f"{_failed(metric, error)}.") from error
        return merged

    def is_empty(self, states: States) -> bool:
        """Return whether no sample was seen."""
        return not states[0]

    def values(self, states: States) -> dict[str, Any]:
        """Return the values by name, "loss" first if there is one: numbers, and curves and matrices
        as lists and dictionaries. Metrics that saw no sample are omitted.
        """
        values: dict[str, Any] = {}
        total, mass = states[1]
        if mass:
            values["loss"] = total / mass
        for metric, state in zip(self.metrics, states[2:], strict=True):
            if states[0] and not metric.is_empty(state):
                try:
                    values[metric.name] = _plain_value(metric.value(state))
                except ParameterError:
                    raise
                except Exception as error:
                    raise ParameterError(f"{_failed(metric, error)}.") from error
        return values

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """Return whether more is better, by name, for the values that are one number."""
        loss = {} if self.loss is None else {"loss": False}
        own = {metric.name: metric.higher_is_better for metric in self.metrics if metric.scalar}
        return loss | own

    def check(self, output: Any, targets: Sequence[torch.Tensor]) -> None:
        """Try every metric on a preview batch: update, merge and value.

        A value that cannot be computed from a few rows, such as a correlation of one row, is no
        mistake.
        """
        problems = []
        for metric in self.metrics:
            alone = replace(self, loss=None, metrics=(metric,), dimensions=None, loss_part=None)
            try:
                states = [alone.update(alone.start(), output, targets) for _ in range(2)]
                merged = alone.merge(states)
            except ParameterError as error:
                problems.append(str(error))
                continue
            try:
                value = alone.values(merged).get(metric.name, 0.0)
            except ParameterError as error:
                if error.__cause__ is None:
                    problems.append(str(error))
                continue
            if (numbers := str(value).count(",")) >= MOST_NUMBERS:
                problems.append(
                    f'metric "{metric.name}" gives about {numbers:,} numbers, too many for the history '
                    "to keep of each validation: use fewer thresholds or classes, or "
                    "trained.evaluate after the training."
                )
        raise_all(ParameterError, problems)

    def _plain(
        self, output: Any, targets: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and target on the CPU, for metrics."""
        names = ", ".join(metric.name for metric in self.metrics)
        if len(targets) != 1:
            raise ParameterError(
                f"metrics need one label; the model has {len(targets)} ({names}). "
                "sparkdl.MetricOf(metric, label=..., output=...) is of one of them."
            )
        if not isinstance(output, torch.Tensor):
            raise ParameterError(
                f"metrics need one tensor, but the model returns {described(output)} ({names}). "
                f"Say which part they should use: {for_example(output)}."
            )
        return _wide(output.detach().cpu()), targets[0].detach().cpu()


def known_of(
    metric: Metric, output: torch.Tensor, target: torch.Tensor, marked: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the target without what is missing in the target: NaN, and -100 if whole
    numbers are ``marked``."""
    missing = target.isnan() if target.is_floating_point() else (target == IGNORED) & marked
    if not missing.any():
        return output, target
    if target.numel() == len(target):
        rows = ~missing.reshape(-1)
        return output[rows], target[rows]
    own = metric.metric if isinstance(metric, MetricOf) else metric
    if output.shape == target.shape and isinstance(own, MeanMetric):
        return output[~missing], target[~missing]
    if output.ndim == target.ndim + 1:  # a class for each element
        return output.movedim(1, -1)[~missing], target[~missing]
    raise ValueError(
        "labels are missing, and it is no mean over single values: measure each task by itself, with "
        'sparkdl.MetricOf(metric, label="label[0]", output=function)'
    )


def _plain_value(value: Any) -> Any:
    """Return a metric's value as a float, or as plain lists and dictionaries."""
    if isinstance(value, Mapping):
        return {str(name): _plain_value(part) for name, part in value.items()}
    many = isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", False))
    return np.asarray(value).tolist() if many else float(value)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half precision, which a model returns under autocast, to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _mean(
    loss: Loss,
    output: Any,
    targets: Sequence[torch.Tensor],
    weights: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, float]:
    """Return the mean loss of a batch, and its weight in the total."""
    masses = masses_of(loss, targets)
    mean, taken = loss_of(loss, output, targets, weights, masses)
    if taken is not None:
        return mean / (taken or 1.0), taken
    if weights is None:
        if isinstance(mean, torch.Tensor) and mean.numel() != 1:  # one value for each sample
            mean, _ = loss_of(loss, output, targets, torch.ones(count), masses)
        return mean, count if masses is None else float(masses.sum())
    own = weights.double().cpu()
    return mean, float(own.sum() if masses is None else own @ masses)


def _rows(output: Any, targets: Sequence[torch.Tensor]) -> int:
    """Return the number of samples of a batch."""
    first = targets[0] if targets else output
    while isinstance(first, (tuple, list, Mapping)):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return len(first)


def _failed(metric: Metric, error: Exception) -> str:
    reason = str(error).strip().rstrip(".")
    if not isinstance(error, ValueError) or not reason:  # not a message for the user
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return f'metric "{metric.name}" failed: {reason}'


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def in_rows(output: Any, rows: int, dimensions: int | None = None) -> Any:
    """Return ``output`` with a dimension for rows, if a model or function has squeezed that of a
    single row.
    """
    if rows != 1 or not isinstance(output, torch.Tensor):
        return output
    alone = output.ndim == 0 or output.ndim + 1 == dimensions
    return output.unsqueeze(0) if alone else output

"""Metrics by name: the meaning of strings, pairs, dicts and torchmetrics in ``metrics``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import nn

from sparkdl.errors import ParameterError, kind_of, nearest, shown
from sparkdl.metrics.base import MeanMetric, Metric, TorchMetric, is_torchmetric
from sparkdl.metrics.ranking import AUC, hit_ratio, ndcg, top_k
from sparkdl.model.loss import ClassLoss, unwrapped

__all__ = ["METRICS", "MeanMetric", "Metric", "Metrics", "resolve"]

Metrics: TypeAlias = Iterable[Any] | Mapping[str, Any]
"""The type of the argument of :func:`resolve`."""


def _accuracy(
    output: torch.Tensor,
    target: torch.Tensor,
    threshold: float = 0.0,
    classes: bool = False,
    ignored: int | None = None,
) -> torch.Tensor:
    """Return whether each prediction is right.

    Classes are the argmax over dimension 1. One output for each sample is a logit, positive for
    class 1. See :class:`Judging` for the other parameters.
    """
    if output.ndim <= 2:
        output, target = _without_ones(output, target)
    if classes and output.ndim > 1 and output.shape == target.shape:
        return output.argmax(dim=1) == target.argmax(dim=1)
    if output.ndim == target.ndim + 1:
        output = output.argmax(dim=1)
        right = output == _same_shape(output, target)
        return right if ignored is None else right[target != ignored]
    return (output > threshold) == (_same_shape(output, target) > 0.5)


def _absolute_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _difference(output, target).abs()


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _difference(output, target).square()


def _difference(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the difference in float64: booleans have none, and that of small integers wraps
    around."""
    output, target = _without_ones(output, target)
    target = _same_shape(output, target)
    return output - target if output.is_complex() else output.double() - target.double()


def _without_ones(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape (B, 1) to (B,), in either: torch would broadcast (B, 1) and (B,) to (B, B)."""
    pair = [
        one.reshape(-1) if one.ndim == 2 and one.shape[1] == 1 else one for one in (output, target)
    ]
    return pair[0], pair[1]


def _same_shape(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return ``target``, or raise ValueError if its shape is not that of ``output``."""
    if output.shape != target.shape:
        raise ValueError("the label must have one value for each value of the output")
    return target


def _mean_at(name: str, function: Callable[..., torch.Tensor], k: int) -> MeanMetric:
    """Return the mean of ``function``, which looks at the best ``k`` of each sample."""
    return MeanMetric(name, partial(function, k=k))


METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": partial(MeanMetric, "accuracy", _accuracy),
    "top1": partial(MeanMetric, "top1", _accuracy),
    "top5": partial(_mean_at, "top5", top_k, 5),
    "top@k": partial(_mean_at, function=top_k),
    "mae": partial(MeanMetric, "mae", _absolute_error, higher_is_better=False),
    "mse": partial(MeanMetric, "mse", _squared_error, higher_is_better=False),
    "auc": AUC,
    "hit_ratio": partial(_mean_at, "hit_ratio", hit_ratio, 10),
    "hit_ratio@k": partial(_mean_at, function=hit_ratio),
    "ndcg": partial(_mean_at, "ndcg", ndcg, 10),
    "ndcg@k": partial(_mean_at, function=ndcg),
}
"""The metrics that have a name: a function that makes the metric. A name that ends in ``@k`` stands
for every number in place of the ``k``; its function takes the whole ``name`` and ``k``."""


def resolve(metrics: Metrics) -> list[Metric]:
    """Return the metrics that ``metrics`` stands for, in order.

    Each is a name (see docs/guide/metrics.md), a :class:`Metric`, a ``torchmetrics.Metric``, or a
    pair (name, one of these). A dict {name: one of these} stands for such pairs. "loss" is skipped,
    because it is always computed.
    """
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise ParameterError(
            f"metrics={shown(metrics)}: give a list, such as metrics=[{shown(metrics)}]."
        )
    given = list(metrics.items()) if isinstance(metrics, Mapping) else list(metrics)
    resolved: dict[str, Metric] = {}
    for one in given:
        if isinstance(one, Mapping):
            metric_list = [_named(name, metric) for name, metric in one.items()]
        elif isinstance(one, str) and one == "loss":
            continue
        else:
            metric_list = [_metric(one)]
        for metric in metric_list:
            if resolved.get(metric.name, metric) != metric or metric.name == "loss":
                raise ParameterError(
                    f'two metrics are called "{metric.name}": give one of them another name, as in '
                    f'metrics=[("my_{metric.name}", metric), ...].'
                )
            resolved[metric.name] = metric
    return list(resolved.values())


@dataclass(frozen=True, kw_only=True)
class Judging:
    """The interpretation of output and label by an accuracy: that of the loss. A saved model,
    which has no loss, stores this.
    """

    threshold: float = 0.0  # an output above it means class 1
    classes: bool = False  # a label with the output's shape is a probability of each class
    ignored: int | None = None

    @staticmethod
    def of(loss: Any) -> Judging:
        """Return the interpretation of a loss.

        BCELoss takes a probability; CrossEntropyLoss and NLLLoss take classes and may ignore one.
        """
        function, _ = unwrapped(loss)
        if isinstance(function, nn.BCELoss) or function is nn.functional.binary_cross_entropy:
            return Judging(threshold=0.5)
        of_classes = ClassLoss.of(loss)
        return (
            Judging() if of_classes is None else Judging(classes=True, ignored=of_classes.ignored)
        )


def suited(
    metrics: Iterable[Metric], loss: Any, judging: Judging | None = None
) -> tuple[Metric, ...]:
    """Return ``metrics`` with the accuracies among them set to interpret output and label as
    ``loss`` does.

    Without a loss, ``judging`` says how.
    """
    judging = judging or Judging()
    how = vars(judging if loss is None else Judging.of(loss))
    return tuple(
        replace(one, function=partial(_accuracy, **how))
        if how != vars(Judging()) and isinstance(one, MeanMetric) and one.function is _accuracy
        else one
        for one in metrics
    )


def _metric(one: Any) -> Metric:
    if isinstance(one, Metric):
        if not isinstance(getattr(one, "name", None), str):
            raise ParameterError(f"{kind_of(one)} has no name: set its attribute name.")
        return one
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
        return _named(*one)
    if is_torchmetric(one):
        return TorchMetric.of(type(one).__name__, one)
    if isinstance(one, str):
        return _of_name(one)
    raise ParameterError(
        f"unknown metric {shown(one)} ({type(one).__name__}). Give a name, a sparkdl.Metric, a "
        "torchmetrics.Metric, or a pair (name, metric)."
    )


def _named(name: str, one: Any) -> Metric:
    """Return ``one`` under another name."""
    if is_torchmetric(one):
        return TorchMetric.of(name, one)
    metric = copy.copy(_metric(one))
    object.__setattr__(metric, "name", name)
    return metric


@cache  # so that a name that is given twice is the same object
def _of_name(name: str) -> Metric:
    if name in METRICS and not name.endswith("@k"):
        return METRICS[name]()
    stem, _, k = name.partition("@")
    if f"{stem}@k" in METRICS and k.isdecimal():
        if int(k) < 1:
            raise ParameterError(f'metric "{name}": k must be at least 1.')
        return METRICS[f"{stem}@k"](name=name, k=int(k))
    known = ["loss", *METRICS]
    raise ParameterError(
        f'unknown metric "{name}".{nearest(name, known)} Known: {", ".join(known)}, or a '
        "sparkdl.Metric or torchmetrics.Metric."
    )

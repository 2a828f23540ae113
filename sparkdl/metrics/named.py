"""Metrics by name: the meaning of strings, pairs, dicts and torchmetrics in ``metrics``.

Also those of numbers (MAE, MSE, R2), and of a ranking (top-k, hit ratio and NDCG). Equal scores have
no order, and no order is invented for them: NDCG and the hit ratio are the mean over all orders of
the tied candidates. So a model that gives every candidate the same score performs like chance,
wherever the relevant candidate stands. (Top-k takes the first of equal classes, as argmax does, so
that top-1 is accuracy.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from sparkdl.errors import ParameterError, kind_of, nearest, shown
from sparkdl.metrics.base import Folded, MeanMetric, Metric, TorchMetric, is_torchmetric
from sparkdl.metrics.classes import (
    AS_LOGITS,
    AVERAGES,
    EPSILON,
    CalibrationCurve,
    CalibrationError,
    ClassRatio,
    ConfusionMatrix,
    Judged,
    Judging,
    accuracy,
    log_loss,
    same_shape,
    without_ones,
)
from sparkdl.metrics.scores import SCORES

_MOST_RESIDUALS = 500


@dataclass(frozen=True)
class Regression(Folded):
    """A metric of numbers, for each column of the output, whose mean over the columns is the value.

    The state is, for each column, the number of labels, their mean, the sum of their squared
    distances from it, and that of the squared errors: T. F. Chan, G. H. Golub and R. J. LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    figure: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    higher_is_better: bool = True
    unlike = "all rows must have the same number of values; mse and mae need not that"

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
        errors = _difference(output, target).reshape(len(output), -1)
        labels = target.double().reshape(errors.shape)
        if not len(labels):
            return None
        mean = labels.mean(0)
        spread = (labels - mean).square().sum(0)
        count = torch.full_like(mean, len(labels))
        return torch.stack([count, mean, spread, errors.square().sum(0)])

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self.check_alike(one, other)
        count, apart = one[0] + other[0], other[1] - one[1]
        mean = one[1] + apart * other[0] / count
        spread = one[2] + other[2] + apart.square() * one[0] * other[0] / count
        return torch.stack([count, mean, spread, one[3] + other[3]])

    def value(self, state: torch.Tensor) -> float:
        count, _, spread, errors = state
        return float(self.figure(count, spread, errors).mean())


def _r2(count: torch.Tensor, spread: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of determination; where labels are all alike, 1 without an error and 0
    with one, as in scikit-learn."""
    alike = torch.where(errors > 0, 0.0, 1.0)
    shares = torch.where(spread > 0, 1 - errors / spread.clamp(min=1e-300), alike.double())
    return torch.where(count > 1, shares, torch.nan)


def _root_mean(count: torch.Tensor, spread: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    return (errors / count).sqrt()


@dataclass(frozen=True)
class Residuals(Folded):
    """Predictions and what is left of the labels, of up to 500 elements that a hash of both chooses."""

    name: str = "residuals"
    scalar = False

    def batch(self, output: torch.Tensor, target: torch.Tensor) -> np.ndarray | None:
        errors = _difference(output, target).flatten()
        if not len(errors):
            return None
        if errors.is_complex():
            raise ValueError("residuals are of real numbers")
        return self.join(np.stack([output.double().flatten().numpy(), -errors.numpy()]))

    def join(self, *parts: np.ndarray) -> np.ndarray:
        pairs = np.concatenate(parts, axis=1)
        bits = pairs.view(np.uint64) * np.array(
            [[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F]], np.uint64
        )
        mixed = (bits[0] ^ (bits[1] >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        order = np.lexsort((pairs[1], pairs[0], mixed >> np.uint64(32)))
        return pairs[:, order[:_MOST_RESIDUALS]]

    def value(self, state: np.ndarray) -> dict[str, list[float]]:
        return {"prediction": state[0].tolist(), "residual": state[1].tolist()}


def top_k(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """Return whether the class ``target`` is among the ``k`` highest scores. Shape (B,), bool.

    ``output`` is (B, C), ``target`` (B,) or (B, 1). Among equal scores the first class ranks first.
    """
    if output.ndim != 2 or target.numel() != len(output):
        raise ValueError(
            f"top-{k} needs a score for each class, (B, C), and one class for each sample, (B,)"
        )
    if k > output.shape[1]:
        raise ValueError(
            f"top-{k} of {output.shape[1]} classes: k is larger than the number of classes"
        )
    first = output.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return (first == target.reshape(-1, 1)).any(dim=1)


def hit_ratio(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """Return whether a relevant candidate is among the ``k`` highest scores. Shape (B,), float64.

    A sample is one query with its C candidates: X. He et al., "Neural Collaborative Filtering", WWW
    2017, section 4.1. With ties at the k-th place the value is the probability of a hit if the tied
    candidates are in random order. It is nan for a row with a nan score. ``target`` is the number
    of the one relevant candidate, (B,), or the relevance of each, (B, C), where more than 0 is
    relevant.
    """
    scores, worth = _candidates(output, target, f"hit_ratio@{k}")
    if k > scores.shape[1]:
        raise ValueError(
            f"hit_ratio@{k} of {scores.shape[1]} candidates: k is larger than the number of "
            "candidates"
        )
    relevant = worth > 0
    bar = scores.sort(dim=1, descending=True).values[:, k - 1 : k]
    above, tied = scores > bar, scores == bar
    free = k - above.sum(dim=1)
    others, all_tied = (tied & ~relevant).sum(dim=1), tied.sum(dim=1)
    miss = torch.exp(_log_choices(others, free) - _log_choices(all_tied, free))
    hit = torch.where((above & relevant).any(dim=1), 1.0, 1 - miss)
    return torch.where(scores.isnan().any(dim=1), torch.nan, hit)


def _log_choices(n: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the number of ways to choose k of n; -inf if k > n. float64."""
    n, k = n.double(), k.double()
    left = (n - k).clamp(min=0)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(left + 1)
    return torch.where(k > n, -torch.inf, ways)


def ndcg(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """Return the normalized discounted cumulative gain of the ``k`` highest scores. Shape (B,),
    float64.

    K. Jarvelin and J. Kekalainen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 20,
    2002, with the discount 1 / log2(1 + rank) and the relevance itself as gain. Tied candidates
    share the mean of their discounts (F. McSherry and M. Najork, ECIR 2008). The result is that of
    scikit-learn's ``ndcg_score(..., k=k)``. A row without a relevant candidate counts 0; a row with
    a nan score is nan. ``target`` is as for :func:`hit_ratio`.
    """
    scores, worth = _candidates(output, target, f"ndcg@{k}")
    if (worth < 0).any():
        raise ValueError(f"ndcg@{k} needs relevances of 0 or more, but found {worth.min():g}")
    discount = 1 / torch.log2(torch.arange(scores.shape[1], dtype=torch.float64) + 2)
    discount[k:] = 0
    ranked, order = scores.sort(dim=1, descending=True)
    tie = torch.zeros_like(order)
    tie[:, 1:] = (ranked[:, 1:] != ranked[:, :-1]).long().cumsum(dim=1)
    zeros = torch.zeros_like(scores)
    size = zeros.scatter_add(1, tie, torch.ones_like(scores))
    shared = zeros.scatter_add(1, tie, discount.expand_as(scores)) / size.clamp(min=1)
    gain = (worth.gather(1, order) * shared.gather(1, tie)).sum(dim=1)
    best = (worth.sort(dim=1, descending=True).values * discount).sum(dim=1)
    found = torch.where(best > 0, gain / torch.where(best > 0, best, 1), 0)
    return torch.where(scores.isnan().any(dim=1), torch.nan, found)


def _candidates(
    output: torch.Tensor, target: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and the relevance of each candidate, both (B, C) in float64."""
    if output.ndim != 2 or output.shape[1] < 2:
        raise ValueError(f"{name} needs a score for each of two or more candidates, (B, C)")
    scores = output.double()
    if target.shape == output.shape:
        return scores, target.double()
    if target.numel() != len(output):
        raise ValueError(
            f"{name} needs the number of the relevant candidate, (B,), or a relevance for each of "
            "them, (B, C)"
        )
    number = target.reshape(-1, 1).long()
    if (number != target.reshape(-1, 1)).any() or (
        len(number) and not 0 <= int(number.min()) <= int(number.max()) < output.shape[1]
    ):
        raise ValueError(
            f"{name} needs numbers of candidates from 0 to {output.shape[1] - 1} as the label"
        )
    return scores, torch.zeros_like(scores).scatter_(1, number, 1.0)


__all__ = ["METRICS", "MeanMetric", "Metric", "Metrics", "resolve"]

Metrics: TypeAlias = Iterable[Any] | Mapping[str, Any]
"""The type of the argument of :func:`resolve`."""


def _absolute_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _difference(output, target).abs()


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _difference(output, target).square()


def _relative_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the absolute errors as shares of the labels, which count as at least 2.2e-16."""
    return _absolute_error(output, target) / without_ones(output, target)[1].double().abs().clamp(
        min=EPSILON
    )


def _difference(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the difference in float64: booleans have none, and that of small integers wraps
    around."""
    output, target = without_ones(output, target)
    target = same_shape(output, target)
    return output - target if output.is_complex() else output.double() - target.double()


def _mean_at(name: str, function: Callable[..., torch.Tensor], k: int) -> MeanMetric:
    """Return the mean of ``function``, which looks at the best ``k`` of each sample."""
    if k < 1:
        raise ParameterError(f'metric "{name}": k must be at least 1.')
    return MeanMetric(name, partial(function, k=k))


def _of_class(name: str, kind: str, k: int) -> ClassRatio:
    """Return a metric of the class ``k``, counted from 0."""
    return ClassRatio(name, kind=kind, number=k)


_RATIOS = ("f1", "precision", "recall")


METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": partial(MeanMetric, "accuracy", accuracy),
    "top1": partial(MeanMetric, "top1", accuracy),
    "top5": partial(_mean_at, "top5", top_k, 5),
    "top@k": partial(_mean_at, function=top_k),
    "mae": partial(MeanMetric, "mae", _absolute_error, higher_is_better=False),
    "mse": partial(MeanMetric, "mse", _squared_error, higher_is_better=False),
    "rmse": partial(Regression, "rmse", _root_mean, higher_is_better=False),
    "mape": partial(MeanMetric, "mape", _relative_error, higher_is_better=False),
    "r2": partial(Regression, "r2", _r2),
    "residuals": Residuals,
    **SCORES,
    **{name: partial(ClassRatio, name, kind=name) for name in _RATIOS},
    **{
        f"{name}_{average}": partial(ClassRatio, f"{name}_{average}", kind=name, average=average)
        for name in _RATIOS
        for average in AVERAGES
    },
    **{f"{name}_class@k": partial(_of_class, kind=name) for name in _RATIOS},
    "log_loss": partial(MeanMetric, "log_loss", log_loss, higher_is_better=False),
    "calibration_error": partial(CalibrationError, "calibration_error"),
    "calibration_curve": partial(CalibrationCurve, "calibration_curve"),
    "confusion_matrix": partial(ConfusionMatrix, "confusion_matrix"),
    "hit_ratio": partial(_mean_at, "hit_ratio", hit_ratio, 10),
    "hit_ratio@k": partial(_mean_at, function=hit_ratio),
    "ndcg": partial(_mean_at, "ndcg", ndcg, 10),
    "ndcg@k": partial(_mean_at, function=ndcg),
}
"""The metrics that have a name: a function that makes the metric. A name that ends in ``@k`` stands
for every number in place of the ``k``; its function takes the whole ``name`` and ``k``."""


def scalar_names(metrics: Metrics) -> list[str]:
    """Return the names of what validations compare: the loss, and the metrics that are one number."""
    return ["loss", *(metric.name for metric in resolve(metrics) if metric.scalar)]


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


def suited(
    metrics: Iterable[Metric], loss: Any, judging: Judging | None = None
) -> tuple[Metric, ...]:
    """Return ``metrics`` with those of classes among them set to interpret output and label as
    ``loss`` does.

    Without a loss, ``judging`` says how.
    """
    how = (judging or AS_LOGITS) if loss is None else Judging.of(loss)
    return tuple(_judged(one, how) for one in metrics) if how != AS_LOGITS else tuple(metrics)


def _judged(one: Metric, how: Judging) -> Metric:
    if isinstance(one, MeanMetric) and one.function in (accuracy, log_loss):
        return replace(one, function=partial(one.function, judging=how))
    if isinstance(one, Judged):
        return replace(one, judging=how)
    return one


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
        return METRICS[f"{stem}@k"](name=name, k=int(k))
    known = ["loss", *METRICS]
    raise ParameterError(
        f'unknown metric "{name}".{nearest(name, known)} Known: {", ".join(known)}, or a '
        "sparkdl.Metric or torchmetrics.Metric."
    )

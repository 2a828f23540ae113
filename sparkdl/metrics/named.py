"""Metrics by name: the meaning of strings, pairs, dicts and torchmetrics in ``metrics``.

Ranking metrics: the area under the ROC curve, top-k, hit ratio and NDCG. NumPy and torch only.

Equal scores have no order, and no order is invented for them: AUC counts a tied pair as half; NDCG
and the hit ratio are the mean over all orders of the tied candidates. So a model that gives every
candidate the same score performs like chance, wherever the relevant candidate stands. (Top-k takes
the first of equal classes, as argmax does, so that top-1 is accuracy.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from sparkdl.errors import ParameterError, kind_of, nearest, shown
from sparkdl.metrics.base import MeanMetric, Metric, TorchMetric, is_torchmetric
from sparkdl.model.loss import ClassLoss, unmasked, unwrapped


class ScoreRun(NamedTuple):
    """The distinct scores of some samples, ascending, with the number of samples of each class at
    each score."""

    scores: np.ndarray
    """float64, shape (n,)."""
    positives: np.ndarray
    """int64, shape (n,)."""
    negatives: np.ndarray
    """int64, shape (n,)."""


@dataclass(frozen=True)
class AUC(Metric):
    """The area under the receiver operating characteristic of binary labels, exact.

    It is the probability that a positive sample scores higher than a negative one, with ties
    counted as half: T. Fawcett, "An introduction to ROC analysis", Pattern Recognition Letters 27,
    2006, section 7. ``output`` is one score (for example a logit) for each sample, shape (B,) or
    (B, 1), or two scores, (B, 2), whose difference is used. ``target`` is 0 or 1, shape (B,) or (B,
    1). The value is nan if there is only one class, or if a score is nan.

    The state is a few :class:`ScoreRun`, each less than half as long as the one before it, so that
    n samples cost O(n log n) in total, however they are batched. A run contains each distinct score
    once.
    """

    name: str = "auc"
    higher_is_better: bool = True

    def start(self) -> tuple[ScoreRun, ...]:
        return ()

    def update(
        self, state: tuple[ScoreRun, ...], output: torch.Tensor, target: torch.Tensor
    ) -> tuple[ScoreRun, ...]:
        scores = _scores(output)
        if target.numel() != len(scores):
            raise ValueError("AUC needs one label for each sample")
        labels = target.reshape(-1).double().numpy()
        positive = labels == 1
        if not (positive | (labels == 0)).all():
            wrong = labels[~(positive | (labels == 0))][0]
            raise ValueError(f"AUC needs labels that are 0 or 1, but found {wrong:g}")
        return _settled([*state, _run(scores, positive.astype(np.int64))])

    def merge(self, one: tuple[ScoreRun, ...], other: tuple[ScoreRun, ...]) -> tuple[ScoreRun, ...]:
        return _settled([*one, *other])

    def value(self, state: tuple[ScoreRun, ...]) -> float:
        if not state:
            return float("nan")
        scores, positives, negatives = _join(list(state))
        pairs = float(positives.sum()) * float(negatives.sum())
        if not pairs or np.isnan(scores[-1]):
            return float("nan")
        below = np.cumsum(negatives) - negatives
        won = (positives.astype(np.float64) * (below + negatives / 2)).sum()
        return float(won / pairs)

    def is_empty(self, state: tuple[ScoreRun, ...]) -> bool:
        return not state


def _scores(output: torch.Tensor) -> np.ndarray:
    """Return one float64 score for each sample, shape (B,)."""
    if output.ndim == 2 and output.shape[1] == 2:
        output = output.double()
        return (output[:, 1] - output[:, 0]).numpy()
    if output.ndim == 1 or (output.ndim == 2 and output.shape[1] == 1):
        return output.reshape(-1).double().numpy()
    raise ValueError("AUC needs one score for each sample, or two, whose difference it takes")


def _run(scores: np.ndarray, positives: np.ndarray) -> ScoreRun:
    """Return the run of one batch; ``positives`` is 0 or 1 for each score."""
    return _sum_equal(scores, positives, 1 - positives)


def _join(runs: list[ScoreRun]) -> ScoreRun:
    return _sum_equal(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))


def _sum_equal(scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray) -> ScoreRun:
    unique, place = np.unique(scores, return_inverse=True)
    counts = []
    for count in (positives, negatives):
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, place.reshape(-1), count)
        counts.append(total)
    return ScoreRun(unique, *counts)


def _settled(runs: list[ScoreRun]) -> tuple[ScoreRun, ...]:
    """Join runs from the end until each is more than twice as long as the one after it."""
    settled: list[ScoreRun] = []
    for run in runs:
        while settled and len(settled[-1].scores) <= 2 * len(run.scores):
            run = _join([settled.pop(), run])
        settled.append(run)
    return tuple(settled)


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
        loss = unmasked(loss)
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

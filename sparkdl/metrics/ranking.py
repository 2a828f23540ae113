"""Ranking metrics: the area under the ROC curve, top-k, hit ratio and NDCG. NumPy and torch only.

Equal scores have no order, and no order is invented for them: AUC counts a tied pair as half; NDCG
and the hit ratio are the mean over all orders of the tied candidates. So a model that gives every
candidate the same score performs like chance, wherever the relevant candidate stands. (Top-k takes
the first of equal classes, as argmax does, so that top-1 is accuracy.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sparkdl.metrics.base import Metric


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

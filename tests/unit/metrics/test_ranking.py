"""AUC and NDCG against scikit-learn, top-k against argmax, the hit ratio against counting."""

from __future__ import annotations

import itertools
import math
import pickle
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import Lazily

from sparkdl.metrics.named import hit_ratio, ndcg, resolve, top_k
from sparkdl.metrics.scores import SCORES

sk = Lazily("sklearn.metrics")
COARSE = st.integers(-3, 3).map(float)
FINE = st.floats(-1e6, 1e6, width=32)


def auc(output: Any, target: Any) -> float:
    metric = SCORES["auc"]()
    return metric.value(
        metric.update(metric.start(), torch.as_tensor(output), torch.as_tensor(target))
    )


# AUC


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.one_of(COARSE, FINE), st.booleans()), min_size=2, max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
    st.lists(st.integers(0, 8), max_size=2),
)
def test_auc_is_scikit_learns_for_any_cut(
    samples: list[tuple[float, bool]], cuts: list[int], parts: list[int]
) -> None:
    scores = np.array([score for score, _ in samples], np.float32)
    labels = np.array([label for _, label in samples])
    if labels.all() or not labels.any():
        labels[0] = not labels[0]
    metric = SCORES["auc"]()
    edges = sorted({0, len(samples), *(cut for cut in cuts if cut < len(samples))})
    batches = list(itertools.pairwise(edges))
    bounds = sorted({0, len(batches), *(part for part in parts if part < len(batches))})
    states = []
    for first, last in itertools.pairwise(bounds):
        state = metric.start()
        for a, b in batches[first:last]:
            state = metric.update(
                state, torch.from_numpy(scores[a:b]), torch.from_numpy(labels[a:b])
            )
        states.append(pickle.loads(pickle.dumps(state)))
    merged = reduce(metric.merge, states, metric.start())
    assert metric.value(merged) == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-12)
    assert metric.value(merged) == auc(scores, labels)


def test_the_state_of_auc_stays_small() -> None:
    """Runs shrink by half, and equal scores are kept once."""
    metric, state = SCORES["auc"](), SCORES["auc"]().start()
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=5000).astype(np.float32), rng.integers(0, 2, 5000)
    for i in range(0, 5000, 7):
        state = metric.update(
            state, torch.from_numpy(scores[i : i + 7]), torch.from_numpy(labels[i : i + 7])
        )
    lengths = [len(run.scores) for run in state]
    assert all(a > 2 * b for a, b in itertools.pairwise(lengths))
    assert metric.value(state) == pytest.approx(sk.roc_auc_score(labels, scores), abs=1e-12)
    for _ in range(100):
        state = metric.update(state, torch.zeros(1000), torch.from_numpy(labels[:1000]))
    assert sum(len(run.scores) for run in state) <= 5000 + 2 * math.log2(5000)


def test_auc_of_each_form_of_output() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.5], [0.0, -3.0], [1.0, 1.5]])
    target = torch.tensor([1, 0, 1, 0])
    expected = sk.roc_auc_score(target, logits.softmax(dim=1)[:, 1])
    score = logits[:, 1] - logits[:, 0]
    assert auc(logits, target) == expected
    assert auc(score, target) == auc(score[:, None], target.float()[:, None]) == expected
    assert auc(score.bfloat16(), target.bool()) == expected


@pytest.mark.parametrize(
    ("output", "target"), [([0.1, 0.9], [1, 1]), ([0.1, math.nan], [0, 1]), ([], [])]
)
def test_auc_that_is_not_defined(output: list[float], target: list[int]) -> None:
    assert math.isnan(auc(output, target))


@pytest.mark.parametrize(
    ("shape", "target", "message"),
    [
        ((2, 3), [0, 1], "one score for each sample"),
        ((2,), [0, 1, 1], "one label for each sample"),
        ((2,), [-1, 1], "labels that are 0 or 1, but found -1"),
    ],
)
def test_what_auc_refuses(shape: tuple[int, ...], target: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auc(torch.zeros(shape), target)


# NDCG


@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(1, 4), st.integers(2, 12), st.integers(1, 15))
def test_ndcg_is_scikit_learns(data: st.DataObject, rows: int, candidates: int, k: int) -> None:
    """With ties, constant scores, rows without a relevant candidate, and k beyond the candidates."""
    row = st.lists(st.one_of(COARSE, FINE), min_size=candidates, max_size=candidates)
    worth = st.lists(st.integers(0, 4), min_size=candidates, max_size=candidates)
    scores = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    relevance = torch.tensor(data.draw(st.lists(worth, min_size=rows, max_size=rows)))
    found = ndcg(scores, relevance, k)
    expected = [
        sk.ndcg_score(relevance[i : i + 1].numpy(), scores[i : i + 1].numpy(), k=k)
        for i in range(rows)
    ]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_ndcg_of_one_relevant_candidate() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    number = torch.tensor([1.0, 2.0, 0.0])
    expected = sk.ndcg_score(np.eye(3)[[1, 2, 0]], scores.numpy(), k=2)
    for target in (number, number.long(), number[:, None]):
        assert float(ndcg(scores, target, 2).mean()) == pytest.approx(expected, abs=1e-12)
    assert ndcg(scores, number, 2).tolist()[:2] == pytest.approx([1 / math.log2(3), 0.0])


def test_a_score_that_is_nan_is_no_rank() -> None:
    scores = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    for function in (ndcg, hit_ratio):
        found = function(scores, torch.tensor([0, 1]), 1)
        assert math.isnan(found[0])
        assert found[1] == 1


# hit ratio


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(2, 6))
def test_hit_ratio_is_the_mean_over_all_orders_of_ties(data: st.DataObject, size: int) -> None:
    scores = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    worth = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    k = data.draw(st.integers(1, size))
    hits = []
    for shuffled in itertools.permutations(range(size)):
        ranked = sorted(shuffled, key=lambda i: -scores[i])  # stable: the shuffle orders ties
        hits.append(any(worth[i] for i in ranked[:k]))
    found = hit_ratio(torch.tensor([scores]).float(), torch.tensor([worth]), k)
    assert float(found) == pytest.approx(sum(hits) / len(hits), abs=1e-12)


@pytest.mark.parametrize("function", [hit_ratio, ndcg])
@pytest.mark.parametrize(
    ("shape", "target", "message"),
    [
        ((2, 1), [0, 0], "two or more candidates"),
        ((2,), [0, 0], "two or more candidates"),
        ((2, 3), [0, 3], "from 0 to 2"),
        ((2, 3), [0, -1], "from 0 to 2"),
        ((2, 3), [0.5, 1.0], "from 0 to 2"),
        ((2, 3), [[0, 1], [1, 0]], "or a relevance for each"),
    ],
)
def test_what_is_refused(function: Any, shape: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(shape), torch.tensor(target), 1)


def test_negative_relevance_and_a_k_beyond_the_candidates() -> None:
    with pytest.raises(ValueError, match="relevances of 0 or more, but found -1"):
        ndcg(torch.zeros(1, 2), torch.tensor([[-1, 1]]), 1)
    with pytest.raises(ValueError, match="hit_ratio@3 of 2 candidates"):
        hit_ratio(torch.zeros(1, 2), torch.tensor([0]), 3)


# top-k


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 1000))
def test_top_k(rows: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randint(0, 4, (rows, classes), generator=generator).float()
    target = torch.randint(0, classes, (rows,), generator=generator)
    assert top_k(output, target, 1).equal(output.argmax(dim=1) == target)
    assert top_k(output, target, classes).all()
    for k in range(1, classes + 1):
        expected = []
        for row, label in zip(output.tolist(), target.tolist(), strict=True):
            expected.append(label in sorted(range(classes), key=lambda i: -row[i])[:k])
        assert top_k(output, target[:, None].double(), k).tolist() == expected


def test_top_k_of_fewer_classes_and_other_shapes() -> None:
    with pytest.raises(
        ValueError, match=("top-5 of 3 classes: k is larger than the number of classes")
    ):
        top_k(torch.zeros(2, 3), torch.tensor([0, 1]), 5)
    with pytest.raises(ValueError, match="a score for each class"):
        top_k(torch.zeros(2), torch.tensor([0, 1]), 1)


# names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("top@2", 0.5),
        ("hit_ratio@2", 0.5),
        ("ndcg@2", 0.5 / math.log2(3)),
        ("ndcg", (1 / math.log2(3) + 1 / math.log2(5)) / 2),
    ],
)
def test_k_is_read_from_the_name(name: str, expected: float) -> None:
    (metric,) = resolve([name])
    output = torch.arange(12.0, 0, -1).expand(2, 12)
    state = metric.update(metric.start(), output, torch.tensor([1, 3]))
    assert metric.name == name
    assert metric.value(state) == pytest.approx(expected)


def test_the_default_k() -> None:
    output = torch.arange(12.0, 0, -1)[None]
    for name, k in (("hit_ratio", 10), ("ndcg", 10), ("top5", 5)):
        (metric,) = resolve([name])
        inside, outside = (
            metric.value(metric.update(metric.start(), output, torch.tensor([n])))
            for n in (k - 1, k)
        )
        assert inside > 0
        assert outside == 0

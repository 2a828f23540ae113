"""Metrics: sums over batches that add up to the mean over all samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import message_of
from torch import nn

from sparkdl.errors import ParameterError
from sparkdl.metrics.named import METRICS, MeanMetric, Metric, resolve, suited


def mean(name: str) -> MeanMetric:
    """The metric of this name, which is a mean."""
    (metric,) = resolve([name])
    assert isinstance(metric, MeanMetric)
    return metric


SOFT = torch.tensor([0.1, 0.4, 0.6, 0.9])
HARD = torch.tensor([0.0, 0.0, 1.0, 1.0])
LOGITS = torch.tensor([-1.0, 0.5, 3.0, 0.0])
TAGS = torch.tensor([[[1.0, 0.0, 5.0], [0.0, 1.0, 6.0]]])
"""The scores of two classes for each of three positions, as in tagging and segmentation."""
BCE = nn.functional.binary_cross_entropy
WEIGHTED_BCE = partial(partial(BCE, weight=torch.ones(1)), reduction="mean")
ACCURACIES: dict[str, tuple[Any, torch.Tensor, Any, tuple[float, float]]] = {
    "classes": (None, torch.tensor([[0.1, 0.9], [2.0, -1.0], [0.0, 1.0]]), [1, 0, 0], (2, 3)),
    "every element": (None, TAGS, [[0, 1, 0]], (2, 3)),
    "logits": (None, LOGITS, [0.0, 1.0, 0.0, 1.0], (2, 4)),
    "logits and whole numbers": (None, LOGITS, [0, 1, 0, 1], (2, 4)),
    "logits and booleans": (None, LOGITS, [False, True, False, True], (2, 4)),
    "probabilities": (nn.BCELoss(), SOFT, HARD, (4, 4)),
    "probabilities of a function": (BCE, SOFT, HARD, (4, 4)),
    "probabilities of a partial of a partial": (WEIGHTED_BCE, SOFT, HARD, (4, 4)),
    "probabilities in a column": (nn.BCELoss(), SOFT[:, None], HARD, (4, 4)),
    "positive logits": (nn.BCEWithLogitsLoss(), SOFT, HARD, (2, 4)),
    "labels that are probabilities of classes": (
        nn.CrossEntropyLoss(),
        torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]),
        [[0.0, 0.1, 0.9], [0.0, 1.0, 0.0]],
        (1, 2),
    ),
    "labels that the loss ignores": (nn.CrossEntropyLoss(), TAGS, [[0, -100, 0]], (1, 2)),
    "labels that it is told to ignore": (nn.NLLLoss(ignore_index=0), TAGS, [[0, 1, 0]], (1, 1)),
    "nothing but those": (nn.functional.cross_entropy, TAGS, [[-100] * 3], (0, 0)),
    "sequences of length one, whose labels are no column of ones": (
        nn.CrossEntropyLoss(),
        torch.tensor([[[1.0], [0.0]], [[1.0], [2.0]]]),
        [[0], [0]],
        (1, 2),
    ),
}


@pytest.mark.parametrize("row", ACCURACIES)
def test_accuracy_suits_the_loss(row: str) -> None:
    loss, output, target, expected = ACCURACIES[row]
    (metric,) = suited(resolve(["accuracy"]), loss)
    assert isinstance(metric, MeanMetric)
    assert metric.sums(output, torch.as_tensor(target)) == expected


def test_a_function_that_averages_is_refused() -> None:
    metric = MeanMetric("l1", nn.functional.l1_loss, False)
    with pytest.raises(ValueError, match=r'one value for each sample, as .* reduction="none"'):
        metric.sums(torch.ones(3), torch.zeros(3))
    each = MeanMetric("l1", partial(nn.functional.l1_loss, reduction="none"), False)
    assert each.sums(torch.ones(3), torch.zeros(3)) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.tensor([1, 0, 0], dtype=torch.uint8), torch.tensor([0, 1, 0], dtype=torch.uint8)),
        (torch.tensor([100, 2], dtype=torch.int8), torch.tensor([-100, 2], dtype=torch.int8)),
        (torch.tensor([0.25, 0.5]), torch.tensor([True, False])),
        (torch.tensor([2.0**24]), torch.tensor([2**24 + 3])),
        (torch.tensor([1e20]), torch.tensor([0.0])),
    ],
)
def test_errors_of_any_numbers(output: torch.Tensor, target: torch.Tensor) -> None:
    """The difference of these in their own types wraps, is rounded, or is none."""
    one, other = (np.asarray(tensor, np.float64) for tensor in (output, target))
    sums, count = {"mae": np.abs(one - other), "mse": (one - other) ** 2}, float(len(one))
    for name, values in sums.items():
        assert mean(name).sums(output, target) == (values.sum(), count)


def test_residuals_are_those_of_500_samples_in_whatever_batches() -> None:
    output, target = torch.linspace(-1, 1, 2000), torch.linspace(-2, 2, 2000).square()
    (metric,) = resolve(["residuals"])
    parts = metric.update(metric.start(), output[:0], target[:0])
    assert metric.is_empty(parts)
    for chunk in torch.arange(2000).split(7)[::-1]:
        parts = metric.merge(metric.start(), metric.update(parts, output[chunk], target[chunk]))
    found = metric.value(parts)
    assert found == metric.value(metric.update(metric.start(), output, target))
    pairs = {(p, t - p) for p, t in zip(output.tolist(), target.tolist(), strict=True)}
    chosen = set(zip(*found.values(), strict=True))
    assert len(chosen) == 500
    assert chosen < pairs
    assert 200 < sum(p > 0 for p, _ in chosen) < 300


def test_sums_are_in_double_precision() -> None:
    values = torch.full((10_000,), 1e4 + 0.5)
    total, count = MeanMetric("mean", lambda output, target: output).sums(values, values)
    assert (total, count) == (10_000 * (1e4 + 0.5), 10_000)


def test_names_and_metrics_are_resolved_in_order() -> None:
    """Each counts once, and the loss comes anyway."""
    own = MeanMetric("own", lambda output, target: output)
    names = ["mse", own, "loss", "accuracy", "mse", own, "auc"]
    found = resolve(names)
    assert found[:3] == [mean("mse"), own, mean("accuracy")]
    assert [metric.name for metric in found[3:]] == ["auc"]
    ways = [metric.higher_is_better for metric in resolve(["accuracy", "mae", "mse", "auc"])]
    assert ways == [True, False, False, True]


def test_a_metric_has_the_name_it_is_known_by() -> None:
    names = [name.replace("@k", "@3") for name in METRICS]
    assert [metric.name for metric in resolve(names)] == names


@pytest.mark.parametrize(
    ("name", "hint"), [("acuracy", ' Did you mean "accuracy"?'), ("xyzzy", "")]
)
def test_an_unknown_name(name: str, hint: str) -> None:
    assert message_of(ParameterError, resolve, ["mse", name]) == (
        f'unknown metric "{name}".{hint} Known: {", ".join(["loss", *METRICS])}, or a '
        "sparkdl.Metric or torchmetrics.Metric."
    )


@pytest.mark.parametrize("name", ["accuracy", "mae", "mse"])
def test_a_column_of_ones_is_no_matrix(name: str) -> None:
    """(B, 1) against (B,), in any combination: torch would make (B, B) of it."""
    output, target = torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0])
    expected = mean(name).sums(output, target)
    assert expected[1] == 3
    assert mean(name).sums(output[:, None], target) == expected
    assert mean(name).sums(output, target[:, None]) == expected
    assert mean(name).sums(output[:, None], target[:, None]) == expected


@pytest.mark.parametrize("name", ["accuracy", "mae", "mse"])
@pytest.mark.parametrize("shapes", [((4, 3), (4, 2)), ((4, 3, 2), (4, 3)), ((4,), (3,))])
def test_shapes_that_do_not_go_together(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="one value for each value of the output"):
        mean(name).sums(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


class Largest(Metric):
    """The state is anything; here the largest error so far."""

    name = "largest"
    higher_is_better = False

    def start(self) -> float:
        return 0.0

    def update(self, state: float, output: torch.Tensor, target: torch.Tensor) -> float:
        return max(state, float((output - target).abs().max()))

    def merge(self, one: float, other: float) -> float:
        return max(one, other)

    def value(self, state: float) -> float:
        return state


def test_pairs_and_dicts_give_names() -> None:
    mean = MeanMetric("mean", lambda output, target: output)
    largest = Largest()
    found = resolve([("mine", mean), {"top": "top@3", "worst": largest}, "auc", largest])
    assert [metric.name for metric in found] == ["mine", "top", "worst", "auc", "largest"]
    assert (mean.name, largest.name) == ("mean", "largest")
    assert [metric.name for metric in resolve({"a": mean, "b": "mae"})] == ["a", "b"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["mae", MeanMetric("mae", lambda output, target: output)], 'two metrics are called "mae"'),
        ([("loss", "mae")], 'two metrics are called "loss"'),
        (["ndcg@0"], 'metric "ndcg@0": k must be at least 1'),
        ("mae", "give a list"),
        ([3], "unknown metric 3"),
    ],
)
def test_what_is_no_metric(metrics: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        resolve(metrics)

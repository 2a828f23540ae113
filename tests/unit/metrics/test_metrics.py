"""Metrics: sums over batches that add up to the mean over all samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of
from torch import nn

from sparkdl.errors import ParameterError
from sparkdl.metrics.named import METRICS, MeanMetric, Metric, resolve, suited


def mean(name: str) -> MeanMetric:
    """The metric of this name, which is a mean."""
    (metric,) = resolve([name])
    assert isinstance(metric, MeanMetric)
    return metric


def test_accuracy_of_classes() -> None:
    output = torch.tensor([[0.1, 0.9], [2.0, -1.0], [0.0, 1.0]])
    assert mean("accuracy").sums(output, torch.tensor([1, 0, 0])) == (2.0, 3.0)


def test_accuracy_of_every_element() -> None:
    """A class for each position, as in tagging and segmentation: (B, classes, L) against (B, L)."""
    output = torch.tensor([[[1.0, 0.0, 5.0], [0.0, 1.0, 6.0]]])
    assert mean("accuracy").sums(output, torch.tensor([[0, 1, 0]])) == (2.0, 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_accuracy_of_logits(dtype: torch.dtype) -> None:
    output = torch.tensor([-1.0, 0.5, 3.0, 0.0])
    target = torch.tensor([0, 1, 0, 1]).to(dtype)
    assert mean("accuracy").sums(output, target) == (2.0, 4.0)


def accuracy(loss: Any, output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """As with a model that was trained with ``loss``."""
    (metric,) = suited(resolve(["accuracy"]), loss)
    assert isinstance(metric, MeanMetric)
    return metric.sums(output, target)


def test_accuracy_of_probabilities() -> None:
    output, target = torch.tensor([0.1, 0.4, 0.6, 0.9]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    of_probabilities = nn.functional.binary_cross_entropy
    weighted = partial(partial(of_probabilities, weight=torch.ones(1)), reduction="mean")
    for loss in (nn.BCELoss(), of_probabilities, weighted):
        assert accuracy(loss, output, target) == (4.0, 4.0)
    assert accuracy(nn.BCEWithLogitsLoss(), output, target) == (2.0, 4.0)  # all logits are positive
    assert accuracy(nn.BCELoss(), output[:, None], target) == (4.0, 4.0)


def test_accuracy_of_labels_that_are_probabilities_of_classes() -> None:
    output = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    target = torch.tensor([[0.0, 0.1, 0.9], [0.0, 1.0, 0.0]])
    assert accuracy(nn.CrossEntropyLoss(), output, target) == (1.0, 2.0)


def test_accuracy_without_what_the_loss_ignores() -> None:
    output = torch.tensor([[[1.0, 0.0, 5.0], [0.0, 1.0, 6.0]]])
    assert accuracy(nn.CrossEntropyLoss(), output, torch.tensor([[0, -100, 0]])) == (1.0, 2.0)
    loss = nn.NLLLoss(ignore_index=0)
    assert accuracy(loss, output, torch.tensor([[0, 1, 0]])) == (1.0, 1.0)
    assert accuracy(nn.functional.cross_entropy, output, torch.tensor([[-100] * 3])) == (0.0, 0.0)


def test_accuracy_of_sequences_of_length_one() -> None:
    """As the last batch of a table may have them; a label (B, 1) is no column of ones then."""
    output = torch.tensor([[[1.0], [0.0]], [[1.0], [2.0]]])
    assert accuracy(nn.CrossEntropyLoss(), output, torch.tensor([[0], [0]])) == (1.0, 2.0)


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


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50), st.integers(1, 10))
def test_batches_add_up(values: list[float], size: int) -> None:
    output, target = torch.tensor(values), torch.zeros(len(values))
    for metric in map(mean, ("accuracy", "top1", "mae", "mse")):
        whole = metric.sums(output, target)
        parts = [
            metric.sums(output[i : i + size], target[i : i + size])
            for i in range(0, len(values), size)
        ]
        assert sum(count for _, count in parts) == whole[1] == len(values)
        assert sum(total for total, _ in parts) == pytest.approx(whole[0])


def test_sums_are_in_double_precision() -> None:
    values = torch.full((10_000,), 1e4 + 0.5)
    total, count = MeanMetric("mean", lambda output, target: output).sums(values, values)
    assert (total, count) == (10_000 * (1e4 + 0.5), 10_000)


def test_names_and_metrics_are_resolved_in_order() -> None:
    own = MeanMetric("own", lambda output, target: output)
    assert resolve(["mse", own, "accuracy"]) == [mean("mse"), own, mean("accuracy")]
    assert resolve([]) == []
    assert resolve(["loss", "mae"]) == [mean("mae")]  # the loss comes anyway
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
        f'unknown metric "{name}".{hint} Known: loss, accuracy, top1, top5, top@k, mae, mse, auc, '
        "hit_ratio, hit_ratio@k, ndcg, ndcg@k, or a sparkdl.Metric or torchmetrics.Metric."
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


def test_a_metric_given_twice_counts_once() -> None:
    assert [metric.name for metric in resolve(["top5", "auc", "mae", "auc", "top5"])] == [
        "top5",
        "auc",
        "mae",
    ]


def test_two_metrics_of_one_name() -> None:
    with pytest.raises(ParameterError, match='two metrics are called "mae"'):
        resolve(["mae", MeanMetric("mae", lambda output, target: output)])
    with pytest.raises(ParameterError, match='two metrics are called "loss"'):
        resolve([("loss", "mae")])


def test_k_of_nothing() -> None:
    with pytest.raises(ParameterError, match='metric "ndcg@0": k must be at least 1'):
        resolve(["ndcg@0"])


@pytest.mark.parametrize(
    ("metrics", "message"), [("mae", "give a list"), ([3], "unknown metric 3")]
)
def test_what_is_no_metric(metrics: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        resolve(metrics)

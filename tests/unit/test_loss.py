"""The loss of a mini-batch, plain and weighted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparkdl.replica.policy import Policy
from sparkdl.step.compute import MiniBatch, weigh
from sparkdl.step.loss import NoValuePerSample, call_loss, unreduced, weighted_mean

GENERATOR = torch.Generator().manual_seed(0)
OUTPUT = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.tensor([0, 2, 1, 2, 0])
VALUES = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
WEIGHTS = torch.tensor([0.0, 1.0, 2.5, 0.5, 3.0], dtype=torch.float64)


def mean(each: torch.Tensor) -> torch.Tensor:
    return (each * WEIGHTS).sum() / WEIGHTS.sum()


def test_call_loss_by_number_of_labels() -> None:
    assert call_loss(lambda o: o.sum(), OUTPUT, []) == OUTPUT.sum()
    assert call_loss(F.cross_entropy, OUTPUT, [CLASSES]) == F.cross_entropy(OUTPUT, CLASSES)

    def two(output: torch.Tensor, target: tuple) -> torch.Tensor:
        assert isinstance(target, tuple)
        return F.cross_entropy(output, target[0]) + target[1].sum()

    assert call_loss(two, OUTPUT, [CLASSES, VALUES]) == two(OUTPUT, (CLASSES, VALUES))


def by_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().sum(dim=1)


@pytest.mark.parametrize(
    ("loss", "target", "each"),
    [
        (nn.CrossEntropyLoss(), CLASSES, F.cross_entropy(OUTPUT, CLASSES, reduction="none")),
        (
            nn.CrossEntropyLoss(label_smoothing=0.1),
            CLASSES,
            F.cross_entropy(OUTPUT, CLASSES, reduction="none", label_smoothing=0.1),
        ),
        (F.cross_entropy, CLASSES, F.cross_entropy(OUTPUT, CLASSES, reduction="none")),
        (nn.MSELoss(), VALUES, ((OUTPUT - VALUES) ** 2).mean(1)),
        (F.l1_loss, VALUES, (OUTPUT - VALUES).abs().mean(1)),
        (by_sample, VALUES, by_sample(OUTPUT, VALUES)),
    ],
    ids=["module", "smoothed", "function", "elements", "function of elements", "by sample"],
)
def test_weighted_mean(loss, target, each) -> None:
    found = weighted_mean(loss, OUTPUT, [target], WEIGHTS)
    torch.testing.assert_close(found, mean(each), rtol=1e-13, atol=0)


def test_equal_weights_are_the_plain_mean() -> None:
    found = weighted_mean(nn.CrossEntropyLoss(), OUTPUT, [CLASSES], torch.full((5,), 0.3))
    torch.testing.assert_close(found, F.cross_entropy(OUTPUT, CLASSES), rtol=1e-12, atol=0)


def test_images_are_averaged_over_their_pixels_first() -> None:
    one = torch.rand(4, 2, 3, 3, generator=GENERATOR)
    other = torch.rand(4, 2, 3, 3, generator=GENERATOR)
    weights = torch.tensor([1.0, 0.0, 0.0, 3.0])
    each = ((one - other) ** 2).flatten(1).mean(1)
    found = weighted_mean(nn.MSELoss(), one, [other], weights)
    torch.testing.assert_close(found, (each * weights).sum() / 4)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda o, t: (o - t).mean(), r"\[\] for 5"),
        (lambda o, t: (o - t)[:4], r"\[4, 3\] for 5"),
        (lambda o, t: 0.5, "float for 5"),
    ],
    ids=["a mean", "too few", "a number"],
)
def test_a_loss_without_a_value_per_sample(loss, found) -> None:
    with pytest.raises(NoValuePerSample, match=found):
        weighted_mean(loss, OUTPUT, [VALUES], WEIGHTS)


def test_unreduced_leaves_the_users_loss_alone() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    each = unreduced(loss)
    assert (loss.reduction, each.reduction) == ("mean", "none")
    assert each.weight is loss.weight
    assert unreduced(by_sample) is by_sample


def test_weigh_multiplies_by_the_class() -> None:
    policy = Policy(class_weights=(0.5, 1.0, 4.0))
    table = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    assert torch.equal(weigh([CLASSES], None, policy), table[CLASSES])
    assert torch.equal(weigh([CLASSES], WEIGHTS.float(), policy), WEIGHTS * table[CLASSES])
    assert weigh([CLASSES], WEIGHTS, Policy()) is WEIGHTS
    assert weigh([CLASSES], None, Policy()) is None


@pytest.mark.parametrize("rows", [1, 2, 5, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_micro_batches_hold_every_row_once_and_none_is_empty(rows: int, count: int) -> None:
    batch = MiniBatch([torch.arange(rows)], [torch.arange(rows) * 2], torch.arange(rows) * 0.5)
    parts = list(batch.parts(count))
    sizes = [len(part) for part in parts]
    assert len(parts) == min(rows, count)
    assert max(sizes) - min(sizes) <= 1
    for name in ("inputs", "targets"):
        joined = torch.cat([getattr(part, name)[0] for part in parts])
        assert torch.equal(joined, getattr(batch, name)[0])
    assert sum(part.weight for part in parts) == batch.weight == 0.5 * sum(range(rows))
    assert MiniBatch([torch.arange(rows)], []).weight == rows

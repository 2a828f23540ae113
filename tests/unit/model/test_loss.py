"""The loss of a mini-batch, plain and weighted."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl.model.loss import NoValuePerSample, call_loss, loss_of, masses_of, unreduced
from sparkdl.model.recipe import on_device
from sparkdl.replica.compute import MiniBatch

GENERATOR = torch.Generator().manual_seed(0)
OUTPUT = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.tensor([0, 2, 1, 2, 0])
VALUES = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
SHARES = VALUES.softmax(dim=1)
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


def with_reduction(
    output: torch.Tensor, target: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    values = (output - target).abs()
    return values if reduction == "none" else values.mean()


NONE = {"reduction": "none"}
DIVERGENCE = F.kl_div(OUTPUT, SHARES, **NONE).sum(1)
WEIGHTED = {
    "module": (nn.CrossEntropyLoss(), CLASSES, F.cross_entropy(OUTPUT, CLASSES, **NONE)),
    "smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        CLASSES,
        F.cross_entropy(OUTPUT, CLASSES, label_smoothing=0.1, **NONE),
    ),
    "function": (F.cross_entropy, CLASSES, F.cross_entropy(OUTPUT, CLASSES, **NONE)),
    "elements": (nn.MSELoss(), VALUES, ((OUTPUT - VALUES) ** 2).mean(1)),
    "function of elements": (F.l1_loss, VALUES, (OUTPUT - VALUES).abs().mean(1)),
    "own reduction": (with_reduction, VALUES, (OUTPUT - VALUES).abs().mean(1)),
    "by sample": (by_sample, VALUES, by_sample(OUTPUT, VALUES)),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), SHARES, DIVERGENCE),
    "function of batchmean": (partial(F.kl_div, reduction="batchmean"), SHARES, DIVERGENCE),
}


@pytest.mark.parametrize(("loss", "target", "each"), WEIGHTED.values(), ids=WEIGHTED)
def test_weighted_mean(loss, target, each) -> None:
    found, _ = loss_of(loss, OUTPUT, [target], WEIGHTS)
    torch.testing.assert_close(found, mean(each), rtol=1e-13, atol=0)


def test_images_are_averaged_over_their_pixels_first() -> None:
    one = torch.rand(4, 2, 3, 3, generator=GENERATOR)
    other = torch.rand(4, 2, 3, 3, generator=GENERATOR)
    weights = torch.tensor([1.0, 0.0, 0.0, 3.0])
    each = ((one - other) ** 2).flatten(1).mean(1)
    found, _ = loss_of(nn.MSELoss(), one, [other], weights)
    torch.testing.assert_close(found, (each * weights).sum() / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_weights_beside_half_precision(dtype) -> None:
    output, target = OUTPUT.to(dtype), VALUES.to(dtype)
    weights = WEIGHTS * 1e5 + 12_345
    each = by_sample(output, target).double()
    found, _ = loss_of(by_sample, output, [target], weights)
    torch.testing.assert_close(
        found.double(), (each * weights).sum() / weights.sum(), rtol=1e-6, atol=0
    )


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
        loss_of(loss, OUTPUT, [VALUES], WEIGHTS)


def test_unreduced_leaves_the_users_loss_alone() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    each = unreduced(loss)
    assert (loss.reduction, each.reduction) == ("mean", "none")
    assert each.weight is loss.weight
    assert unreduced(by_sample) is by_sample


TABLE = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
OF_CLASSES = {
    "module": nn.CrossEntropyLoss(ignore_index=1),
    "weighted": nn.NLLLoss(weight=TABLE),
    "both": nn.CrossEntropyLoss(weight=TABLE, ignore_index=2, label_smoothing=0.1),
    "function": F.cross_entropy,
    "partial": partial(F.nll_loss, ignore_index=0, weight=TABLE),
    "partial of a partial": partial(partial(F.cross_entropy, ignore_index=0), ignore_index=2),
}


@given(
    rows=st.integers(1, 9),
    positions=st.one_of(st.none(), st.integers(1, 3)),
    cut=st.integers(0, 9),
    name=st.sampled_from(sorted(OF_CLASSES)),
    seed=st.integers(0, 1000),
)
def test_masses_are_what_the_mean_is_divided_by(rows, positions, cut, name, seed) -> None:
    """Of any cut, the means of both parts by their masses are the mean of all."""
    generator = torch.Generator().manual_seed(seed)
    more = () if positions is None else (positions,)
    output = torch.randn(rows, 3, *more, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (rows, *more), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.2] = -100
    loss = OF_CLASSES[name]
    if name in ("both", "partial of a partial"):
        target[target == -100] = 2
    elif name == "partial":
        target[target == -100] = 0
    elif name == "module":
        target[target == -100] = 1
    masses = masses_of(loss, [target])
    assert masses.shape == (rows,)
    total = 0.0
    for part in (slice(0, cut), slice(cut, None)):
        batch = MiniBatch([output[part]], [target[part]], masses=masses[part])
        if batch.weight:
            total += float(loss(output[part], target[part])) * batch.weight
    whole = MiniBatch([output], [target], masses=masses).weight
    assert whole == float(masses.sum())
    if whole:
        assert total / whole == pytest.approx(float(loss(output, target)), rel=1e-9)
    else:
        assert torch.isnan(loss(output, target))
    ones = torch.ones(rows)
    weighted, _ = loss_of(loss, output, [target], ones, masses)
    assert float(weighted) == pytest.approx(total / whole if whole else 0.0, rel=1e-9)


class Focal(nn.CrossEntropyLoss):
    """A mean of its own."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="none").square().mean()


class Named(nn.CrossEntropyLoss):
    """torch's mean under another name."""


def test_a_subclass_counts_as_torchs_where_it_computes_as_torch() -> None:
    assert masses_of(Focal(weight=TABLE), [CLASSES]) is None
    found = masses_of(Named(weight=TABLE), [CLASSES])
    assert found.tolist() == TABLE[CLASSES].tolist()


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        F.mse_loss,
        nn.CrossEntropyLoss(reduction="sum"),
        partial(F.cross_entropy, reduction="sum"),
        lambda output, target: F.cross_entropy(output, target),
    ],
)
def test_any_other_loss_counts_samples(loss) -> None:
    assert masses_of(loss, [CLASSES]) is None
    assert masses_of(nn.CrossEntropyLoss(), [VALUES.softmax(1)]) is None
    assert masses_of(nn.CrossEntropyLoss(), [CLASSES, CLASSES]) is None


def test_masses_of_labels_of_any_width_and_of_mistakes() -> None:
    loss = nn.CrossEntropyLoss(weight=TABLE)
    for dtype in (torch.uint8, torch.int8, torch.int32):
        found = masses_of(loss, [CLASSES.to(dtype)])
        assert found.tolist() == TABLE[CLASSES].tolist()
    assert (
        masses_of(loss, [torch.tensor([7, -3])]) is not None
    )  # the loss itself says what is wrong


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(weight=TABLE), partial(F.cross_entropy, weight=TABLE)]
)
def test_a_loss_comes_to_the_weights(loss) -> None:
    """On a GPU, say; the user's own stays where it is."""
    moved = on_device(loss, torch.device("meta"))
    tensors = [moved.weight, loss.weight] if isinstance(loss, nn.Module) else []
    tensors = tensors or [moved.keywords["weight"], loss.keywords["weight"]]
    assert [t.device.type for t in tensors] == ["meta", "cpu"]
    assert on_device(loss, torch.device("cpu")) is loss
    assert on_device(F.mse_loss, torch.device("meta")) is F.mse_loss

"""Losses that replicas cannot average are told of before training, and no others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dry_runs import dry_run
from mistakes import message_of
from torch import nn

import sparkdl
from sparkdl.data.ragged import Padding, Ragged, Rows
from sparkdl.errors import DataError, ModelError

ROWS, WIDTH, CLASSES, WORDS = 5, 4, 3, 6


@pytest.fixture(autouse=True)
def the_same_weights() -> None:
    torch.manual_seed(0)


def of_rows(outputs: int = CLASSES) -> nn.Module:
    """With what must not matter: batch norm and dropout."""
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, outputs)
    )


def of_words() -> nn.Module:
    return nn.Sequential(of_rows(CLASSES * WORDS), nn.Unflatten(1, (CLASSES, WORDS)))


class Pair(nn.Module):
    """Two embeddings, as for a contrastive loss, and a number that is of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = of_rows(), of_rows()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        one, other = self.one(x), self.other(x)
        return {"one": one, "other": other, "extra": one.square().mean()}


def check(
    loss: object,
    labels: Rows,
    module: nn.Module,
    averaged: bool = True,
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
) -> bool:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = generator.gamma(2.0, size=ROWS).astype(np.float32) if weighted else None
    if dtype != torch.float32:
        module = nn.Sequential(Narrow(dtype), module.to(dtype))
    replicas = 2 if averaged else 1
    return dry_run(module, loss, [inputs], [labels], replicas=replicas, weights=weights).sums  # type: ignore[arg-type]


class Force(nn.Module):
    """The gradient of a part with respect to the inputs, as of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Narrow(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


GENERATOR = np.random.default_rng(1)
CLASS = GENERATOR.integers(CLASSES, size=ROWS)
VALUES = GENERATOR.normal(size=(ROWS, CLASSES)).astype(np.float32)
PADDED = GENERATOR.integers(CLASSES, size=(ROWS, WORDS))
for row, length in enumerate((6, 6, 2, 3, 6)):
    PADDED[row, length:] = -100
LENGTHS = [2, 6, 3, 1, 4]
RAGGED = Ragged.of([GENERATOR.integers(1, CLASSES, size=n) for n in LENGTHS])
ON_THE_LEFT = replace(RAGGED, padding=Padding(side="left"))
RAGGED_VALUES = Ragged.of([GENERATOR.normal(size=n).astype(np.float32) for n in LENGTHS])


def words(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def padded_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Over all places up to the longest row's end."""
    return F.cross_entropy(output[:, :, : target.shape[1]], target)


def first_places(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of rows that are padded with 0; a mean over what is not."""
    each = (output[:, : target.shape[1]] - target).square() * (target != 0)
    return each.sum() / (target != 0).sum()


def contrastive(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    alike = output["one"] @ output["other"].T
    return F.cross_entropy(alike, torch.arange(len(target)))


def contrastive_sum(
    output: dict[str, torch.Tensor], target: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return contrastive(output, target) * len(target), len(target)


def with_accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output, target), (output.argmax(1) == target).float().mean()


TOLD = {
    "a mean over tokens": (lambda o, t: F.cross_entropy(o, t), PADDED, of_words, "not a mean over"),
    "with a margin of its own": (
        lambda o, t: F.multi_margin_loss(o, t, reduction="sum"),
        CLASS,
        of_rows,
        "it is a sum",
    ),
    "a mean over padding": (padded_mean, RAGGED, of_words, r"\(sum, count\)"),
    "a mean over padding on the left": (padded_mean, ON_THE_LEFT, of_words, 'padding_side="right"'),
    "of numbers without padding": (
        first_places,
        RAGGED_VALUES,
        partial(of_rows, WORDS),
        "not a mean over",
    ),
    "negatives from the batch": (contrastive, CLASS, Pair, "rows depend on each other"),
    "a sum with negatives": (contrastive_sum, CLASS, Pair, "rows depend on each other"),
    "a root": (lambda o, t: (o - t).square().mean().sqrt(), VALUES, of_rows, "PerReplica"),
    "a sum": (lambda o, t: (o - t).square().sum(), VALUES, of_rows, "it is a sum"),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_cannot_be_averaged_is_told(case: str) -> None:
    loss, labels, module, message = TOLD[case]
    with pytest.raises(ModelError, match=message) as caught:
        check(loss, labels, module())
    assert "the loss of the first 5 rows is" in str(caught.value)
    assert not check(sparkdl.PerReplica(loss), labels, module()) or "sum with" in case
    check(loss, labels, module(), averaged=False)


FINE = {
    "classes": (nn.CrossEntropyLoss(), CLASS, of_rows),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASS, of_rows),
    "ignoring": (nn.CrossEntropyLoss(), PADDED, of_words),
    "weighing": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), CLASS, of_rows),
    "a partial": (partial(F.cross_entropy, ignore_index=-100), PADDED, of_words),
    "a sum and its count": (words, PADDED, of_words),
    "squares": (nn.MSELoss(), VALUES, of_rows),
    "a function": (F.smooth_l1_loss, VALUES, of_rows),
    "of shares": (nn.KLDivLoss(reduction="batchmean"), np.exp(VALUES), of_rows),
    "of several labels": (nn.MultiLabelSoftMarginLoss(), (VALUES > 0).astype("float32"), of_rows),
    "of margins": (nn.MultiMarginLoss(), CLASS, of_rows),
    "without a label": (lambda o, t: o.mean(), VALUES, of_rows),
    "that draws": (lambda o, t: (o - t + torch.randn_like(t)).square().mean(), VALUES, of_rows),
    "of gradients": (lambda o, t: o.square().mean(), VALUES, Force),
    "of a dict": (lambda o, t: F.cross_entropy(o["one"], t) + 0.1 * o["extra"], CLASS, Pair),
}


NOT_OF_16_BITS = "weighing", "of margins"
DTYPES = [(case, torch.float32) for case in FINE]
DTYPES += [(case, torch.bfloat16) for case in FINE if case not in NOT_OF_16_BITS]


def test_a_pair_is_looked_at_also_where_nothing_is_averaged() -> None:
    for averaged in (True, False):
        with pytest.raises(ModelError, match="Return the loss alone"):
            check(with_accuracy, CLASS, of_rows(), averaged)
    assert check(contrastive_sum, CLASS, Pair(), averaged=False)


@pytest.mark.parametrize(("case", "dtype"), DTYPES, ids=str)
def test_no_false_alarm(case: str, dtype: torch.dtype) -> None:
    loss, labels, module = FINE[case]
    assert check(loss, labels, module(), dtype=dtype) == (loss is words)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.MSELoss(), F.l1_loss, lambda o, t: (o - t).square().mean(1)]
)
def test_weighted_ones_are_fine(loss: object) -> None:
    labels = CLASS if isinstance(loss, nn.CrossEntropyLoss) else VALUES
    assert not check(loss, labels, of_rows(), weighted=True)


class OwnLoss(nn.Module):
    """Gives the mean of ``function`` over the words that are not ``ignored``."""

    def __init__(self, ignored: int, shifts: bool) -> None:
        super().__init__()
        self.body, self.ignored, self.shifts = of_words(), ignored, shifts

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.body(x)
        if self.shifts:
            logits, labels = logits[:, :, :-1], labels[:, 1:]
        labels = labels.where(labels != self.ignored, -100)
        return F.cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("ignored", "shifts", "count"),
    [
        (-100, False, None),
        (-100, True, "lambda labels: (labels[:, 1:] != -100).sum()"),
        (-1, False, "lambda labels: (labels != -1).sum()"),
        (0, True, "lambda labels: (labels[:, 1:] != 0).sum()"),
    ],
)
def test_what_a_models_own_mean_is_over(ignored: int, shifts: bool, count: str | None) -> None:
    labels = np.where(PADDED == -100, ignored, np.maximum(PADDED, 1))
    module = OwnLoss(ignored, shifts)
    if count is not None:
        with pytest.raises(ModelError, match="say how many values its mean is over, as in sparkdl"):
            check(sparkdl.ModelLoss(), labels, module)
    given = None if count is None else eval(count)
    assert check(sparkdl.ModelLoss(count=given), labels, module)


def test_a_model_whose_own_loss_is_of_all_rows_at_once() -> None:
    class Own(Pair):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return contrastive(super().forward(x), labels)

    with pytest.raises(ModelError, match=r"If it makes rows depend on each other, .*PerReplica"):
        check(sparkdl.ModelLoss(), CLASS, Own())
    assert check(sparkdl.PerReplica(sparkdl.ModelLoss()), CLASS, Own())


# Labels that are missing


def known_squares(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    known = ~target.isnan()
    return ((output - target.nan_to_num()).square() * known).sum(), known.sum()


def mean_of_known(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target)[~target.isnan()].square().mean()


def of_two(output: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> Any:
    """The first label is there in every row, the second in some."""
    squares, count = known_squares(output[:, 1], targets[1])
    return (output[:, 0] - targets[0]).square().sum() + squares, len(output) + count


HOLES = VALUES[:, :2].copy()
HOLES[2, 1] = HOLES[4] = np.nan
FIRST, SECOND = np.nan_to_num(HOLES[:, 0]), HOLES[:, 1].copy()
SOME_CLASS = np.where(CLASS == 0, -100, CLASS)
LEFT_OUT: dict[str, tuple[Any, list[Rows], list[int], bool]] = {
    "sum and count": (known_squares, [HOLES], [0], True),
    "a mean": (mean_of_known, [HOLES], [0], True),
    "MaskedLoss": (sparkdl.MaskedLoss(nn.MSELoss()), [HOLES], [0], True),
    "MaskedLoss of two": (sparkdl.MaskedLoss(nn.L1Loss()), [HOLES[:, 0], SECOND], [0, 1], True),
    "one of two": (of_two, [FIRST, SECOND], [1], True),
    "not that one of two": (of_two, [SECOND, FIRST], [0], False),
    "classes": (nn.CrossEntropyLoss(), [SOME_CLASS], [0], True),
    "of the replica": (sparkdl.PerReplica(mean_of_known), [HOLES], [0], True),
    "other classes": (nn.CrossEntropyLoss(ignore_index=9), [SOME_CLASS], [0], False),
    "classes as numbers": (lambda x, y: F.mse_loss(x[:, 0], y.float()), [SOME_CLASS], [0], False),
    "torch's": (nn.MSELoss(), [HOLES], [0], False),
    "a gradient of NaN": (lambda x, y: (x - y).square().nanmean(), [HOLES], [0], False),
    "0 in their place": (lambda x, y: F.mse_loss(x, y.nan_to_num()), [HOLES], [0], False),
    "a comparison": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, (y > 0).float()), [HOLES], [0], False,
    ),
    "the model's own": (
        sparkdl.ModelLoss(labels=None, loss=lambda x: x.square().mean()), [HOLES], [0], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("care", [True, False])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_only_a_loss_that_leaves_out_missing_labels_gets_them(case: str, care: bool) -> None:
    loss, labels, missing, taken = LEFT_OUT[case]
    inputs = GENERATOR.normal(size=(ROWS, WIDTH)).astype(np.float32)
    module = TakesLabels() if case == "the model's own" else nn.Linear(WIDTH, 2 + ("class" in case))

    def run() -> None:
        dry_run(module, loss, [inputs], labels, replicas=1, missing=missing, care=care)

    if taken:
        run()
        return
    text = message_of(DataError, run)
    name = f"x{1 + missing[0]}"
    assert text.startswith(f'column "{name}", row 5 of partition 0: is NaN. Drop it. A loss that')
    assert "sparkdl.MaskedLoss(loss)" in text
    assert f'columns={{"{name}": sparkdl.Masked()}}' in text


class TakesLabels(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if y is None else (super().forward(x) - y.nan_to_num())


def test_a_mean_over_what_is_there_is_told_of_beside_replicas() -> None:
    inputs = GENERATOR.normal(size=(ROWS, WIDTH)).astype(np.float32)
    with pytest.raises(ModelError, match=r"it is not a mean over the rows"):
        dry_run(nn.Linear(WIDTH, 2), mean_of_known, [inputs], [HOLES], missing=[0])

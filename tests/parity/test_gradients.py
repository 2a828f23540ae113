"""What happens to the gradient between backward and the optimizer, against plain PyTorch in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from feature_runs import (
    CLASSES,
    CUTS,
    ITERATIONS,
    WIDTH,
    Parts,
    as_plain_torch,
    assert_close,
    differ,
    fit_here,
    mlp,
    normed,
    parts_of,
    plain_loss,
    plainly,
    recipe_of,
    several_steps,
    trainer_of,
)
from launch import in_turn
from own_optimizers import ScheduleFree
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import sparkdl

pytestmark = pytest.mark.parity
cuts = pytest.mark.parametrize(("sizes", "slices"), CUTS, ids=str)
NORM, VALUE = 0.7, 0.05


# Clipping


@pytest.mark.parametrize(
    "changes",
    [{"clip_norm": NORM}, {"clip_value": VALUE}, {"clip_value": VALUE, "clip_norm": 0.1}],
    ids=str,
)
@cuts
def test_clipping_is_torchs(sizes, slices, changes):
    """Values come before the norm, which is measured in between."""
    parts, norms, sgd = Parts.of(sizes), [], partial(torch.optim.SGD, lr=0.5)
    trainer = trainer_of(sizes, slices, optimizer=sgd, **changes)
    seen, wanted = as_plain_torch(trainer, parts, norms=norms)
    told = [record["gradient_norm"] for record in seen.trained.history]
    assert told == (norms if trainer.clip_norm is None else pytest.approx(norms, rel=1e-11))
    assert differ(wanted, plainly(trainer_of(sizes, optimizer=sgd), parts)[0])
    if trainer.clip_value is None:
        assert min(norms) < NORM < max(norms), "both sides of the limit are to be seen"


# Accumulation

ROWS_SEEN: list[int] = []


class Watched(nn.Module):
    """Notes how many rows each forward pass of training has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            ROWS_SEEN.append(len(x))
        return self.inner(x)


@pytest.mark.parametrize(("accumulate", "cut"), in_turn([2, 3, 100], CUTS[::-1]), ids=str)
def test_micro_batches_add_up_to_the_mini_batch(accumulate, cut):
    (sizes, slices), parts = cut, Parts.of(cut[0])
    trainer = trainer_of(sizes, slices, model=Watched, accumulate=accumulate)
    ROWS_SEEN.clear()
    as_plain_torch(trainer, parts)
    given = [len(p) for t in range(ITERATIONS) for p in parts_of(trainer, parts, t) if p]
    micro = [
        rows * (i + 1) // count - rows * i // count
        for rows in given
        for count in [min(accumulate, rows)]
        for i in range(count)
    ]
    # the first are trials on the driver, some of one row; the last those of plain torch
    assert ROWS_SEEN[-ITERATIONS - len(micro) : -ITERATIONS] == micro


class Tagger(nn.Module):
    """A class for each word of a packed sentence: both must be as long as the longest of the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 5, dtype=torch.float64)
        self.cells = nn.LSTM(5, 4, bidirectional=True, batch_first=True, dtype=torch.float64)
        self.out = nn.Linear(8, CLASSES, dtype=torch.float64)

    def forward(self, words, lengths):
        lengths = lengths.cpu()
        packed = pack_padded_sequence(self.words(words), lengths, True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.cells(packed)[0], True)[0]).movedim(-1, 1)


class Masked(nn.Module):
    """The same without cells, for sentences that are padded on any side."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, CLASSES, dtype=torch.float64)

    def forward(self, words, mask):
        return (self.words(words) * mask[..., None]).movedim(-1, 1)


def sentence(generator):
    words = generator.integers(1, 20, int(generator.integers(1, 12))).tolist()
    return sparkdl.Sample(
        " ".join(map(str, words)), " ".join(str(word % CLASSES) for word in words)
    )


def numbers(texts):
    return [[int(word) for word in text.split()] for text in texts]


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_micro_batches_are_padded_anew(side):
    """With 100, each row goes through alone; that is tried before the training, too."""
    text = partial(sparkdl.Text, numbers, padding_side="right" if side == "packed" else side)
    features = text(lengths=True, mask=False) if side == "packed" else text()
    trainer = trainer_of(
        (20, 9),
        model=Tagger if side == "packed" else Masked,
        columns={"features": features, "label": text(padding=-100, mask=False)},
    )
    losses = fit_here(trainer, Parts.of((20, 9), sentence)).losses
    for accumulate in (3, 100):
        found = fit_here(replace(trainer, accumulate=accumulate), Parts.of((20, 9), sentence))
        assert found.losses == pytest.approx(losses, rel=1e-12)


# Local steps


@pytest.mark.parametrize(
    ("cut", "steps"),
    in_turn(
        CUTS,
        [
            (2, partial(torch.optim.Adam, lr=1e-2)),
            (3, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
            (2, partial(ScheduleFree, lr=0.3)),
        ],
    ),
    ids=str,
)
def test_local_steps(cut, steps):
    (sizes, slices), (local_steps, optimizer) = cut, steps
    trainer = trainer_of(sizes, slices, optimizer=optimizer, local_steps=local_steps)
    as_plain_torch(trainer, Parts.of(sizes), reference=several_steps)


class Branched(nn.Module):
    """The second half is used where a sample says so."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.inner = mlp()

    def forward(self, inputs):
        output = self.inner(inputs)
        return output + self.rare(inputs) if (inputs[:, 0] > 100).any() else output


@pytest.mark.parametrize(
    ("part", "optimizer"),
    in_turn(
        [({0}, 1), ({1}, 3), ({0, 2}, 3), ({1, 2}, 1), (set(), 3)],
        [partial(torch.optim.Adam, lr=1e-2), ScheduleFree],
    ),
    ids=str,
)
def test_local_steps_of_a_part_that_not_all_replicas_use(part, optimizer):
    """Nobody who had no gradient for it has a say in its optimizer state."""
    users, slices = part
    parts = Parts.of((16, 15, 12))
    for replica in users:
        for sample in parts.records[replica]:
            sample.features[0] = 101.0
    sizes, changes = (16, 15, 12), {"model": Branched, "local_steps": 2, "optimizer": optimizer}
    trainer = trainer_of(sizes, slices, **changes)
    as_plain_torch(trainer, parts, reference=several_steps)


class ByLoss(torch.optim.Optimizer):
    """The higher the loss, the longer the step."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        loss = float(closure())
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.05 * loss)


def test_local_steps_tell_an_optimizer_the_loss():
    trainer = trainer_of((43,), optimizer=ByLoss, local_steps=2)
    as_plain_torch(trainer, Parts.of((43,)), reference=several_steps)


class Visits(torch.optim.SGD):
    """An element-wise state of whole numbers: how often each element has had a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                seen = self.state[p].setdefault("seen", torch.zeros(p.shape, dtype=torch.int64))
                seen += 1
                p.mul_(1 - 1e-3 * seen)


def test_local_steps_keep_whole_numbers_whole():
    parts = Parts.of((22, 21))
    trainer = trainer_of((22, 21), 2, optimizer=partial(Visits, lr=0.1), local_steps=2)
    assert all(map(math.isfinite, fit_here(trainer, parts).losses))


@pytest.mark.parametrize(("sizes", "slices"), [((22, 21), 2), ((30, 2, 11), 5)], ids=str)
def test_local_steps_clip_and_regularise_each_step(sizes, slices):
    parts, sgd = Parts.of(sizes), partial(torch.optim.SGD, lr=0.5)
    changes = {"local_steps": 3, "clip_norm": NORM, "clip_value": VALUE, "l2": 0.1}
    trainer = trainer_of(sizes, slices, optimizer=sgd, **changes)

    def loss(module, part):
        penalty = 0.05 * sum((p**2).sum() for p in module.parameters())
        return plain_loss(trainer, module, part) + penalty

    assert_close(fit_here(trainer, parts).steps, several_steps(trainer, parts, loss)[0])


@pytest.mark.parametrize("slices", [1, 2])
def test_local_steps_hide_no_infinity_by_clipping(slices):
    """A gradient of inf would become one of clip_value, and go into the weights."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.slope = mlp(), nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.slope.register_hook(lambda gradient: torch.full_like(gradient, -math.inf))

        def forward(self, inputs):
            return self.inner(inputs) + self.slope

    trainer = trainer_of((22, 21), slices, model=Steep, local_steps=2, clip_value=VALUE)
    with pytest.raises(sparkdl.TrainingError, match='the gradient of "slope" in replica 0'):
        fit_here(trainer, Parts.of((22, 21)))


# Regularisers

REGULARISERS = {
    "l1": ({"l1": 0.01}, {"*": (0.01, 0.0)}),
    "l2": ({"l2": 0.1}, {"*": (0.0, 0.1)}),
    "patterns": (
        {"l1": {"0.weight": 0.02}, "l2": {"*.weight": 0.1, "2.*": 0.05}},
        {"0.weight": (0.02, 0.1), "2.weight": (0.0, 0.15), "2.bias": (0.0, 0.05)},
    ),
}


@pytest.mark.parametrize(("name", "cut"), in_turn(REGULARISERS, CUTS[::-1]), ids=str)
def test_regularisers_are_penalties_added_to_the_loss(name, cut):
    (sizes, slices), (given, strengths) = cut, REGULARISERS[name]
    parts, bare = Parts.of(sizes), []
    trainer = trainer_of(sizes, slices, **given)
    seen = fit_here(trainer, parts)

    def loss(module, part):
        value = plain_loss(trainer, module, part)
        bare.append(float(value.detach()))
        for name, p in module.named_parameters():
            l1, l2 = strengths.get(name, strengths.get("*", (0.0, 0.0)))
            value = value + l1 * p.abs().sum() + l2 / 2 * (p**2).sum()
        return value

    wanted, _ = plainly(trainer, parts, loss)
    assert_close(seen.steps, wanted)
    assert seen.losses == pytest.approx(bare, rel=1e-11), "the loss is reported without them"


# Sparse tables

NAMES = 37


class Tagged(nn.Module):
    """Two tables, one of them too large to be touched as a whole by any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.EmbeddingBag(NAMES, 5, mode="mean", sparse=True)
        self.first = nn.Embedding(NAMES, 3, sparse=True)
        self.out = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, tags):
        return self.out(torch.tanh(torch.cat([self.tags(tags), self.first(tags[:, 0])], 1)))


def tags(generator: np.random.Generator) -> sparkdl.Sample:
    return sparkdl.Sample(
        generator.integers(0, NAMES, size=WIDTH), int(generator.integers(CLASSES))
    )


def two_optimizers(module):
    return [
        torch.optim.SparseAdam([module.tags.weight, module.first.weight], lr=1e-2),
        torch.optim.Adam(module.out.parameters(), lr=1e-2),
    ]


@cuts
def test_sparse_adam_on_tables(sizes, slices):
    parts = Parts.of(sizes, tags)
    trainer = trainer_of(sizes, slices, model=Tagged, optimizer=two_optimizers)
    as_plain_torch(trainer, parts, optimizers=two_optimizers)


@pytest.mark.parametrize(
    ("changes", "cut"), in_turn([{}, {"clip_norm": 0.2}, {"clip_value": 0.01}], CUTS[::-1]), ids=str
)
def test_sgd_on_tables_clipped_like_all_else(changes, cut):
    """torch clips no sparse gradient by value: the reference is the same model with dense tables."""
    (sizes, slices), parts = cut, Parts.of(cut[0], tags)
    sgd = partial(torch.optim.SGD, lr=0.5)
    trainer = trainer_of(sizes, slices, model=Tagged, optimizer=sgd, **changes)
    seen = fit_here(trainer, parts)

    def dense():
        module = Tagged()
        module.tags.sparse = module.first.sparse = False
        return module

    wanted, _ = plainly(trainer_of(sizes, model=dense, optimizer=sgd, **changes), parts)
    assert_close(seen.steps, wanted)


def test_rows_that_no_sample_has_keep_their_bits():
    parts = Parts.of((22, 21), lambda g: sparkdl.Sample(g.integers(0, 9, size=WIDTH), 1))
    trainer = trainer_of((22, 21), 5, model=Tagged, optimizer=two_optimizers, l2=0.1)
    before = recipe_of(trainer).build()
    seen = fit_here(trainer, parts)
    for name in ("tags.weight", "first.weight"):
        start, end = before.state_dict()[name], seen.steps[-1][name]
        assert torch.equal(start[9:], end[9:])
        assert not (start[:9] == end[:9]).all(dim=1).any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"accumulate": 3}, "batch_size=8, replicas=2, accumulate=3. Choose"),
        ({"local_steps": 4, "batch_size": 2}, "batch_size=2, replicas=2, local_steps=4. Choose"),
        ({"local_steps": 2, "accumulate": 3}, "local_steps=2, accumulate=3. Choose"),
        (
            {"consistency": sparkdl.DiLoCo(inner_steps=4), "batch_size": 2},
            "batch_size=2, replicas=2, inner_steps=4. Choose",
        ),
        ({"accumulate": 2}, None),
        ({"local_steps": 2, "batch_size": 8}, None),
    ],
    ids=str,
)
def test_a_micro_batch_of_one_row_is_found_before_the_first_iteration(changes, told):
    """Batch norm cannot train on one row."""
    trainer, parts = trainer_of((24, 24), model=normed, **changes), Parts.of((24, 24))
    if told is None:
        assert len(fit_here(trainer, parts).flats) == ITERATIONS
        return
    with pytest.raises(sparkdl.ModelError) as error:
        fit_here(trainer, parts)
    assert "in iteration 1 of each epoch a replica gets one: 48 rows" in str(error.value)
    assert told in str(error.value)
    assert str(error.value).endswith("or fewer replicas, or cut less.")

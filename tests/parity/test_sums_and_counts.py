"""Losses whose mean is over something else than rows: exact for any number of replicas and parts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from feature_runs import (
    CLASSES,
    ITERATIONS,
    WIDTH,
    Parts,
    as_plain_torch,
    assert_close,
    copies,
    differ,
    fit_here,
    plainly,
    trainer_of,
)
from launch import in_turn
from torch import nn

import sparkdl

pytestmark = pytest.mark.parity
SIZES = [((12, 0, 23, 8), 3), ((43,), 5)]
WORDS, IGNORED = 4, -100


def tagged(generator):
    """Some words with a class each, and padding."""
    labels = generator.integers(CLASSES, size=WORDS)
    labels[generator.integers(1, WORDS + 1) :] = IGNORED
    return sparkdl.Sample(generator.normal(size=WIDTH), labels)


def tagged_weighted(generator):
    return replace(tagged(generator), weight=float(generator.gamma(2.0)))


def of_words():
    """[rows, words, classes]"""
    layers = nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WORDS * CLASSES)
    return nn.Sequential(*layers, nn.Unflatten(1, (WORDS, CLASSES))).double()


def by_word(output, target):
    """A number for each word, 0 where it is padding."""
    return F.cross_entropy(output.movedim(-1, 1), target, reduction="none")


def words(output, target):
    return by_word(output, target).sum(), (target != IGNORED).sum()


def words_by_row(output, target):
    return by_word(output, target).sum(1), (target != IGNORED).sum(1)


def pairs(output, target):
    """Of neighbouring words, those that differ; a count that is a Python number."""
    each = (output[:, 1:] - output[:, :-1]).square().sum(-1)
    chosen = target[:, 1:] != target[:, :-1]
    return (each * chosen).sum(), int(chosen.sum())


def mean_of(loss):
    """What plain PyTorch minimises on the global batch."""

    def mean(module, part):
        total, count = loss(module(*part.inputs), *part.targets)
        return total.sum() / (count.sum() if isinstance(count, torch.Tensor) else count)

    return mean


LOSSES = {"words": words, "words by row": words_by_row, "pairs": pairs}
CHANGES = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "clipped": {"clip_norm": 0.05},
    "both": {"accumulate": 2, "clip_norm": 0.05, "slices": 1},
}


def tolerance_of(trainer):
    return 1e-11 if trainer.clip_norm is None else 1e-9


@pytest.mark.parametrize(
    ("case", "cut"), in_turn(itertools.product(CHANGES, LOSSES), SIZES), ids=str
)
def test_a_sum_and_its_count(case, cut):
    (sizes, slices), changes, loss = cut, CHANGES[case[0]], LOSSES[case[1]]
    trainer = trainer_of(sizes, **{"slices": slices, "model": of_words, "loss": loss, **changes})
    tolerance = tolerance_of(trainer)
    as_plain_torch(trainer, Parts.of(sizes, tagged), mean_of(loss), tolerance=tolerance)


def with_gaps(generator):
    """Numbers of three tasks, of which some are missing, and a weight."""
    labels = generator.normal(size=CLASSES)
    labels[generator.random(CLASSES) < 0.4] = math.nan
    return sparkdl.Sample(generator.normal(size=WIDTH), labels, float(generator.gamma(2.0)))


def two_tasks(generator):
    """A number and a class, of which one or both may be missing."""
    number, label = float(generator.normal()), int(generator.integers(CLASSES))
    number = None if generator.random() < 0.4 else number
    label = IGNORED if generator.random() < 0.4 else label
    return sparkdl.Sample(generator.normal(size=WIDTH), (number, label))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(WIDTH, 1 + CLASSES, dtype=torch.float64)

    def forward(self, x):
        return self.layers(x).split([1, CLASSES], dim=1)


def of_tasks(module, part):
    (target,), output = part.targets, module(*part.inputs)
    known, weights = ~target.isnan(), part.weights
    each = known * (output - target.nan_to_num()).square()
    if weights is None:
        return each.sum() / known.sum()
    return (each * weights[:, None]).sum() / (known * weights[:, None]).sum()


def of_classes(module, part):
    return F.cross_entropy(module(*part.inputs).movedim(-1, 1), *part.targets)


def of_heads(module, part):
    numbers, labels = part.targets
    first, classes = module(*part.inputs)
    known = ~numbers.isnan()
    total = (known * F.smooth_l1_loss(first[:, 0], numbers.nan_to_num(), reduction="none")).sum()
    each = F.cross_entropy(classes, labels, reduction="none")
    return (total + each.sum()) / (known.sum() + (labels != IGNORED).sum())


def both_numbers(module, part):
    """One column has floats and the other whole numbers."""
    numbers, labels = part.targets
    missing = torch.stack([numbers.isnan(), labels == IGNORED], 1)
    targets = torch.stack([numbers.nan_to_num(), labels.double()], 1)
    return (module(*part.inputs) - targets).square()[~missing].mean()


def several(output, target):
    """One loss for each kind of label."""
    known = F.cross_entropy if not target.is_floating_point() else F.smooth_l1_loss
    return known(output, target, reduction="none")


def last_classes(output, target, reduction="mean"):
    return F.cross_entropy(output.movedim(-1, 1), target, reduction=reduction)


MISSING = {
    "numbers": ({"loss": nn.MSELoss()}, with_gaps, of_tasks),
    "weighted": ({"loss": nn.MSELoss(), "weight": "weight"}, with_gaps, of_tasks),
    "accumulated": ({"loss": nn.MSELoss(), "accumulate": 3}, with_gaps, of_tasks),
    "classes": ({"loss": last_classes, "model": of_words}, tagged, of_classes),
    "heads": ({"loss": several, "model": Heads}, two_tasks, of_heads),
    "two kinds": (
        {"loss": nn.MSELoss(), "model": partial(nn.Linear, WIDTH, 2, dtype=torch.float64)},
        two_tasks,
        both_numbers,
    ),
}


@pytest.mark.parametrize(("case", "cut"), in_turn(MISSING, SIZES), ids=str)
def test_labels_that_are_missing(case, cut):
    (changes, make, loss), (sizes, slices) = MISSING[case], cut
    parts = Parts.of(sizes, make)
    parts.num_labels = 2 if make is two_tasks else 1
    given = {**changes, "loss": sparkdl.MaskedLoss(changes["loss"])}
    columns = {"label[0]" if make is two_tasks else "label": sparkdl.Masked()}
    trainer = trainer_of(sizes, slices, columns=columns, **given)
    as_plain_torch(trainer, parts, loss)


def token_mean(output, target):
    total, count = words(output, target)
    return total / count


@pytest.mark.parametrize("sizes", [(43,), (0, 43)], ids=str)
def test_a_replica_alone_may_have_any_loss(sizes):
    """It sees the whole batch, unless that goes through in parts."""
    parts, trainer = Parts.of(sizes, tagged), trainer_of(sizes, model=of_words, loss=token_mean)
    assert_close(fit_here(trainer, parts).steps, plainly(trainer, parts)[0])
    with pytest.raises(sparkdl.ModelError, match="it is not a mean over the rows"):
        fit_here(replace(trainer, accumulate=2), parts)


def test_what_each_replica_makes_of_its_own_rows():
    """As torch's DDP would, but that replicas count by their rows."""
    parts, loss = Parts.of((15, 14, 14), tagged), sparkdl.PerReplica(token_mean)
    trainer = trainer_of((15, 14, 14), 2, model=of_words, loss=loss)

    def own(module, part):
        return token_mean(module(*part.inputs), *part.targets)

    _, steps = as_plain_torch(trainer, parts, own, reference=copies)
    assert differ(steps, plainly(trainer, parts, mean_of(words))[0]), "it is another mean"


@pytest.mark.parametrize(
    ("change", "cut"), in_turn(["plain", "accumulated", "clipped"], SIZES), ids=str
)
def test_rows_of_a_sum_have_weights(change, cut):
    (sizes, slices), parts = cut, Parts.of(cut[0], tagged_weighted)
    given = {"model": of_words, "loss": words_by_row, "weight": "weight", **CHANGES[change]}
    trainer = trainer_of(sizes, slices, **given)

    def loss(module, part):
        total, count = words_by_row(module(*part.inputs), *part.targets)
        return (total * part.weights).sum() / (count * part.weights).sum()

    as_plain_torch(trainer, parts, loss, tolerance=tolerance_of(trainer))


def test_weights_need_the_sum_of_each_row():
    trainer = trainer_of((12,), model=of_words, loss=words, weight="weight")
    with pytest.raises(sparkdl.ModelError, match="samples together"):
        fit_here(trainer, Parts.of((12,), tagged_weighted))


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"local_steps": 2}], ids=str)
def test_a_replica_that_counts_nothing_changes_nothing(changes):
    parts = Parts.of((22, 21), tagged)
    nothing = np.full(WORDS, IGNORED)
    parts.records[0] = [replace(sample, label=nothing) for sample in parts.records[0]]
    trainer = trainer_of((22, 21), 2, model=of_words, loss=words, **changes)
    seen = fit_here(trainer, parts)
    assert all(map(math.isfinite, seen.losses))
    if "local_steps" not in changes:
        assert_close(seen.steps, plainly(trainer, parts, mean_of(words))[0])


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}], ids=str)
def test_a_batch_that_counts_nothing_changes_no_parameter(changes):
    def rarely(generator):
        sample = tagged(generator)
        empty = generator.random() < 0.7
        return replace(sample, label=np.full(WORDS, IGNORED)) if empty else sample

    sizes = (12, 12)
    parts = Parts.of(sizes, rarely)
    trainer = trainer_of(sizes, 2, model=of_words, loss=words, batch_size=2, **changes)
    seen, _ = as_plain_torch(trainer, parts, mean_of(words), counts=are_counted)
    assert 0 < sum(map(math.isnan, seen.losses)) < ITERATIONS - 1


def are_counted(part):
    return bool((part.targets[0] != IGNORED).any())


def test_validation_and_evaluation_count_likewise():
    parts, more = Parts.of((15, 14, 14), tagged), Parts.of((7, 20, 3), tagged, seed=1)
    validation = sparkdl.Validation(more, every=sparkdl.every(ITERATIONS), batch_size=4)
    trainer = trainer_of((15, 14, 14), 2, model=of_words, loss=words, validation=validation)
    seen = fit_here(trainer, parts)
    samples = [sample for some in more.records for sample in some]
    inputs = torch.tensor(np.array([sample.features for sample in samples]))
    labels = torch.tensor(np.array([sample.label for sample in samples]))
    with torch.no_grad():
        total, count = words(seen.trained.module(inputs), labels)
    found = seen.trained.history.validations[-1]
    assert found["metrics"]["loss"] == pytest.approx(float(total / count), rel=1e-11)


class OwnLoss(nn.Module):
    """Computes its loss as causal language models of transformers do: each word against the next."""

    def __init__(self, kind="CausalLMOutput"):
        super().__init__()
        self.kind, self.body = kind, of_words()

    def forward(self, x, labels=None):
        logits = self.body(x)
        if labels is None:
            return logits
        if self.kind == "tuple":
            return logits, F.cross_entropy(logits.movedim(-1, 1), labels)
        if self.kind == "dict":
            return {"loss": F.cross_entropy(logits.movedim(-1, 1), labels), "logits": logits}
        shifted = logits[:, :-1].movedim(-1, 1), labels[:, 1:]
        return CausalLMOutput(F.cross_entropy(*shifted), logits)


class CausalLMOutput:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


def own_words(generator):
    """At least two words, so that the next is known of one in every row."""
    sample = tagged(generator)
    sample.label[:2] = generator.integers(CLASSES, size=2)
    return sample


def shifted_words(output, target):
    return words(output[:, :-1], target[:, 1:])


OWN = {
    "CausalLMOutput": ("labels", shifted_words),
    "tuple": (None, words),
    "dict": ("labels", words),
}


@pytest.mark.parametrize(
    ("case", "cut"),
    in_turn(itertools.product(OWN, ["plain", "accumulated", "clipped"]), SIZES),
    ids=str,
)
def test_a_model_that_computes_its_own_loss(case, cut):
    (sizes, slices), (kind, change) = cut, case
    labels, loss = OWN[kind]
    given = {"model": partial(OwnLoss, kind), "loss": sparkdl.ModelLoss(labels), **CHANGES[change]}
    trainer = trainer_of(sizes, slices, **given)
    tolerance = tolerance_of(trainer)
    as_plain_torch(trainer, Parts.of(sizes, own_words), mean_of(loss), tolerance=tolerance)

"""Weights of samples and classes: the weighted mean over the global batch, as torch computes it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from feature_runs import (
    CLASSES,
    CUTS,
    ITERATIONS,
    WIDTH,
    Parts,
    as_plain_torch,
    assert_close,
    classified,
    differ,
    fit_here,
    normed,
    parts_of,
    plainly,
    recipe_of,
    several_steps,
    trainer_of,
    weighted,
)
from launch import in_turn
from lazily import Lazily
from torch import nn

import sparkdl
from sparkdl.data import samples as samples_module

pytestmark = pytest.mark.parity
cuts = pytest.mark.parametrize(("sizes", "slices"), CUTS, ids=str)
class_weight = Lazily("sklearn.utils.class_weight")
OF_CLASSES = [0.3, 2.5, 1.0]
TABLE = torch.tensor(OF_CLASSES, dtype=torch.float64)


def weighted_cross_entropy(module, part):
    each = F.cross_entropy(module(*part.inputs), *part.targets, reduction="none")
    return (each * part.weights).sum() / part.weights.sum()


@pytest.mark.parametrize("changes", [{"accumulate": 3}, {"class_weights": OF_CLASSES}], ids=str)
@cuts
def test_sample_weights(sizes, slices, changes):
    """Those of samples and of classes multiply."""
    parts = Parts.of(sizes, weighted)
    trainer = trainer_of(sizes, slices, weight="weight", **changes)
    table = torch.tensor(changes.get("class_weights", [1.0] * CLASSES), dtype=torch.float64)

    def loss(module, part):
        each = F.cross_entropy(module(*part.inputs), *part.targets, reduction="none")
        weights = part.weights * table[part.targets[0]]
        return (each * weights).sum() / weights.sum()

    _, wanted = as_plain_torch(trainer, parts, loss)
    assert differ(wanted, plainly(trainer, parts)[0])


@pytest.mark.parametrize(
    ("sizes", "slices", "given"),
    [(*CUTS[0], OF_CLASSES), (*CUTS[1], tuple(OF_CLASSES)), (*CUTS[2], {0: 0.3, 1: 2.5, 5: 7.0})],
    ids=str,
)
def test_class_weights_are_those_of_cross_entropy(sizes, slices, given):
    """Classes that are missing count 1."""
    parts = Parts.of(sizes)
    trainer = trainer_of(sizes, slices, class_weights=given)
    _, wanted = as_plain_torch(
        trainer, parts, lambda m, p: F.cross_entropy(m(*p.inputs), *p.targets, weight=TABLE)
    )
    assert differ(wanted, plainly(trainer, parts)[0])


def test_class_weights_where_labels_are_missing():
    """A row without a label has no class, and so no weight."""

    def some(generator):
        label = int(generator.integers(CLASSES)) if generator.random() < 0.6 else -100
        return sparkdl.Sample(generator.normal(size=WIDTH), label)

    sizes, loss = (30, 0, 13), sparkdl.MaskedLoss(nn.CrossEntropyLoss())
    columns = {"label": sparkdl.Masked()}
    trainer = trainer_of(sizes, 2, class_weights=OF_CLASSES, loss=loss, columns=columns)
    as_plain_torch(
        trainer,
        Parts.of(sizes, some),
        lambda m, p: F.cross_entropy(m(*p.inputs), *p.targets, weight=TABLE),
    )


def rare(generator):
    """Class 2 is rare, and so are rows with a name other than "a"."""
    label = int(generator.choice(CLASSES, p=[0.7, 0.25, 0.05]))
    return {
        "features": generator.normal(size=WIDTH),
        "label": label,
        "name": "ab"[int(generator.random() < 0.2)],
        "often": float(generator.gamma(2.0) * (generator.random() > 0.3)),
        "weight": float(generator.gamma(2.0)),
    }


SAMPLINGS = {
    "balanced": {"sampling": sparkdl.Balanced("label")},
    "by a name": {"sampling": sparkdl.Balanced("name", rows=30), "weight": "weight"},
    "fewer rows": {"sampling": sparkdl.Balanced("name", replacement=False), "accumulate": 2},
    "weighted": {"sampling": sparkdl.Weighted("often", rows=60)},
    "without replacement": {"sampling": sparkdl.Weighted("often", False, 20), "weight": "weight"},
}


@pytest.mark.parametrize(
    ("case", "cut"), in_turn(SAMPLINGS, [((40, 3), 1), ((30, 2, 0, 11), 3)]), ids=str
)
def test_rows_that_are_drawn(case, cut):
    """As plain PyTorch on the same global batches, over several epochs."""
    (sizes, slices), parts = cut, Parts.of(cut[0], rare)
    trainer = trainer_of(sizes, slices, **SAMPLINGS[case])

    def loss(module, part):
        each = F.cross_entropy(module(*part.inputs), *part.targets, reduction="none")
        weights = torch.ones_like(each) if part.weights is None else part.weights
        return (each * weights).sum() / weights.sum()

    seen, _ = as_plain_torch(trainer, parts, loss)
    assert seen.states[-1].epoch >= 1


def test_balanced_class_weights_are_those_of_scikit_learn():
    parts = Parts.of((30, 2, 0, 11), rare)
    trainer = trainer_of((30, 2, 0, 11), 3, class_weights="balanced")
    labels = np.array([record["label"] for part in parts.records for record in part])
    weights = class_weight.compute_class_weight("balanced", classes=np.arange(CLASSES), y=labels)
    table = torch.tensor(weights)
    as_plain_torch(
        trainer, parts, lambda m, p: F.cross_entropy(m(*p.inputs), *p.targets, weight=table)
    )
    numbers = replace(trainer, loss=nn.MSELoss(), model=partial(nn.Linear, WIDTH, 1), replicas=2)
    text = 'class_weights="balanced" needs a label of class numbers, and "label" is float32'
    with pytest.raises(sparkdl.DataError, match=text):
        fit_here(numbers, Parts.of((4, 4), lambda g: sparkdl.Sample(g.normal(size=WIDTH), 0.5)))


IGNORED = -7
LOSSES = {
    "ignores": nn.CrossEntropyLoss(ignore_index=IGNORED),
    "weighted_batches": nn.CrossEntropyLoss(weight=TABLE, ignore_index=IGNORED),
    "smooths": nn.CrossEntropyLoss(weight=TABLE, ignore_index=IGNORED, label_smoothing=0.2),
    "likelihood": nn.NLLLoss(weight=TABLE, ignore_index=IGNORED),
    "function": partial(F.cross_entropy, ignore_index=IGNORED, weight=TABLE),
}


def unlabelled(generator):
    """A class, or none in three rows of ten."""
    sample = classified(generator)
    return sample if generator.random() < 0.7 else replace(sample, label=IGNORED)


def unlabelled_weighted(generator):
    return replace(unlabelled(generator), weight=float(generator.gamma(2.0)))


def tagged(generator):
    """Four words with a class each, or none."""
    labels = generator.integers(CLASSES, size=4)
    labels[generator.random(4) < 0.4] = IGNORED
    return sparkdl.Sample(generator.normal(size=WIDTH), labels)


def of_words():
    layers = (
        nn.Linear(WIDTH, 8),
        nn.Tanh(),
        nn.Linear(8, 4 * CLASSES),
        nn.Unflatten(1, (CLASSES, 4)),
    )
    return nn.Sequential(*layers).double()


CHANGES = {"plain": {}, "accumulated": {"accumulate": 3}, "words": {"model": of_words}}


@pytest.mark.parametrize(
    ("case", "cut"), in_turn(itertools.product(CHANGES, LOSSES), CUTS), ids=str
)
def test_a_loss_that_ignores_labels_or_weighs_them(case, cut):
    """The mean over the labels of the global batch, wherever they are."""
    (sizes, slices), changes, loss = cut, CHANGES[case[0]], LOSSES[case[1]]
    parts = Parts.of(sizes, tagged if "model" in changes else unlabelled, seed=1)
    trainer = trainer_of(sizes, slices, loss=loss, **changes)
    as_plain_torch(trainer, parts)
    kept = [
        [float((p.targets[0] != IGNORED).double().mean()) for p in parts_of(trainer, parts, t) if p]
        for t in range(ITERATIONS)
    ]
    assert sum(map(bool, sizes)) == 1 or any(len(set(each)) > 1 for each in kept)


@pytest.mark.parametrize("classes", [None, OF_CLASSES], ids=str)
@cuts
def test_weights_of_samples_and_labels_that_are_ignored(sizes, slices, classes):
    """A sample whose label is ignored counts for nothing, whatever its weight."""
    parts = Parts.of(sizes, unlabelled_weighted)
    loss = LOSSES["ignores"]
    trainer = trainer_of(sizes, slices, loss=loss, weight="weight", class_weights=classes)
    table = torch.ones(CLASSES, dtype=torch.float64) if classes is None else TABLE

    def plain(module, part):
        (target,) = part.targets
        each = F.cross_entropy(
            module(*part.inputs), target, table, ignore_index=IGNORED, reduction="none"
        )
        kept = target != IGNORED
        weights = part.weights * kept * table[target.where(kept, 0)]
        return (each * part.weights).sum() / weights.sum()

    as_plain_torch(trainer, parts, plain)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"local_steps": 2}], ids=str)
def test_a_replica_whose_labels_are_all_ignored_changes_nothing(changes):
    parts = Parts.of((22, 21))
    parts.records[0] = [replace(sample, label=IGNORED) for sample in parts.records[0]]
    trainer = trainer_of((22, 21), 2, loss=LOSSES["ignores"], **changes)
    if "local_steps" in changes:
        as_plain_torch(trainer, parts, reference=several_steps, mass=num_labels)
    else:
        as_plain_torch(trainer, parts)


def num_labels(part):
    return int((part.targets[0] != IGNORED).sum())


def test_counters_come_from_a_replica_that_was_forward():
    parts = Parts.of((24, 24))
    parts.records[0] = [replace(sample, label=IGNORED) for sample in parts.records[0]]
    trainer = trainer_of((24, 24), 2, loss=LOSSES["ignores"], model=normed)
    seen = fit_here(trainer, parts)
    assert int(seen.trained.module[1].num_batches_tracked) == ITERATIONS
    assert float(seen.trained.module[1].running_mean.abs().max()) > 0


def test_a_label_beyond_the_class_weights_may_be_ignored():
    parts = Parts.of((22, 21), lambda g: replace(classified(g), label=int(g.choice([0, 2, 255]))))
    loss = nn.CrossEntropyLoss(ignore_index=255)
    trainer = trainer_of((22, 21), 2, loss=loss, class_weights=OF_CLASSES)
    plain = nn.CrossEntropyLoss(weight=TABLE, ignore_index=255)
    as_plain_torch(trainer, parts, lambda m, p: plain(m(*p.inputs), *p.targets))


def by_hand(output, target):
    """A value for each sample, and no ``reduction``."""
    return ((output - target) ** 2).mean(dim=1)


def with_zeros(sizes, chosen):
    """Partitions whose ``chosen`` have only samples of weight 0, and the others none."""
    parts = Parts.of(sizes, lambda g: replace(classified(g), weight=float(g.gamma(2.0))))
    for m in chosen:
        parts.records[m] = [replace(sample, weight=0.0) for sample in parts.records[m]]
    return parts


@pytest.mark.parametrize(
    "changes", [{}, {"clip_norm": 0.2}, {"accumulate": 2}, {"l2": 0.1}], ids=str
)
def test_a_replica_without_any_weight_changes_nothing(changes):
    parts = with_zeros((15, 14, 14), {0, 2})
    trainer = trainer_of((15, 14, 14), 2, weight="weight", **changes)
    seen = fit_here(trainer, parts)

    def loss(module, part):
        penalty = sum((p**2).sum() for p in module.parameters()) * changes.get("l2", 0.0) / 2
        return weighted_cross_entropy(module, part) + penalty

    assert_close(seen.steps, plainly(trainer, parts, loss)[0])
    assert any(
        part.weights.sum() == 0
        for t in range(ITERATIONS)
        for part in parts_of(trainer, parts, t)
        if part is not None
    )


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.2}, {"local_steps": 2}], ids=str)
def test_batches_without_any_weight_change_no_parameter(changes):
    sizes = (22, 21)
    trainer = trainer_of(sizes, 2, weight="weight", **changes)
    with mock.patch.object(samples_module, "check_total_weight"):  # it refuses such data as a whole
        seen = fit_here(trainer, with_zeros(sizes, {0, 1}))
    start = recipe_of(trainer).build().state_dict()
    assert len(seen.losses) == ITERATIONS
    assert all(map(math.isnan, seen.losses))  # 0 would end a run that stops on a low loss
    assert all(math.isnan(epoch["loss"]) for epoch in seen.trained.history.epochs())
    for step in seen.steps:
        for name, tensor in step.items():
            assert torch.equal(tensor, start[name]), name


def rarely_weighted(generator):
    return replace(classified(generator), weight=float(generator.random() < 0.3))


@pytest.mark.parametrize(("sizes", "slices"), [((24,), 1), ((12, 12), 3)], ids=str)
def test_a_batch_without_weight_is_passed_over_between_others(sizes, slices):
    """Adam's moments and step count do not move either, as if it had never been."""
    parts = Parts.of(sizes, rarely_weighted)
    trainer = trainer_of(sizes, slices, weight="weight", batch_size=2)
    seen, _ = as_plain_torch(trainer, parts, weighted_cross_entropy, counts=mass_of)
    assert 0 < sum(map(math.isnan, seen.losses)) < ITERATIONS - 1
    assert all(math.isfinite(epoch["loss"]) for epoch in seen.trained.history.epochs())


def mass_of(part):
    return float(part.weights.sum())


@cuts
def test_local_steps_count_replicas_by_their_weights(sizes, slices):
    parts, sgd = Parts.of(sizes, weighted), partial(torch.optim.SGD, lr=0.1)
    trainer = trainer_of(sizes, slices, weight="weight", local_steps=2, optimizer=sgd)
    as_plain_torch(trainer, parts, weighted_cross_entropy, reference=several_steps, mass=mass_of)

"""Validation inside training: the weights as they stand, every row once, the best ones kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from feature_runs import (
    ITERATIONS,
    WIDTH,
    Centred,
    Notes,
    Parts,
    as_plain_torch,
    assert_close,
    assert_same_bits,
    classified,
    fit_here,
    mlp,
    recipe_of,
    trainer_of,
    weighted,
)
from launch import in_turn
from own_optimizers import ScheduleFree
from torch import nn

import sparkdl
from sparkdl.model.flat import FlatModule

pytestmark = pytest.mark.parity
CUTS = [((43,), 1, (17,)), ((22, 21), 3, (0, 17)), ((39, 0, 4), 2, (5, 12, 1))]
cuts = pytest.mark.parametrize(("sizes", "slices", "held_out"), CUTS, ids=str)


def centred():
    return nn.Sequential(Centred(), nn.Dropout(0.3), mlp())


def module_at(trainer, flat):
    """The model with a flat vector in it."""
    built = FlatModule(recipe_of(trainer).build())
    built.flat.copy_(flat)
    built.refresh()
    return built.module.eval()


def all_rows(parts, dtype=torch.float64):
    samples = [s for part in parts.records for s in part]
    inputs = torch.tensor(np.array([s.features for s in samples]), dtype=dtype)
    labels = torch.tensor([s.label for s in samples])
    weights = [s.weight for s in samples]
    return inputs, labels, None if None in weights else torch.tensor(weights, dtype=dtype)


def validated(sizes, slices, held_out, make=classified, **changes):
    parts, others = Parts.of(sizes, make), Parts.of(held_out, make, seed=1)
    given = {"metrics": ["accuracy", "top@2"], "every": sparkdl.every(2), "batch_size": 4}
    given |= changes.pop("validation", {})
    trainer = trainer_of(sizes, slices, validation=sparkdl.Validation(others, **given), **changes)
    return trainer, parts, others


@pytest.mark.parametrize(
    ("every", "cut"), in_turn([sparkdl.every(2), sparkdl.every_epoch()], CUTS[::-1]), ids=str
)
def test_values_are_those_of_the_model_at_that_moment(every, cut):
    sizes, slices, held_out = cut
    trainer, parts, others = validated(
        sizes, slices, held_out, model=centred, validation={"every": every}, batch_size=9
    )
    seen = fit_here(trainer, parts)
    inputs, labels, _ = all_rows(others)
    found = seen.trained.history.validations
    due = [2, 4, 6, 8] if every == sparkdl.every(2) else [5]
    assert [v["iteration"] for v in found] == due
    assert [v["epoch"] for v in found] == [i // 5 for i in due]
    for record in found:
        module = module_at(trainer, seen.flats[record["iteration"] - 1])
        with torch.no_grad():
            output = module(inputs)
        accuracy = float((output.argmax(1) == labels).double().mean())
        assert record["metrics"]["accuracy"] == pytest.approx(accuracy, abs=1e-12)
        among_two = (output.topk(2).indices == labels[:, None]).any(1).double().mean()
        assert record["metrics"]["top@2"] == pytest.approx(float(among_two), abs=1e-12)
        loss = float(F.cross_entropy(output, labels))
        assert record["metrics"]["loss"] == pytest.approx(loss, rel=1e-11)


EVALUATED = [
    (*CUTS[0], {}),
    (*CUTS[1], {"clip_norm": 0.3}),
    (*CUTS[2], {"schedule": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)}),
]


@pytest.mark.parametrize(("sizes", "slices", "held_out", "changes"), EVALUATED, ids=str)
def test_the_weights_that_count_are_those_of_eval(sizes, slices, held_out, changes):
    """Gradients are taken at those of ``train()``, as without validation and moving average."""
    trainer, parts, others = validated(
        sizes,
        slices,
        held_out,
        optimizer=partial(ScheduleFree, lr=0.5),
        ema=0.5,
        validation={"best": "loss"},
        **changes,
    )
    seen, steps = as_plain_torch(trainer, parts)
    bare = fit_here(replace(trainer, validation=None, ema=None), parts)
    assert_same_bits(seen.flats, bare.flats)
    assert_close([seen.trained.module.state_dict()], steps[-1:])
    average = recipe_of(trainer).build().state_dict()
    for step in steps:
        average = {name: (average[name] + step[name]) / 2 for name in average}
    assert_close([seen.trained.ema.module.state_dict()], [average])
    inputs, labels, _ = all_rows(others)
    for record in seen.trained.history.validations:
        module = module_at(trainer, seen.flats[record["iteration"] - 1])
        loss = F.cross_entropy(module(inputs), labels).item()
        assert record["metrics"]["loss"] == pytest.approx(loss, rel=1e-11)
    best = min(seen.trained.history.validations, key=lambda v: v["metrics"]["loss"])
    assert_close([seen.trained.best.module.state_dict()], [steps[best["iteration"] - 1]])


@cuts
def test_training_is_not_touched_by_it(sizes, slices, held_out):
    """Running statistics and dropout's draws are those of a run without validation."""
    trainer, parts, _ = validated(
        sizes, slices, held_out, model=centred, validation={"best": "loss"}
    )
    seen = fit_here(trainer, parts)
    bare = fit_here(replace(trainer, validation=None), parts)
    assert len(seen.trained.history.validations) == 4
    assert_same_bits(seen.flats, bare.flats)
    assert bare.trained.best is None


@cuts
def test_the_loss_is_weighted_by_samples_and_not_by_classes(sizes, slices, held_out):
    how = {"weight": "weight", "class_weights": [0.2, 3.0, 1.0]}
    trainer, parts, others = validated(sizes, slices, held_out, weighted, **how)
    seen = fit_here(trainer, parts)
    inputs, labels, weights = all_rows(others)
    for record in seen.trained.history.validations:
        with torch.no_grad():
            output = module_at(trainer, seen.flats[record["iteration"] - 1])(inputs)
        each = F.cross_entropy(output, labels, reduction="none")
        wanted = float((each * weights).sum() / weights.sum())
        assert record["metrics"]["loss"] == pytest.approx(wanted, rel=1e-11)


# The best model


@pytest.mark.parametrize(("best", "cut"), in_turn(["loss", "accuracy"], CUTS[1:]), ids=str)
def test_the_best_model_is_that_of_its_iteration(best, cut):
    sizes, slices, held_out = cut
    sgd = partial(torch.optim.SGD, lr=6.0)  # restless: the last is not the best
    trainer, parts, _ = validated(
        sizes, slices, held_out, optimizer=sgd, validation={"best": best, "every": sparkdl.every(1)}
    )
    seen = fit_here(trainer, parts)
    values = [v["metrics"][best] for v in seen.trained.history.validations]
    wanted = int(np.argmin(values) if best == "loss" else np.argmax(values))  # the first of equals
    assert wanted < ITERATIONS - 1
    kept = module_at(trainer, seen.flats[wanted]).state_dict()
    found = seen.trained.best.module.state_dict()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    shorter = fit_here(replace(trainer, stop=sparkdl.max_iteration(wanted + 1)), parts)
    last = shorter.trained.module.state_dict()
    assert all(torch.equal(found[name], last[name]) for name in last)
    assert seen.trained.best.history is not None


def test_of_equals_the_first_is_kept():
    """Steps too small to change any prediction."""
    sgd = partial(torch.optim.SGD, lr=1e-9)
    trainer, parts, _ = validated(
        (22, 21), 2, (9, 8), optimizer=sgd, validation={"best": "accuracy"}
    )
    seen = fit_here(trainer, parts)
    values = [v["metrics"]["accuracy"] for v in seen.trained.history.validations]
    assert values == [values[0]] * 4
    found = FlatModule(seen.trained.best.module).flat
    assert torch.equal(found, seen.flats[1])
    assert not torch.equal(found, seen.flats[3])


# Early stopping


@pytest.mark.parametrize(("metric", "patience"), [("loss", 1), ("accuracy", 4)])
def test_plateau_stops_after_patience_validations_without_gain(metric, patience):
    sgd = partial(torch.optim.SGD, lr=3.0)
    trainer, parts, _ = validated(
        (22, 21),
        2,
        (9, 8),
        optimizer=sgd,
        stop=sparkdl.max_iteration(60),
        validation={"every": sparkdl.every(2)},
    )
    values = [v["metrics"][metric] for v in fit_here(trainer, parts).trained.history.validations]
    sign, best, wait, stopped = -1 if metric == "loss" else 1, -np.inf, 0, None
    for number, value in enumerate(values, start=1):
        best, wait = (sign * value, 0) if sign * value > best else (best, wait + 1)
        if wait == patience:
            stopped = number
            break
    assert stopped is not None
    assert stopped < len(values)
    stop = sparkdl.max_iteration(60) | sparkdl.plateau(metric, patience)
    early = fit_here(replace(trainer, stop=stop), parts)
    assert len(early.trained.history.validations) == stopped
    assert len(early.flats) == 2 * stopped


def test_the_state_tells_callbacks_of_it():
    told = []

    class Told(sparkdl.Callback):
        def on_validation_end(self, trainer, state):
            told.append((state.iteration, dict(state.metrics), dict(state.higher_is_better)))

    trainer, parts, _ = validated((22, 21), 2, (9, 8), callbacks=[Told()])
    seen = fit_here(trainer, parts)
    records = seen.trained.history.validations
    assert [(i, m) for i, m, _ in told] == [(r["iteration"], r["metrics"]) for r in records]
    assert told[0][2] == {"loss": False, "accuracy": True, "top@2": True}


def test_validation_data_must_look_like_the_training_data():
    trainer, parts, _ = validated((22, 21), 2, (9, 8))
    wrong = Parts([[sparkdl.Sample(np.zeros(WIDTH + 1), 0)], []])
    trainer = replace(trainer, validation=sparkdl.Validation(wrong), callbacks=[Notes()])
    with pytest.raises(sparkdl.DataError, match=r"validation data: .*in the training data"):
        fit_here(trainer, parts)


def wide():
    """Outputs so large that their loss is not a number in half precision."""
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3 * 64), nn.Unflatten(1, (3, 64))
    )


def positions(generator):
    return sparkdl.Sample(generator.normal(size=WIDTH), generator.integers(3, size=64))


def probability():
    return nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid(), nn.Flatten(0))


def of_two(generator):
    return sparkdl.Sample(generator.normal(size=WIDTH), float(generator.integers(2)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("model", "loss", "make"),
    [(wide, nn.CrossEntropyLoss(), positions), (probability, nn.BCELoss(), of_two)],
    ids=["a large sum", "a loss without half precision"],
)
def test_the_loss_is_computed_in_single_precision(model, loss, make, precision):
    """As autocast does in training: in fp16 a sum of 4,000 losses is inf, in bf16 it has 8 bits."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    given = {"metrics": [], "batch_size": 70, "best": "loss"}
    stop = sparkdl.max_iteration(2)
    how = {"model": model, "loss": loss, "precision": precision, "stop": stop}
    trainer, parts, others = validated((40, 30), 2, (70, 0), make, validation=given, **how)
    seen = fit_here(trainer, parts)
    inputs, labels, _ = all_rows(others, torch.float32)
    labels = labels.float() if labels.is_floating_point() else labels
    with torch.no_grad(), torch.autocast("cpu", dtype):
        output = module_at(trainer, seen.flats[-1])(inputs)
    (found,) = seen.trained.history.validations
    assert found["metrics"]["loss"] == pytest.approx(float(loss(output.float(), labels)), rel=1e-6)
    assert seen.trained.best is not None


class Keeping(nn.Module):
    """Keeps a table from pass to pass, made anew where there are more rows, and counts its passes."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = mlp(), None
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes = self.passes + 1
        output = self.inner(inputs)
        if self.table is None or len(self.table) < len(output):
            self.table = torch.linspace(0.5, 1.5, len(output), dtype=output.dtype)[:, None]
        return output * self.table[: len(output)]


def test_what_a_model_keeps_in_a_validation_is_of_use_in_training():
    given = {"every": sparkdl.every(3), "batch_size": 64}
    trainer, parts, _ = validated((22, 21), 2, (30, 30), model=Keeping, validation=given)
    assert len(fit_here(trainer, parts).losses) == ITERATIONS


class Answer(dict):
    """What a model may return: entries that are attributes too."""

    def __getattr__(self, name):
        return self[name]


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = mlp(torch.float32)

    def forward(self, inputs):
        return Answer(logits=self.head(inputs))


def of_answers(answer, target):
    weight = torch.tensor([1.0, 2.0, 3.0])
    return F.cross_entropy(answer.logits, target, weight, reduction="sum"), weight[target].sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_is_given_what_the_model_returns_as_in_training(precision):
    given = {"metrics": [], "batch_size": 17}
    trainer, parts, others = validated(
        (22, 21),
        2,
        (17, 0),
        validation=given,
        model=Answering,
        loss=of_answers,
        precision=precision,
        stop=sparkdl.max_iteration(2),
    )
    seen = fit_here(trainer, parts)
    inputs, labels, _ = all_rows(others, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        total, count = of_answers(module_at(trainer, seen.flats[-1])(inputs), labels)
    (found,) = seen.trained.history.validations
    assert found["metrics"]["loss"] == pytest.approx(float(total / count), rel=1e-6)


def test_metrics_are_given_single_precision():
    kinds = set()

    def kind(output, target):
        kinds.update([output.dtype, (output.T @ output).dtype])
        return output.sum(dim=1)

    given = {"metrics": [("kind", sparkdl.MeanMetric("kind", kind))], "batch_size": 17}
    how = {"model": Answering().head, "precision": "bf16", "stop": sparkdl.max_iteration(2)}
    trainer, parts, _ = validated((22, 21), 2, (17, 0), validation=given, **how)
    fit_here(trainer, parts)
    assert kinds == {torch.float32}

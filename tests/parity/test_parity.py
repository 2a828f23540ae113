"""M replicas and N slices against one process of plain PyTorch: the parameters after every step."""

from __future__ import annotations

import functools
import itertools
from functools import partial
from unittest import mock

import numpy as np
import parity_models as models
import pytest
import torch
from parity_reference import (
    TOLERANCE,
    Dataset,
    Datasets,
    Expected,
    assert_same_bits,
    observe,
    reference,
    worst_error,
)
from torch.optim.lr_scheduler import CosineAnnealingLR

import sparkdl
import sparkdl.slices.update
from sparkdl.slices.reduce import ReducedGradient

pytestmark = [pytest.mark.parity, pytest.mark.spark]

# 43 rows in batches of 8: six iterations an epoch, the last one short.
PARTITIONS = {
    "even": {1: (43,), 2: (22, 21), 3: (15, 14, 14), 5: (9, 9, 9, 8, 8)},
    "uneven": {1: (7,), 2: (40, 3), 3: (30, 2, 11), 5: (17, 3, 1, 17, 5)},
    "empty": {2: (0, 43), 3: (39, 0, 4), 5: (0, 17, 1, 25, 0)},
}
BATCH_SIZE = 8
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw": models.adamw_in_two_groups,
}
SCHEDULES = {"constant": None, "cosine": partial(CosineAnnealingLR, T_max=12)}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

CUTS = [(m, n, kind) for kind, by_m in PARTITIONS.items() for m in by_m for n in sorted({m, 1, 7})]
WAYS = list(itertools.product(OPTIMIZERS, SCHEDULES, DTYPES))
CASES = [(*cut, *WAYS[5 * number % len(WAYS)]) for number, cut in enumerate(CUTS)]
"""Every cut; the ways to train by turns, as the two do not depend on each other."""
SHUFFLE_CASES = [
    (1, 7, "uneven", "adam", "cosine", "fp64"),
    (2, 2, "uneven", "adamw", "constant", "fp32"),
    (2, 1, "even", "sgd", "cosine", "fp32"),
    (3, 3, "empty", "adam", "constant", "fp64"),
    (5, 5, "empty", "sgd", "cosine", "fp32"),
]


def row(generator: np.random.Generator) -> tuple[list[float], int]:
    return generator.normal(size=models.WIDTH).tolist(), int(generator.integers(models.CLASSES))


def trainer_of(case: tuple, model=models.mlp) -> sparkdl.Trainer:
    _, n, _, optimizer, schedule, dtype = case
    return sparkdl.Trainer(
        model=partial(model, DTYPES[dtype]),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=OPTIMIZERS[optimizer],
        schedule=SCHEDULES[schedule],
        batch_size=BATCH_SIZE,
        slices=n,
        seed=3,
    )


def dataset_of(datasets: Datasets, case: tuple) -> Dataset:
    m, _, kind, _, _, dtype = case
    return datasets.get(
        PARTITIONS[kind][m],
        row,
        "features array<double>, label long",
        float_dtype={"fp32": "float32", "fp64": "float64"}[dtype],
    )


@pytest.fixture(scope="module")
def expected(datasets: Datasets):
    """The reference of a case; it does not depend on N."""

    @functools.cache
    def get(m: int, kind: str, optimizer: str, schedule: str, dtype: str) -> Expected:
        case = (m, 1, kind, optimizer, schedule, dtype)
        return reference(trainer_of(case), dataset_of(datasets, case))

    return lambda case: get(case[0], *case[2:])


def ids(case: tuple) -> str:
    return "M{}-N{}-{}-{}-{}-{}".format(*case)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_local_engine_equals_one_process(datasets, expected, case, record_property):
    observed = observe(trainer_of(case), dataset_of(datasets, case), "local")
    wanted = expected(case)
    error = worst_error(observed.steps, wanted.steps)
    record_property("error", error)
    tolerance = TOLERANCE[DTYPES[case[-1]]]
    assert error <= tolerance
    assert observed.losses == pytest.approx(wanted.losses, rel=10 * tolerance)


@pytest.mark.parametrize("case", SHUFFLE_CASES, ids=ids)
def test_shuffle_engine_equals_one_process_and_the_local_engine(
    datasets, expected, case, record_property
):
    trainer, data = trainer_of(case), dataset_of(datasets, case)
    observed = observe(trainer, data, "shuffle")
    error = worst_error(observed.steps, expected(case).steps)
    record_property("error", error)
    assert error <= TOLERANCE[DTYPES[case[-1]]]
    here = observe(trainer, data, "local")
    assert_same_bits(observed.flats, here.flats)
    assert observed.losses == here.losses


def test_every_replica_count_slice_count_and_optimizer_runs_on_the_shuffle_engine():
    for position, all_values in enumerate(zip(*CASES, strict=True)):
        assert {case[position] for case in SHUFFLE_CASES} == set(all_values)


@pytest.mark.parametrize("wrong", ["unweighted", "one replica forgotten"])
def test_the_comparison_notices_a_wrong_mean(datasets, expected, wrong):
    """A mistake of the size that uneven partitions provoke is far above the tolerance."""
    case = (3, 3, "uneven", "sgd", "constant", "fp32")

    def reduce(plan, contributions, out):
        chosen = contributions if wrong == "unweighted" else contributions[:-1]
        out.copy_(sum(c.gradient for c in chosen) / len(chosen))
        return ReducedGradient(out)

    with mock.patch.object(sparkdl.slices.update, "reduce_gradients", reduce):
        observed = observe(trainer_of(case), dataset_of(datasets, case), "local")
    assert worst_error(observed.steps, expected(case).steps) > 1e-3


@pytest.mark.parametrize("engine", ["local", "shuffle"])
def test_the_returned_module_is_the_last_step(datasets, engine):
    case = (2, 2, "uneven", "adam", "constant", "fp32")
    observed = observe(trainer_of(case), dataset_of(datasets, case), engine)
    for name, parameter in observed.trained.module.named_parameters():
        assert torch.equal(parameter, observed.steps[-1][name])
    assert not observed.trained.module.training


def test_frozen_parameters_stay_and_others_equal_the_reference(datasets):
    case = (3, 7, "uneven", "adam", "cosine", "fp64")
    trainer = trainer_of(case, models.frozen_mlp)
    data = dataset_of(datasets, case)
    start = dict(reference(trainer, data, 1).steps[0])
    for engine in ("local", "shuffle"):
        observed = observe(trainer, data, engine)
        frozen = {"0.bias", "2.weight", "2.bias"}
        assert not frozen & observed.steps[0].keys()
        assert worst_error(observed.steps, reference(trainer, data).steps) <= 1e-12
        trained = dict(observed.trained.module.named_parameters())
        assert {name for name, p in trained.items() if not p.requires_grad} == frozen
        for name in frozen:
            assert torch.equal(trained[name], start[name])


FP32 = (3, 3, "uneven", "adam", "constant", "fp32")


def fp32_trainer(model, optimizer, **kwargs) -> sparkdl.Trainer:
    values = {"batch_size": BATCH_SIZE, "loss": torch.nn.CrossEntropyLoss(), "seed": 3, **kwargs}
    return sparkdl.Trainer(model=model, optimizer=optimizer, **values)


def test_tied_weights_stay_tied(datasets):
    trainer = fp32_trainer(models.Tied, OPTIMIZERS["adam"], slices=5)
    data = dataset_of(datasets, FP32)
    observed = observe(trainer, data, "shuffle")
    assert worst_error(observed.steps, reference(trainer, data).steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)
    module = observed.trained.module
    assert module.first.weight is module.second.weight


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_without_a_gradient_are_left_alone(datasets, optimizer):
    """Weight decay and momentum would move them; torch skips a parameter whose grad is None."""
    trainer = fp32_trainer(models.Alternating, OPTIMIZERS[optimizer], slices=4)
    data = dataset_of(datasets, FP32)
    observed = observe(trainer, data, "shuffle")
    assert worst_error(observed.steps, reference(trainer, data).steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)
    steps = observed.steps
    for t in range(1, len(steps)):
        used, idle = t // 2 % 2, 1 - t // 2 % 2
        assert not torch.equal(
            steps[t][f"heads.{used}.weight"], steps[t - 1][f"heads.{used}.weight"]
        )
        assert torch.equal(steps[t][f"heads.{idle}.weight"], steps[t - 1][f"heads.{idle}.weight"])
        assert torch.equal(steps[t]["unused.weight"], steps[0]["unused.weight"])


def test_a_gradient_on_some_replicas_only(datasets):
    trainer = fp32_trainer(models.Routed, OPTIMIZERS["sgd"], batch_size=5)
    data = dataset_of(datasets, FP32)
    observed = observe(trainer, data, "shuffle")
    expected = reference(trainer, data)
    assert worst_error(observed.steps, expected.steps) <= 1e-6
    changes = [
        not torch.equal(a["expert.bias"], b["expert.bias"])
        for a, b in zip(expected.steps, expected.steps[1:], strict=False)
    ]
    assert True in changes
    assert False in changes  # so that in some iterations no replica at all has a gradient


def test_more_slices_than_parameters(datasets):
    """Most of 40 slices are empty."""
    trainer = fp32_trainer(models.mlp, OPTIMIZERS["adamw"], slices=40)
    data = dataset_of(datasets, FP32)
    observed = observe(trainer, data, "shuffle", iterations=4)
    assert worst_error(observed.steps, reference(trainer, data, 4).steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "local", iterations=4).flats)


def row_of_two(generator: np.random.Generator) -> tuple[list[float], int, int]:
    features, label = row(generator)
    return features, int(generator.integers(5)), label


def test_a_model_with_two_inputs(datasets):
    data = datasets.get(
        (20, 3, 0, 20),
        row_of_two,
        "x array<double>, category int, y long",
        features=("x", "category"),
        label=("y",),
    )
    columns = {"features": ["x", "category"], "label": "y"}
    trainer = fp32_trainer(models.TwoInputs, OPTIMIZERS["adam"], slices=3, **columns)
    observed = observe(trainer, data, "shuffle")
    assert worst_error(observed.steps, reference(trainer, data).steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)


def row_without_label(generator: np.random.Generator) -> tuple[list[float]]:
    return (generator.normal(size=models.WIDTH).tolist(),)


def test_a_loss_without_label(datasets):
    data = datasets.get((20, 3, 20), row_without_label, "features array<double>", label=())
    trainer = fp32_trainer(
        models.autoencoder, OPTIMIZERS["adam"], loss=models.log_energy, label=None
    )
    observed = observe(trainer, data, "shuffle")
    assert worst_error(observed.steps, reference(trainer, data).steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)

"""M replicas and N slices against one process of plain PyTorch: the tensors after every step.

That is the local engine, without Spark; the shuffle engine has its bits. Batch norm, dropout, counters
and low precision depend on the cut into replicas by their nature: their reference is M copies, each on
its part of the batch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import parity_models as models
import pytest
import torch
from feature_runs import (
    ITERATIONS,
    Parts,
    Seen,
    Tensors,
    assert_same_bits,
    classified,
    copies,
    fit_here,
    fit_there,
    mlp,
    parts_of,
    plain_loss,
    plainly,
    recipe_of,
    trainer_of,
    worst_error,
)
from launch import soak_but
from torch.optim.lr_scheduler import CosineAnnealingLR

import sparkdl
import sparkdl.slices.update
from sparkdl.slices.reduce import ReducedGradient

pytestmark = pytest.mark.parity

# 43 rows in batches of 8: six iterations an epoch, the last one short.
PARTITIONS = {
    "even": {1: (43,), 2: (22, 21), 3: (15, 14, 14), 5: (9, 9, 9, 8, 8)},
    "uneven": {1: (7,), 2: (40, 3), 3: (30, 2, 11), 5: (17, 3, 1, 17, 5)},
    "empty": {2: (0, 43), 3: (39, 0, 4), 5: (0, 17, 1, 25, 0)},
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw": models.adamw_in_two_groups,
}
SCHEDULES = {"constant": None, "cosine": partial(CosineAnnealingLR, T_max=12)}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}
CUTS = [(m, n, kind) for kind, by_m in PARTITIONS.items() for m in by_m for n in sorted({m, 1, 7})]
WAYS = list(itertools.product(OPTIMIZERS, SCHEDULES, DTYPES))
GRID = [(*cut, *WAYS[5 * number % len(WAYS)]) for number, cut in enumerate(CUTS)]
"""Every cut; the ways to train by turns, as the two do not depend on each other."""
GRID_ON_SPARK = [
    (1, 7, "uneven", "adam", "cosine", "fp64"),
    (2, 2, "uneven", "adamw", "constant", "fp32"),
    (2, 1, "even", "sgd", "cosine", "fp32"),
    (3, 3, "empty", "adam", "constant", "fp64"),
    (5, 5, "empty", "sgd", "cosine", "fp32"),
]


@dataclass(frozen=True)
class Run:
    """``reference``: tensors and losses after each iteration, as ``tolerance`` wants them."""

    sizes: tuple[int, ...]
    changes: dict[str, Any]
    make: Callable[[np.random.Generator], sparkdl.Sample] = classified
    reference: Callable[..., tuple[list[Tensors], list[float]]] = plainly
    tolerance: float = 1e-6
    look: Callable[[Seen], None] = field(default=lambda seen: None)

    def begin(self) -> tuple[sparkdl.Trainer, Parts]:
        changes = {"optimizer": OPTIMIZERS["adam"], "slices": len(self.sizes), **self.changes}
        return trainer_of(self.sizes, **changes), Parts.of(self.sizes, self.make)


def of_grid(m: int, n: int, kind: str, optimizer: str, schedule: str, dtype: str) -> Run:
    changes = {"optimizer": OPTIMIZERS[optimizer], "schedule": SCHEDULES[schedule], "slices": n}
    changes["model"] = partial(mlp, DTYPES[dtype])
    return Run(PARTITIONS[kind][m], changes, tolerance=TOLERANCE[dtype])


def name_of(case: tuple[Any, ...]) -> str:
    return "M{}-N{}-{}-{}-{}-{}".format(*case)


# What must be seen beside the numbers


def frozen_stay(seen: Seen) -> None:
    frozen = {"0.bias", "2.weight", "2.bias"}
    assert not frozen & seen.steps[0].keys()
    start = recipe_of(trainer_of((1,), model=models.frozen_mlp)).build()
    trained = dict(seen.trained.module.named_parameters())
    assert {name for name, p in trained.items() if not p.requires_grad} == frozen
    assert all(torch.equal(trained[name], start.get_parameter(name)) for name in frozen)


def still_tied(seen: Seen) -> None:
    assert seen.trained.module.first.weight is seen.trained.module.second.weight


def idle_heads_stay(seen: Seen) -> None:
    """Weight decay and momentum would move them; torch skips a parameter whose grad is None."""
    for t, (before, now) in enumerate(itertools.pairwise(seen.steps), 1):
        used, idle = t // 2 % 2, 1 - t // 2 % 2
        assert not torch.equal(now[f"heads.{used}.weight"], before[f"heads.{used}.weight"])
        assert torch.equal(now[f"heads.{idle}.weight"], before[f"heads.{idle}.weight"])
        assert torch.equal(now["unused.weight"], seen.steps[0]["unused.weight"])


def the_expert_moves_at_times(seen: Seen) -> None:
    """In some iterations no replica at all has a gradient of it."""
    weights = [step["expert.bias"] for step in seen.steps]
    assert {torch.equal(a, b) for a, b in itertools.pairwise(weights)} == {True, False}


def batches_are_counted(seen: Seen) -> None:
    for t, step in enumerate(seen.steps, 1):
        assert int(step["1.num_batches_tracked"]) == int(step["4.num_batches_tracked"]) == t


def buffers_keep_their_types(seen: Seen) -> None:
    last = dict(seen.trained.module.named_buffers())
    assert int(last["calls"]) == ITERATIONS
    assert int(last["rows"][1]) > ITERATIONS
    assert last["seen"].dtype == torch.bool
    assert last["seen"].any()
    assert last["table"].tolist() == [0, 1, 2, 3, 4]


def masks_differ(seen: Seen) -> None:
    """Replicas with 3 and 1 samples weigh 3/4 and 1/4: the step tells both masks apart."""
    steps, masks = [torch.zeros(64)] + [step["weight"] for step in seen.steps], []
    for before, after in itertools.pairwise(steps):
        quarters = ((before - after) * 2).round().int()  # a kept element has gradient 2 * weight
        assert set(quarters.tolist()) <= {0, 1, 3, 4}
        masks += [quarters >= 3, quarters % 3 == 1]
    assert len({tuple(mask.tolist()) for mask in masks}) == 2 * ITERATIONS
    assert 0.4 < torch.stack(masks).float().mean() < 0.6


def masters_are_kept(seen: Seen) -> None:
    for name, parameter in seen.trained.module.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(parameter, seen.steps[-1][name].to(parameter.dtype))
    weights = [step["first.weight"] for step in seen.steps]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))


def with_masters(trainer: sparkdl.Trainer, parts: Parts) -> tuple[list[Tensors], list[float]]:
    """bf16 parameters round each step's result, but the next step starts from the master copy."""
    module = recipe_of(trainer).build()
    masters = {n: p.detach().float().clone() for n, p in module.named_parameters()}
    optimizer = trainer.optimizer(list(masters.values()))
    steps, losses = [], []
    for t in range(ITERATIONS):
        live = copy.deepcopy(module)
        with torch.no_grad():
            for name, parameter in live.named_parameters():
                parameter.copy_(masters[name])
        (part,) = parts_of(trainer, parts, t)
        loss = plain_loss(trainer, live, part)
        loss.backward()
        for name, parameter in live.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        steps.append({name: master.clone() for name, master in masters.items()})
        losses.append(float(loss.detach()))
    return steps, losses


def of_two(generator: np.random.Generator) -> sparkdl.Sample:
    sample = classified(generator)
    return sparkdl.Sample((sample.features, int(generator.integers(5))), sample.label)


def unlabelled(generator: np.random.Generator) -> sparkdl.Sample:
    return sparkdl.Sample(generator.normal(size=models.WIDTH))


ADAM = partial(torch.optim.Adam, lr=1e-2, fused=False)  # the kernel of a plain loop
NORMED = {"model": models.batch_normed, "optimizer": ADAM}
UNEVEN, ONE, TWO = (30, 2, 11), (43,), (30, 10)
RUNS = {
    **{name_of(case): of_grid(*case) for case in GRID},
    "frozen": Run(
        UNEVEN,
        {"model": models.frozen_mlp, "schedule": SCHEDULES["cosine"], "slices": 7},
        tolerance=1e-12,
        look=frozen_stay,
    ),
    "tied": Run(UNEVEN, {"model": models.Tied, "slices": 5}, look=still_tied),
    **{
        f"no gradient, {name}": Run(
            UNEVEN,
            {"model": models.Alternating, "optimizer": OPTIMIZERS[name], "slices": 4},
            look=idle_heads_stay,
        )
        for name in ("sgd", "adamw")
    },
    "a gradient on some replicas only": Run(
        UNEVEN,
        {"model": models.Routed, "optimizer": OPTIMIZERS["sgd"], "batch_size": 5},
        look=the_expert_moves_at_times,
    ),
    "most slices are empty": Run(
        UNEVEN,
        {"model": partial(mlp, torch.float32), "optimizer": OPTIMIZERS["adamw"], "slices": 40},
    ),
    "two inputs": Run((20, 3, 0, 20), {"model": models.TwoInputs, "slices": 3}, of_two),
    "batch norm on one replica": Run(
        ONE, {**NORMED, "slices": 3}, tolerance=0.0, look=batches_are_counted
    ),
    "batch norm of one of two": Run((24, 0), NORMED, reference=copies, look=batches_are_counted),
    "batch norm": Run(
        TWO,
        {"model": models.batch_normed_fp64, "optimizer": ADAM, "slices": 3},
        reference=copies,
        tolerance=1e-12,
        look=batches_are_counted,
    ),
    "buffers that are no floats": Run(
        (0, *TWO),
        {"model": models.Counting, "optimizer": ADAM, "slices": 2},
        reference=copies,
        look=buffers_keep_their_types,
    ),
    "buffers that follow rules": Run(
        (20, 3, 0, 20),
        {"model": models.remembering, "optimizer": ADAM, "slices": 3},
        reference=copies,
    ),
    "dropout": Run(
        (20, 3, 0, 20),
        {"model": models.dropped_out, "optimizer": ADAM, "slices": 3},
        reference=copies,
    ),
    "dropout draws anew": Run(
        TWO,
        {
            "model": models.Noisy,
            "optimizer": partial(torch.optim.SGD, lr=1.0),
            "loss": models.sum_of_rows,
            "label": None,
            "batch_size": 4,
        },
        unlabelled,
        reference=copies,
        look=masks_differ,
    ),
    "low precision": Run(
        ONE,
        {"model": models.Low, "optimizer": partial(torch.optim.SGD, lr=1e-3, momentum=0.9)},
        reference=with_masters,
        tolerance=0.0,
        look=masters_are_kept,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_local_engine_equals_one_process(name, record_property):
    run = RUNS[name]
    trainer, parts = run.begin()
    seen = fit_here(trainer, parts)
    steps, losses = run.reference(trainer, parts)
    error = worst_error(seen.steps, steps)
    record_property("error", error)
    assert error <= run.tolerance
    assert seen.losses == pytest.approx(losses, rel=10 * run.tolerance, abs=0)
    named = [*seen.trained.module.named_parameters(), *seen.trained.module.named_buffers()]
    for name, tensor in named:
        assert torch.equal(tensor, seen.steps[-1].get(name, tensor).to(tensor.dtype)), name
    assert not seen.trained.module.training
    run.look(seen)


ON_SPARK = [name for name in RUNS if not name.startswith("M")]
QUICK = [
    *("a gradient on some replicas only", "two inputs"),
    *("buffers that are no floats", "dropout draws anew"),
]
"""Cases that differ in what travels; the others differ in what replicas and slices compute."""


@pytest.mark.spark
@pytest.mark.parametrize("name", [*map(name_of, GRID_ON_SPARK), *soak_but(QUICK, ON_SPARK)])
def test_shuffle_engine_has_the_bits_of_the_local_one(spark, name):
    run = RUNS.get(name) or of_grid(*next(c for c in GRID_ON_SPARK if name_of(c) == name))
    trainer, parts = run.begin()
    here, there = fit_here(trainer, parts), fit_there(spark, trainer, parts)
    assert len(there.flats) == ITERATIONS
    assert_same_bits(there.flats, here.flats)
    assert there.losses == here.losses
    left, right = there.trained.module.state_dict(), here.trained.module.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    run.look(there)


def test_every_replica_count_slice_count_and_optimizer_runs_on_the_shuffle_engine():
    for position, all_values in enumerate(zip(*GRID, strict=True)):
        assert {case[position] for case in GRID_ON_SPARK} == set(all_values)


@pytest.mark.parametrize("wrong", ["unweighted", "one replica forgotten"])
def test_the_comparison_notices_a_wrong_mean(wrong):
    """A mistake of the size that uneven partitions provoke is far above the tolerance."""
    trainer, parts = of_grid(3, 3, "uneven", "sgd", "constant", "fp32").begin()

    def reduce(plan, contributions, out):
        chosen = contributions if wrong == "unweighted" else contributions[:-1]
        out.copy_(sum(c.gradient for c in chosen) / len(chosen))
        return ReducedGradient(out)

    with mock.patch.object(sparkdl.slices.update, "reduce_gradients", reduce):
        seen = fit_here(trainer, parts)
    assert worst_error(seen.steps, plainly(trainer, parts)[0]) > 1e-3


def test_dropout_follows_the_seed():
    trainer, parts = RUNS["dropout"].begin()
    other = trainer_of(parts.counts, model=models.dropped_out, optimizer=ADAM, seed=6)
    assert fit_here(trainer, parts).losses[0] != fit_here(other, parts).losses[0]

"""Steps of the user are exact for any number of replicas, slices and parts, and so are named losses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from feature_runs import BATCH_SIZE, CLASSES, Parts, assert_close, fit_here, plainly, trainer_of
from launch import in_turn

import sparkdl

pytestmark = pytest.mark.parity
SIZES = [((12, 0, 23, 8), 3), ((43,), 5)]
SOME = 1
"""Rows of a class up to this one are counted alone, of which replicas have unequal numbers."""


def losses_of(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    every = F.cross_entropy(output, target, reduction="none")
    first = target <= SOME
    return {
        "all": every.mean(),
        "size": output.pow(2).mean(),
        "first": (every[first].sum(), first.sum()),
    }


def by_rows(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    told = losses_of(module(batch["features"]), batch["label"])
    return {**told, "loss": told["all"] + 0.1 * told["size"]}


def summed(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """No loss is called "loss": the sum of all is minimized."""
    told = losses_of(module(batch["features"]), batch["label"])
    return {"all": told["all"], "size": 0.1 * told["size"]}


def of_some(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    told = losses_of(module(batch["features"]), batch["label"])
    return {"loss": told["first"], "all": told["all"]}


def minimized(step: Any, told: dict[str, Any]) -> torch.Tensor:
    if step is of_some:
        total, count = told["first"]
        return total / count.clamp(min=1)
    return told["all"] + 0.1 * told["size"]


STEPS = {"of some": of_some, "by rows": by_rows, "summed": summed}


@pytest.mark.parametrize(("case", "cut"), in_turn(itertools.product([3, 1], STEPS), SIZES), ids=str)
def test_a_step(case: tuple[int, str], cut: tuple[tuple[int, ...], int]) -> None:
    (accumulate, name), (sizes, slices) = case, cut
    step, parts = STEPS[name], Parts.of(sizes)
    trainer = trainer_of(sizes, slices, loss=None, step=step, accumulate=accumulate)
    seen = fit_here(trainer, parts)
    expected: list[dict[str, Any]] = []

    def loss(module: Any, part: Any) -> torch.Tensor:
        expected.append(losses_of(module(*part.inputs), *part.targets))
        return minimized(step, expected[-1])

    wanted, losses = plainly(trainer_of(sizes, slices), parts, loss)
    assert_close(seen.steps, wanted, 1e-11)
    assert seen.losses == pytest.approx(losses, rel=1e-11)
    for state, told in zip(seen.states, expected, strict=True):
        size = told["size"].item() * (0.1 if step is summed else 1.0)
        known = {"all": told["all"].item(), "size": size}
        if step is by_rows and told["first"][1]:
            known["first"] = (told["first"][0] / told["first"][1]).item()
        for name, value in state.losses.items():
            assert value == pytest.approx(known[name], rel=1e-11)
        assert state.losses.keys() <= known.keys()
        assert "all" in state.losses


def test_local_steps_add_up_what_they_show() -> None:
    parts = Parts.of((20, 20))
    trainer = trainer_of((20, 20), loss=None, step=by_rows, local_steps=2)
    one = fit_here(trainer, parts).states[0]
    assert one.losses["all"] + 0.1 * one.losses["size"] == pytest.approx(one.loss, rel=1e-11)
    assert one.samples == 2 * BATCH_SIZE


def test_the_result_of_a_step_is_a_model_like_any_other() -> None:
    parts = Parts.of((20, 20))
    trained = fit_here(trainer_of((20, 20), loss=None, step=by_rows), parts).trained
    assert trained.module(torch.zeros(2, 6, dtype=torch.float64)).shape == (2, CLASSES)
    assert set(trained.history.named_losses) == {"all", "size", "first"}
    assert isinstance(trained, sparkdl.TrainedModel)

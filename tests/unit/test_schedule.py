"""Schedules: torch's own, on a mirror of the parameter groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sparkdl.errors import ModelError
from sparkdl.replica.recipe import Recipe
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.train.schedule import Schedule

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    weight, bias = module.parameters()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.25}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def plan_of(optimizer: Callable[..., torch.optim.Optimizer] = SGD) -> OptimizerPlan:
    module = nn.Linear(3, 2)
    recipe = Recipe(module, torch.square, optimizer, 0)
    return OptimizerPlan.of(recipe, list(module.parameters()), module)


ROWS: dict[str, Callable[..., Any]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.1),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 5]),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=3),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=6),
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda i: 1 / (1 + i)),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=3),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=10),
    "warm-up, then decay": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=0.01), two_groups])
def test_values_are_those_of_torch(row: str, optimizer: Any) -> None:
    """Of every hyperparameter that a schedule turns: momentum and betas, too."""
    plan = plan_of(optimizer)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in plan.groups]
    groups = [{**g, "params": [p]} for g, p in zip(plan.groups, parameters, strict=True)]
    reference = plan.make(groups)
    scheduler = ROWS[row](reference)
    schedule = Schedule(plan, ROWS[row])
    seen = set()
    for _ in range(9):
        changes = schedule.changes()
        assert changes is not None
        for own, change, group in zip(plan.groups, changes, reference.param_groups, strict=True):
            expected = {key: value for key, value in group.items() if key != "params"}
            assert {**own, **change} == expected
        rates = tuple(group["lr"] for group in reference.param_groups)
        assert schedule.learning_rates == rates
        seen.add(rates)
        schedule.step()
        reference.step()
        scheduler.step()
    assert len(seen) > 2


def test_without_a_schedule_nothing_changes() -> None:
    schedule = Schedule(plan_of(two_groups), None)
    for _ in range(3):
        assert schedule.changes() is None
        assert schedule.learning_rates == (0.5, 0.25)
        schedule.step()


def test_only_what_changes_travels() -> None:
    schedule = Schedule(plan_of(), partial(lr_scheduler.StepLR, step_size=1, gamma=0.5))
    changes: Any = schedule.changes()
    assert changes[0].keys() == {"initial_lr"}
    schedule.step()
    (change,) = schedule.changes()  # type: ignore[misc]
    assert change == {"lr": 0.25, "initial_lr": 0.5}


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_values_that_were_handed_out_stay_what_they_were(lr: Any) -> None:
    """Torch changes a learning rate that is a tensor in place."""
    schedule = Schedule(plan_of(partial(torch.optim.SGD, lr=lr)), ROWS["ExponentialLR"])
    handed_out = []
    for _ in range(3):
        handed_out += schedule.changes() or ()
        schedule.step()
    rates = [float({"lr": 0.5, **change}["lr"]) for change in handed_out]
    assert rates == pytest.approx([0.5, 0.45, 0.405])


def test_a_schedule_leaves_the_recipe_alone() -> None:
    """A second fit starts from the same learning rate."""
    rate = torch.tensor(0.5)
    plan = plan_of(partial(torch.optim.SGD, lr=rate))
    Schedule(plan, ROWS["ExponentialLR"]).step()
    assert rate == 0.5
    assert plan.groups[0]["lr"] == 0.5


def test_stepping_warns_of_nothing() -> None:
    schedule = Schedule(plan_of(), ROWS["StepLR"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
        schedule.step()


def test_an_optimizer_without_a_learning_rate() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    assert Schedule(plan_of(Fixed), None).learning_rates == ()


def mistake(schedule: Any) -> str:
    with pytest.raises(ModelError) as caught:
        Schedule(plan_of(), schedule)
    return str(caught.value)


def test_a_schedule_that_cannot_be_built() -> None:
    assert mistake(partial(lr_scheduler.StepLR, gama=0.5)) == (
        "schedule cannot be built on the optimizer (TypeError: StepLR.__init__() got an unexpected "
        "keyword argument 'gama'). Give a partial of a torch.optim.lr_scheduler class, such as "
        "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
    )


def test_what_is_no_schedule() -> None:
    assert mistake(lambda optimizer: 0.5) == (
        "schedule gave a float, not a torch.optim.lr_scheduler.LRScheduler."
    )


def test_a_schedule_that_follows_a_metric_is_refused() -> None:
    """It would fail at its first step, after an iteration."""
    assert mistake(lr_scheduler.ReduceLROnPlateau) == (
        "schedule ReduceLROnPlateau wants a metric at each step, and schedules here follow the "
        "iteration alone. Use another, such as "
        "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
    )

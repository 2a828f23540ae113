"""Schedules: torch's own, on a mirror of the parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mistakes import message_of
from torch import nn
from torch.optim import lr_scheduler

from sparkdl.errors import ModelError
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, Validated
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def advance(schedule: Schedule, iterations: int = 1) -> None:
    schedule.after(TrainState(), TrainState(iteration=iterations))


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    weight, bias = module.parameters()
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.25}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def plan_of(optimizer: Callable[..., torch.optim.Optimizer] = SGD) -> OptimizerSpec:
    module = nn.Linear(3, 2)
    recipe = Recipe(module, torch.square, optimizer, 0)
    return OptimizerSpec.of(recipe, list(module.parameters()), module)


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
    "two at once": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
    ),
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
    (part,) = plan.parts
    reference = part.make(groups)
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
        advance(schedule)
        reference.step()
        scheduler.step()
    assert len(seen) > 2


def test_without_a_schedule_nothing_changes() -> None:
    schedule = Schedule(plan_of(two_groups), None)
    for _ in range(3):
        assert schedule.changes() is None
        assert schedule.learning_rates == (0.5, 0.25)
        advance(schedule)


def test_only_what_changes_travels() -> None:
    schedule = Schedule(plan_of(), partial(lr_scheduler.StepLR, step_size=1, gamma=0.5))
    changes: Any = schedule.changes()
    assert changes[0].keys() == {"initial_lr"}
    advance(schedule)
    (change,) = schedule.changes()  # type: ignore[misc]
    assert change == {"lr": 0.25, "initial_lr": 0.5}


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_values_that_were_handed_out_stay_what_they_were(lr: Any) -> None:
    """Torch changes a learning rate that is a tensor in place."""
    schedule = Schedule(plan_of(partial(torch.optim.SGD, lr=lr)), ROWS["ExponentialLR"])
    handed_out = []
    for _ in range(3):
        handed_out += schedule.changes() or ()
        advance(schedule)
    rates = [float({"lr": 0.5, **change}["lr"]) for change in handed_out]
    assert rates == pytest.approx([0.5, 0.45, 0.405])


def test_a_schedule_leaves_the_recipe_alone() -> None:
    """A second fit starts from the same learning rate."""
    rate = torch.tensor(0.5)
    plan = plan_of(partial(torch.optim.SGD, lr=rate))
    advance(Schedule(plan, ROWS["ExponentialLR"]))
    assert rate == 0.5
    assert plan.groups[0]["lr"] == 0.5


def test_an_optimizer_without_a_learning_rate() -> None:
    class Fixed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self) -> None:  # type: ignore[override]
            pass

    assert Schedule(plan_of(Fixed), None).learning_rates == ()


MISTAKES = {
    partial(lr_scheduler.StepLR, gama=0.5): (
        "schedule cannot be built on the optimizer (TypeError: StepLR.__init__() got an unexpected "
        "keyword argument 'gama'). Give a partial of a torch.optim.lr_scheduler class, such as "
        "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
    ),
    # Some schedulers would find out about text in the first step, and some never.
    partial(lr_scheduler.StepLR, step_size="3"): (
        'the schedule cannot be built: step_size is the text "3": give a number, step_size=3.'
    ),
    partial(lr_scheduler.MultiStepLR, milestones=[1], gamma="0.1"): (
        'the schedule cannot be built: gamma is the text "0.1": give a number, gamma=0.1.'
    ),
    lambda optimizer: 0.5: "schedule gave a float, not a torch.optim.lr_scheduler.LRScheduler.",
}


@pytest.mark.parametrize(("make", "message"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_what_is_no_schedule(make: Any, message: str) -> None:
    assert message_of(ModelError, Schedule, plan_of(), make) == message


# When it steps


def state(
    iteration: int, per_epoch: int = 4, metrics: tuple[dict[str, float], ...] = ()
) -> TrainState:
    """After ``iteration`` iterations, with a validation at the end of each of the first epochs."""
    validations = tuple(
        Validated(iteration=per_epoch * n, epoch=n, metrics=values)
        for n, values in enumerate(metrics, 1)
        if per_epoch * n <= iteration
    )
    return TrainState(iteration=iteration, epoch=iteration // per_epoch, validations=validations)


def live(schedule: Schedule, last: int, metrics: tuple[dict[str, float], ...] = ()) -> list[Any]:
    """What the loop sees: the learning rates at each iteration, and at last the changes."""
    seen: list[Any] = []
    for t in range(last):
        seen.append(schedule.learning_rates)
        schedule.after(state(t, metrics=metrics), state(t + 1, metrics=metrics))
    return [*seen, schedule.changes()]


HALVE = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
PLATEAU = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)


@pytest.mark.filterwarnings("error")
def test_per_epoch_it_steps_between_two_epochs() -> None:
    *rates, _ = live(Schedule(plan_of(), HALVE, "epoch"), 9)
    assert rates == [(0.5,)] * 4 + [(0.25,)] * 4 + [(0.125,)]


def test_a_plateau_steps_at_validations_by_their_metric() -> None:
    metrics = (
        {"accuracy": 0.5, "loss": 1.0},
        {"accuracy": 0.6, "loss": 1.0},
        {"accuracy": 0.6, "loss": 0.1},
    )
    by_accuracy = Schedule(plan_of(), partial(PLATEAU, mode="max"), metric="accuracy")
    *rates, _ = live(by_accuracy, 14, metrics)
    assert rates == [(0.5,)] * 12 + [(0.25,)] * 2
    by_loss = Schedule(plan_of(), PLATEAU, "epoch", metric="loss")
    *rates, _ = live(by_loss, 14, metrics)
    assert rates == [(0.5,)] * 8 + [(0.25,)] * 6


def test_a_plateau_passes_over_validations_without_its_metric() -> None:
    """There was nothing to measure, or the run before had another validation."""
    metrics = ({"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0}, {"loss": 2.0, "accuracy": 0.5})
    schedule = Schedule(plan_of(), partial(PLATEAU, mode="max"), metric="accuracy")
    schedule.check(None, 1, {"loss": False, "accuracy": True})
    schedule.catch_up(state(9, metrics=metrics[:2]))
    assert schedule.learning_rates == (0.5,)
    schedule.after(state(9, metrics=metrics[:2]), state(14, metrics=metrics))
    assert schedule.learning_rates == (0.25,)


def test_a_validation_is_seen_once() -> None:
    """The loop may say what happened before the validation and after it."""
    schedule = Schedule(plan_of(), PLATEAU)
    metrics = ({"loss": 1.0}, {"loss": 2.0})
    before, validated = state(7, metrics=metrics), state(8, metrics=metrics)
    schedule.catch_up(before)
    schedule.after(before, state(8, metrics=metrics[:1]))
    schedule.after(state(8, metrics=metrics[:1]), validated)
    schedule.after(validated, validated)
    assert schedule.learning_rates == (0.25,)


METRICS = tuple({"loss": value} for value in (1.0, 1.5, 0.7, 0.8, 0.9))


@pytest.mark.parametrize("per", ["iteration", "epoch"])
@pytest.mark.parametrize("row", [*ROWS, "plateau"])
@pytest.mark.parametrize("stop", [0, 3, 9])
def test_catching_up_gives_the_bits_of_a_live_run(row: str, per: str, stop: int) -> None:
    make = PLATEAU if row == "plateau" else ROWS[row]
    one, other = (Schedule(plan_of(two_groups), make, per) for _ in range(2))
    expected = live(one, stop, METRICS)[-1]
    other.catch_up(state(stop, metrics=METRICS))
    assert other.changes() == expected
    assert other.learning_rates == one.learning_rates
    for t in range(stop, stop + 6):
        for schedule in (one, other):
            schedule.after(state(t, metrics=METRICS), state(t + 1, metrics=METRICS))
        assert one.changes() == other.changes()


def test_each_of_several_optimizers_has_the_schedule() -> None:
    plan = plan_of(
        {"weight": partial(torch.optim.SGD, lr=1.0), "": partial(torch.optim.Adam, lr=0.1)}
    )
    schedule = Schedule(plan, HALVE)
    assert schedule.learning_rates == (1.0, 0.1)
    advance(schedule, 2)
    assert schedule.learning_rates == (0.25, 0.025)
    assert [change["lr"] for change in schedule.changes() or ()] == [0.25, 0.025]


# Running out


def test_a_schedule_that_runs_out_keeps_its_values_and_says_so_once(caplog: Any) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=5)
    schedule = Schedule(plan_of(), make)
    *rates, last = live(schedule, 5)
    assert schedule.learning_rates == rates[-1] == pytest.approx((1 / 25 / 1e4,))
    assert not caplog.records  # nobody has asked for more
    for t in range(5, 9):
        schedule.after(state(t), state(t + 1))
        assert schedule.changes() == last
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("sparkdl", "WARNING")
    assert record.getMessage() == (
        "schedule OneCycleLR cannot make step 6 (total_steps=5): the learning rate stays at 4e-06"
    )


def test_one_that_runs_out_does_not_stop_another(caplog: Any) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        if isinstance(optimizer, torch.optim.Adam):
            return HALVE(optimizer)
        return lr_scheduler.LambdaLR(optimizer, lambda i: [1.0, 0.5][i])

    plan = plan_of(
        {"weight": partial(torch.optim.SGD, lr=1.0), "": partial(torch.optim.Adam, lr=1.0)}
    )
    schedule = Schedule(plan, make)
    advance(schedule, 4)
    assert schedule.learning_rates == (0.5, 0.0625)
    (record,) = caplog.records
    assert record.getMessage() == (
        "schedule LambdaLR cannot make step 2 (IndexError: list index out of range): the learning "
        "rate stays at 0.5"
    )


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)


def after_warm_up(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = lr_scheduler.ConstantLR(optimizer, total_iters=5)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, one_cycle(optimizer)], milestones=[5])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([HALVE(optimizer), one_cycle(optimizer)])


@pytest.mark.parametrize(
    ("make", "per", "total", "fits", "too_long", "needed"),
    [
        (one_cycle, "iteration", 10, 10, 11, "11 iterations: set total_steps=11."),
        (one_cycle, "epoch", 10, 40, 41, "11 epochs: set total_steps=11."),
        (after_warm_up, "iteration", 15, 15, 16, "16 iterations: set total_steps=16."),
        (chained, "iteration", 10, 10, 12, "12 iterations: set total_steps=12."),
    ],
)
def test_a_schedule_shorter_than_the_run_is_refused(
    make: Any, per: str, total: int, fits: int, too_long: int, needed: str
) -> None:
    schedule = Schedule(plan_of(), make, per)
    for limit in (None, 1, fits):
        schedule.check(limit, 4)
    assert message_of(ModelError, schedule.check, too_long, 4) == (
        f"schedule ends after total_steps={total}, and the run has {needed}"
    )


# Metrics


BOTH = {"loss": False, "accuracy": True}
ONE_METRIC = (
    "schedule ReduceLROnPlateau follows one metric of the validation, which gives loss, accuracy: "
    "name one of them with schedule_metric"
)


@pytest.mark.parametrize(
    ("make", "options", "metrics", "message"),
    [
        (
            *(PLATEAU, {}, []),
            "schedule ReduceLROnPlateau follows a metric of the validation, but there is no "
            "validation: pass validation=..., or use a schedule that follows the iterations.",
        ),
        (PLATEAU, {}, BOTH, f"{ONE_METRIC}."),
        (
            *(PLATEAU, {"metric": "acuracy"}, BOTH),
            f'{ONE_METRIC}. "acuracy" is not one of them. Did you mean "accuracy"?',
        ),
    ],
    ids=["no validation", "which", "misspelt"],
)
def test_a_plateau_has_one_metric(
    make: Any, options: dict[str, str], metrics: dict[str, bool], message: str
) -> None:
    def check() -> None:
        Schedule(plan_of(), make, **options).check(10, metrics=metrics)

    assert message_of(ModelError, check) == message
    Schedule(plan_of(), PLATEAU).check(10, metrics={"loss": False})
    Schedule(plan_of(), partial(PLATEAU, mode="max"), metric="accuracy").check(10, metrics=BOTH)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("metric", BOTH)
def test_a_plateau_of_the_other_direction_is_told(
    mode: str, metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(PLATEAU, mode=mode)
    Schedule(plan_of(), make, metric=metric).check(10, metrics=BOTH)
    right = mode == ("max" if metric == "accuracy" else "min")
    assert ("the learning rate would fall while the metric improves" in caplog.text) != right

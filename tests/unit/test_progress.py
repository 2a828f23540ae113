"""From one state of a run to the next: counters, skips, and what is said of numbers not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.errors import TrainingError
from sparkdl.loop.advance import advance, describe, first_state, next_iteration
from sparkdl.loop.callbacks import ProgressBar
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.engine import IterationResult
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, Validated, next_counters
from sparkdl.loop.validation import is_better
from sparkdl.model.policy import TrainingOptions
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec

STATE = TrainState(
    iteration=11, epoch=2, position=3, samples=100, loss=0.5, skipped=1, iterations_per_epoch=4
)
FP16, FP32 = TrainingOptions(precision="fp16"), TrainingOptions()


def after(state: TrainState, result: IterationResult, policy: TrainingOptions = FP32) -> TrainState:
    return advance(state, result, policy, (0.1, 0.2), 7.5)


def test_counters() -> None:
    result = IterationResult(0.25, 8, {"forward": 1.0}, gradient_norm=3.0, histograms=None)
    found = after(replace(STATE, position=1), result)
    assert (found.iteration, found.epoch, found.position, found.samples) == (12, 2, 2, 108)
    assert (found.loss, found.learning_rates, found.seconds) == (0.25, (0.1, 0.2), 7.5)
    assert (found.gradient_norm, found.timings) == (3.0, {"forward": 1.0})
    assert (found.skipped, found.loss_scale, found.loss_scale_age) == (1, 1.0, 0)


def test_the_last_position_ends_the_epoch() -> None:
    found = after(STATE, IterationResult(0.25, 8))
    assert (found.epoch, found.position) == (3, 0)


@pytest.mark.parametrize("position", range(4))
def test_expected_counts_as_the_loop_does(position: int) -> None:
    state = replace(STATE, position=position)
    found = after(state, IterationResult(0.25, 8))
    coming = next_counters(state)
    assert (coming.iteration, coming.epoch) == (found.iteration, found.epoch)


BAD = IterationResult(math.nan, 8, not_finite={1: "the loss (nan)", 3: 'the gradient of "a.b"'})


def test_raise_says_where_and_what_to_do() -> None:
    with pytest.raises(TrainingError) as error:
        after(STATE, BAD)
    assert str(error.value) == (
        "iteration 12, epoch 3: not finite: the loss (nan) in replica 1; "
        'the gradient of "a.b" in replica 3 (mean loss nan). Lower the learning rate, clip with '
        'clip_norm=1.0, or pass on_nan="skip".'
    )


def test_raise_knows_that_fp16_ends_early() -> None:
    with pytest.raises(TrainingError, match=r"fp16 ends at 65,504: use wire=\"bf16\". Else: lower"):
        after(STATE, BAD, TrainingOptions(wire="fp16"))


def test_skip_counts() -> None:
    found = after(STATE, BAD, TrainingOptions(on_nan="skip"))
    assert (found.iteration, found.skipped, found.epoch) == (12, 2, 3)


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_an_overflow_is_the_loss_scales_to_mend(on_nan: str) -> None:
    state = replace(STATE, loss_scale=1024.0, loss_scale_age=5)
    found = after(state, BAD, replace(FP16, on_nan=on_nan))
    assert (found.loss_scale, found.loss_scale_age, found.skipped) == (512.0, 0, 2)
    fine = after(state, IterationResult(0.1, 8), FP16)
    assert (fine.loss_scale, fine.loss_scale_age, fine.skipped) == (1024.0, 6, 1)


def test_with_the_scale_at_one_it_is_an_error() -> None:
    with pytest.raises(TrainingError):
        after(STATE, BAD, FP16)
    found = after(STATE, BAD, replace(FP16, on_nan="skip"))
    assert (found.loss_scale, found.skipped) == (1.0, 2)


def test_first_state() -> None:
    assert first_state(TrainingOptions()) == TrainState()
    assert first_state(FP16).loss_scale == torch.amp.GradScaler("cpu").get_scale()
    assert first_state(TrainingOptions(precision="bf16")).loss_scale == 1.0


def test_next_iteration() -> None:
    module = nn.Linear(2, 2)
    recipe = Recipe(module, nn.MSELoss(), partial(torch.optim.SGD, lr=0.5), 0)
    plan = OptimizerSpec.of(recipe, list(module.parameters()), module)
    schedule = Schedule(plan, partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
    state = replace(STATE, loss_scale=8.0)
    schedule.catch_up(replace(TrainState(), iteration=2))
    found = next_iteration(state, schedule, True)
    assert (found.index, found.epoch, found.batch) == (11, 2, 3)
    assert (found.loss_scale, found.histograms) == (8.0, True)
    assert found.hyperparameters[0]["lr"] == 0.125
    assert found.description == "sparkdl: epoch 3 · iteration 12 · loss 0.5"


def test_describe_has_no_loss_before_the_first() -> None:
    assert describe(TrainState()) == "sparkdl: epoch 1 · iteration 1"


@pytest.mark.parametrize("trigger", [sparkdl.every(3), sparkdl.every_epoch()], ids=str)
def test_histograms_are_asked_for_the_iteration_that_makes_the_trigger_true(trigger) -> None:
    config = LoopConfig(stop=sparkdl.max_epoch(9), options=TrainingOptions(), histograms=trigger)
    state, asked, due = TrainState(iterations_per_epoch=4), [], []
    before = state
    for _ in range(13):
        asked.append(config.wants_histograms(before, state))
        before, state = state, after(state, IterationResult(0.1, 1))
        due.append(trigger(before, state))
    assert asked == due
    assert sum(due) in (3, 4)
    assert not replace(config, histograms=None).wants_histograms(state, state)


def test_histograms_by_time_are_asked_for_the_iteration_after() -> None:
    """How long an iteration takes is not known beforehand."""
    every = sparkdl.every_seconds(10)
    config = LoopConfig(stop=sparkdl.max_epoch(9), options=TrainingOptions(), histograms=every)
    before = state = TrainState(iterations_per_epoch=4)
    asked = []
    for _ in range(9):
        asked.append(config.wants_histograms(before, state))
        before, state = (
            state,
            replace(after(state, IterationResult(0.1, 1)), seconds=state.seconds + 4),
        )
    assert asked == [False, False, False, True, False, True, False, False, True]


def bar_of(monkeypatch: pytest.MonkeyPatch, state: TrainState, one_pass: bool) -> list[Any]:
    """What the bar says first, and after the iteration that follows ``state``."""
    import tqdm.auto

    said: list[Any] = []

    class Bar:
        def __init__(self, total: int, initial: int, desc: str, **_: Any) -> None:
            said.append((initial, total, desc))

        def update(self) -> None: ...
        def close(self) -> None: ...
        def set_postfix_str(self, text: str) -> None: ...
        def set_description(self, text: str, refresh: bool) -> None:
            said.append(text)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    trainer = sparkdl.Trainer(
        model=nn.Linear(2, 2),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        stop=sparkdl.max_epoch(4),
    )
    bar = ProgressBar("true", one_pass)
    bar.on_fit_start(trainer, state)
    bar.on_iteration_end(trainer, after(state, IterationResult(0.1, 1)))
    bar.close()
    return said


def test_the_bar_of_a_resumed_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = TrainState(iterations_per_epoch=5)
    assert bar_of(monkeypatch, begun, False) == [(0, 20, "epoch 1"), "epoch 1"]
    resumed = replace(begun, iteration=12, epoch=2, position=2)
    assert bar_of(monkeypatch, resumed, False) == [(12, 20, "epoch 3"), "epoch 3"]


def test_the_bar_of_a_pass_over_new_data_shows_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes may be of any length, so what was before says nothing of it."""
    third = TrainState(iterations_per_epoch=7, iteration=11, epoch=2)
    assert bar_of(monkeypatch, third, True) == [(0, 7, "epoch 3"), "epoch 3"]


def test_what_was_not_measured_is_not_better() -> None:
    best = Validated(iteration=1, epoch=1, metrics={"loss": 1.0, "accuracy": 0.5})
    nothing = Validated(iteration=2, epoch=2, metrics={"loss": 0.5})
    assert not is_better(nothing, best, "accuracy", True)
    assert not is_better(nothing, None, "accuracy", True)
    assert is_better(nothing, best, "loss", False)

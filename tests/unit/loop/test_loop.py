"""The loop over an engine of forty lines: all that it asks of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.data.epoch import EpochPlan
from sparkdl.loop.advance import IterationResult, first_state
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.loop import LoopConfig, train
from sparkdl.loop.schedule import Schedule
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import Recipe
from sparkdl.replica.iteration import Iteration
from sparkdl.slices.optimizer import OptimizerSpec

X = torch.arange(12.0).reshape(12, 1)


class TensorEngine:
    """Least squares by gradient descent, on one tensor."""

    begins_ahead, recoveries = False, ()

    def __init__(self) -> None:
        self.plan = EpochPlan((12,), 4)
        self.weight = torch.zeros(1)

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        ((start, stop),) = self.plan.rows(iteration.batch)
        x = X[start:stop]
        error = x @ self.weight[:, None] - 2 * x
        self.weight -= 0.01 * (x * error).mean()
        return IterationResult((error**2).mean().item(), stop - start)


class Heard(sparkdl.Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.events.append(name.removeprefix("on_"))
        return super().__getattribute__(name)


def run(stop: sparkdl.Trigger, callbacks: Sequence[sparkdl.Callback] = ()) -> tuple[Any, ...]:
    engine, model = TensorEngine(), nn.Linear(1, 1)
    recipe = Recipe(model, nn.MSELoss(), torch.optim.SGD, 0)
    schedule = Schedule(
        OptimizerSpec.of(recipe, list(model.parameters()), model), None, "iteration"
    )
    config, history = LoopConfig(stop=stop, options=TrainingOptions()), History()
    state = replace(first_state(config.options), iterations_per_epoch=engine.plan.num_iterations)
    asked = Interrupt()
    end = train(None, config, engine, schedule, [], callbacks, state, history, asked)
    return engine, end, history


def test_the_loop_trains_over_an_engine_of_tensors() -> None:
    heard = Heard()
    engine, end, history = run(sparkdl.max_epoch(2), [heard])
    assert (end.epoch, end.iteration, end.position, end.samples) == (2, 6, 0, 24)
    assert len(history) == 6
    assert history.losses[-1] < history.losses[0]
    assert history.ended_by == "MaxEpoch(epochs=2)"
    assert engine.weight.item() == pytest.approx(2, abs=0.5)
    epoch = ["epoch_start", *["iteration_start", "iteration_end"] * 3, "epoch_end"]
    assert heard.events == ["fit_start", *epoch * 2, "fit_end"]


def test_a_callback_ends_the_training() -> None:
    class Enough(sparkdl.Callback):
        def on_iteration_end(self, trainer: Any, state: sparkdl.TrainState) -> None:
            if state.iteration == 2:
                raise sparkdl.StopTraining("enough")

    _, end, history = run(sparkdl.max_epoch(2), [Enough()])
    assert end.iteration == 2
    assert (history.stopped, history.ended_by) == ("callback: enough", None)


def test_the_history_names_the_trigger_that_was_true() -> None:
    stop = (
        sparkdl.max_epoch(9) | sparkdl.max_iteration(8) & sparkdl.every(2) | sparkdl.min_loss(9e9)
    )
    for trigger, reason in (
        (stop, "MinLoss(loss=9000000000.0)"),
        (~~sparkdl.max_epoch(1), "MaxEpoch(epochs=1)"),
    ):
        assert run(trigger, [])[2].ended_by == reason

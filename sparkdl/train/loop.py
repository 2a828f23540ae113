"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparkdl.train.callbacks import Callback
from sparkdl.train.engine import Engine, Iteration
from sparkdl.train.history import History
from sparkdl.train.schedule import Schedule
from sparkdl.train.state import TrainState

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


def train(
    trainer: Trainer, engine: Engine, schedule: Schedule, callbacks: Sequence[Callback]
) -> History:
    """Iterate until ``trainer.stop`` says so; what happened."""
    history = History()
    state = TrainState(iterations_per_epoch=engine.plan.num_iterations)
    previous = state

    def tell(hook: str) -> None:
        for callback in callbacks:
            getattr(callback, hook)(trainer, state)

    tell("on_fit_start")
    started = time.perf_counter()
    while not trainer.stop(previous, state):
        epoch, batch = divmod(state.iteration, engine.plan.num_iterations)
        if batch == 0:
            tell("on_epoch_start")
        tell("on_iteration_start")
        rates = schedule.learning_rates
        result = engine.step(
            Iteration(state.iteration, epoch, batch, schedule.changes(), describe(state))
        )
        previous, state = (
            state,
            TrainState(
                iteration=state.iteration + 1,
                epoch=epoch + (batch + 1 == engine.plan.num_iterations),
                samples=state.samples + result.samples,
                loss=result.loss,
                learning_rates=rates,
                seconds=time.perf_counter() - started,
                iterations_per_epoch=engine.plan.num_iterations,
            ),
        )
        history.append(state, epoch + 1)
        schedule.after(previous, state)
        tell("on_iteration_end")
        if state.epoch > previous.epoch:
            tell("on_epoch_end")
    tell("on_fit_end")
    return history


def describe(state: TrainState) -> str:
    """What the Spark UI shows for the coming iteration."""
    epoch = state.iteration // state.iterations_per_epoch + 1
    text = f"sparkdl: epoch {epoch} · iteration {state.iteration + 1}"
    return text if state.iteration == 0 else f"{text} · loss {state.loss:.4g}"

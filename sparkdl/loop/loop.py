"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from sparkdl.loop.advance import advance, previous_state
from sparkdl.loop.callbacks import Callback, StopTraining
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.engine import TrainingEngine
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import INTERRUPTED, Interrupt
from sparkdl.loop.lookahead import Lookahead
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.loop.trigger import Trigger


class PeriodicTask(Protocol):
    """What may happen after an iteration: validation, a checkpoint."""

    hook: str
    """The callbacks' hook that is told of it."""
    every: Trigger
    """When it is due."""

    def __call__(self, previous: TrainState, state: TrainState) -> TrainState:
        """Do it, where it is due, and return what is known since; else ``state`` itself."""

    def finish(self, state: TrainState) -> TrainState:
        """Training ends here: do one thing of what is left to be done. Returns likewise; ``state``
        itself where nothing is left."""


def train(
    trainer: object,
    config: LoopConfig,
    engine: TrainingEngine,
    schedule: Schedule,
    stages: Sequence[PeriodicTask],
    callbacks: Sequence[Callback],
    state: TrainState,
    history: History,
    interrupt: Interrupt,
) -> TrainState:
    """Iterate until ``config.stop`` says so, or a callback or the user: see :attr:`History.stopped`.

    Args:
        trainer: Given to the callbacks; the loop does not look at it.
        config: What the loop decides by.
        engine: Runs the iterations.
        schedule: The learning rates; stands at ``state``.
        stages: What may be due after an iteration, in order.
        callbacks: Told of every event, in order.
        state: Where the run begins, or goes on.
        history: The run's history, which grows.
        interrupt: Whether the user has asked for the end.

    Returns:
        The state where the run ended.

    Raises:
        KeyboardInterrupt: An iteration failed that the user has interrupted: what was asked to end
            with it may have ended before it, such as Spark.
    """
    recoveries = engine.recoveries
    previous = previous_state(state, history)
    between = [stage.every for stage in stages]
    foresight = Lookahead(config, between, schedule, state, ahead=engine.begins_ahead)
    history.stopped = None

    def tell(hook: str) -> None:
        for callback in callbacks:
            try:
                getattr(callback, hook)(trainer, state)
            except StopTraining as asked:
                history.stopped = history.stopped or f"callback: {asked}".removesuffix(": ")

    def stopped() -> bool:
        if interrupt.asked:
            history.stopped = history.stopped or INTERRUPTED
        return history.stopped is not None

    def after(stage: PeriodicTask, changed: TrainState) -> None:
        nonlocal state
        known, state = state, changed
        told_of_losses()
        if state is not known:
            tell(stage.hook)

    def told_of_losses() -> None:
        nonlocal recoveries
        while recoveries < engine.recoveries:  # more than one may have been met in one call
            recoveries += 1
            tell("on_recovery")

    tell("on_fit_start")
    started = time.monotonic() - state.seconds
    while not (foresight.cut() if stopped() else config.stop(previous, state)):
        if state.position == 0:
            tell("on_epoch_start")
        tell("on_iteration_start")
        planned, then = foresight.plan(previous, state)
        rates, epoch = planned.learning_rates, state.epoch + 1
        try:
            result = engine.run(planned.iteration, then)
        except Exception as error:
            if interrupt.asked:
                raise KeyboardInterrupt from error
            raise
        told_of_losses()
        seconds = (result.ended or time.monotonic()) - started
        previous, state = state, advance(state, result, config.options, rates, seconds)
        history.append(state, epoch)
        tell("on_iteration_end")
        for stage in stages:
            after(stage, stage(previous, state))
        if state.epoch > previous.epoch:
            tell("on_epoch_end")
    for stage in stages:
        left = None
        while left is not state:
            left = state
            after(stage, stage.finish(state))
    tell("on_fit_end")
    return state

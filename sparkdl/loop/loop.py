"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from sparkdl.codec.describe import without_credentials
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
    """Work that may be due after an iteration, such as a validation or a checkpoint."""

    hook: str
    """The callbacks' hook that is called after it."""
    every: Trigger
    """The trigger."""

    def __call__(self, previous: TrainState, state: TrainState) -> TrainState:
        """Do the work if it is due, and return the state with its results; otherwise return
        ``state`` itself."""

    def finish(self, state: TrainState) -> TrainState:
        """Do one piece of the work that is left when training ends, and return the state with its
        results.

        Return ``state`` itself if nothing is left.
        """


def train(
    trainer: object,
    config: LoopConfig,
    engine: TrainingEngine,
    schedule: Schedule,
    periodic: Sequence[PeriodicTask],
    callbacks: Sequence[Callback],
    state: TrainState,
    history: History,
    interrupt: Interrupt,
) -> TrainState:
    """Iterate until ``config.stop`` is true, or a callback or the user ends the run.

    Return the last state; see :attr:`History.stopped`. ``schedule`` must stand at ``state``;
    ``trainer`` is only passed to the callbacks. Raise KeyboardInterrupt if an iteration failed
    after the user's interrupt, which may have ended something that it needs, such as Spark.
    """
    recoveries = len(engine.recoveries)
    previous = previous_state(state, history)
    between = [task.every for task in periodic]
    lookahead = Lookahead(config, between, schedule, state, ahead=engine.begins_ahead)
    history.stopped = history.ended_by = None

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

    def after(task: PeriodicTask, changed: TrainState) -> None:
        nonlocal state
        known, state = state, changed
        notify_recoveries()
        if state is not known:
            if state.checkpoint != known.checkpoint:
                text = without_credentials(str(state.checkpoint))
                history.note_event("checkpoint", state.iteration, time.monotonic() - begun, text)
            tell(task.hook)

    def notify_recoveries() -> None:
        nonlocal recoveries
        for recovery in engine.recoveries[
            recoveries:
        ]:  # one call may have recovered more than once
            recoveries += 1
            history.note_event("recovery", state.iteration, recovery.seconds, recovery.text)
            tell("on_recovery")

    tell("on_fit_start")
    begun = time.monotonic()
    started = time.monotonic() - state.seconds
    while not (lookahead.cut() if stopped() else config.stop(previous, state)):
        if state.position == 0:
            tell("on_epoch_start")
        tell("on_iteration_start")
        planned, then = lookahead.plan(previous, state)
        rates, epoch = planned.learning_rates, state.epoch + 1
        try:
            result = engine.run(planned.iteration, then)
        except Exception as error:
            if interrupt.asked:
                raise KeyboardInterrupt from error
            raise
        notify_recoveries()
        seconds = (result.ended or time.monotonic()) - started
        previous, state = state, advance(state, result, config.options, rates, seconds)
        history.append(state, epoch)
        tell("on_iteration_end")
        for task in periodic:
            begun = time.monotonic()
            after(task, task(previous, state))
        if state.epoch > previous.epoch:
            tell("on_epoch_end")
    if history.stopped is None:
        history.ended_by = repr(config.stop.true_part(previous, state))
    for task in periodic:
        left = None
        while left is not state:
            left, begun = state, time.monotonic()
            after(task, task.finish(state))
    tell("on_fit_end")
    return state

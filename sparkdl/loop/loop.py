"""The training loop.

An engine whose ranks wait for the driver between two iterations can get several at once. Those that
are certain to follow are known in advance if the stop, the periodic tasks, the histograms, the
learning rates and the loss scale depend only on counters and on past validations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sparkdl.codec.describe import without_credentials
from sparkdl.loop.advance import advance, describe, next_iteration, previous_state
from sparkdl.loop.callbacks import Callback, StopTraining
from sparkdl.loop.engine import TrainingEngine
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import INTERRUPTED, Interrupt
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, next_counters
from sparkdl.loop.triggers import Trigger
from sparkdl.model.buffers import TrainingOptions
from sparkdl.replica.iteration import Decisions, Iteration

MOST, SECONDS = 8, 0.25
"""The largest number of iterations that are planned ahead, and the time in seconds that they may
take (at least one is planned)."""


@dataclass(frozen=True)
class PlannedIteration:
    """An iteration and its learning rates."""

    iteration: Iteration
    learning_rates: tuple[float, ...]


class Lookahead:
    """A plan of the coming iterations; ``schedule`` must stand at ``state``.

    ``between`` has the triggers of the work between iterations, without the stop.
    """

    def __init__(
        self,
        config: LoopConfig,
        between: Sequence[Trigger],
        schedule: Schedule,
        state: TrainState,
        ahead: bool = True,
    ) -> None:
        self._config, self._schedule = config, schedule
        self._between = [config.stop, *between]
        asked = [*self._between, *([] if config.histograms is None else [config.histograms])]
        predictable = all(trigger.predictable for trigger in asked)
        self._sees = ahead and not config.options.scales_loss and predictable
        self._at = state
        self._coming: deque[PlannedIteration] = deque()

    def plan(
        self, previous: TrainState, state: TrainState
    ) -> tuple[PlannedIteration, tuple[Iteration, ...]]:
        """Return the iteration that begins at ``state``, and those after it, as far as they are
        planned.

        ``previous`` is the state before ``state``.
        """
        if not self._coming:
            self._add(previous, state)
        now = self._coming.popleft()
        # described anew, because the loss was not known when the iteration was planned
        described = replace(now.iteration, description=describe(state))
        if self._sees and len(self._coming) <= MOST // 2:
            self._look_ahead(state)
        return replace(now, iteration=described), tuple(
            planned.iteration for planned in self._coming
        )

    def cut(self) -> bool:
        """Stop planning ahead. Return whether :meth:`plan` has returned all iterations that it
        announced."""
        self._sees = False
        return not self._coming

    def _look_ahead(self, state: TrainState) -> None:
        seconds = state.timings.get("iteration", SECONDS)
        many = max(1, min(MOST, int(SECONDS / seconds) if seconds else MOST))
        while len(self._coming) < many:
            coming = next_counters(self._at)
            if any(trigger(self._at, coming) for trigger in self._between):
                return
            self._add(self._at, coming)

    def _add(self, previous: TrainState, state: TrainState) -> None:
        """Append the iteration that begins at ``state``."""
        self._schedule.after(self._at, state)
        self._at = state
        histograms = self._config.wants_histograms(previous, state)
        decisions = self._config.recorded.get(state.iteration + 1)
        iteration = next_iteration(state, self._schedule, histograms, decisions)
        self._coming.append(PlannedIteration(iteration, self._schedule.learning_rates))


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The constants of a run that its loop uses."""

    stop: Trigger
    options: TrainingOptions
    histograms: Trigger | None = None  # None: never
    recorded: Mapping[int, Decisions] = field(default_factory=dict)  # by iteration, from 1

    def wants_histograms(self, previous: TrainState, state: TrainState) -> bool:
        """Return whether the iteration after ``state``, which came after ``previous``, reports
        histograms.

        Counters are those of the coming iteration. The time is that of the iteration before,
        because the duration of an iteration is not known in advance.
        """
        if self.histograms is None:
            return False
        before = replace(state, seconds=previous.seconds)
        return self.histograms(before, next_counters(state))


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

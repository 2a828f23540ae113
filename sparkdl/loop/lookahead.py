"""The next iteration, and the iterations that are certain to follow it.

An engine whose ranks wait for the driver between two iterations can get several at once. They are
known in advance if the stop, the periodic tasks, the histograms, the learning rates and the loss
scale depend only on counters and on past validations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkdl.loop.advance import describe, next_iteration
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, next_counters
from sparkdl.loop.trigger import Trigger
from sparkdl.replica.iteration import Iteration

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
        decisions = self._config.recorded_decisions(state)
        iteration = next_iteration(state, self._schedule, histograms, decisions)
        self._coming.append(PlannedIteration(iteration, self._schedule.learning_rates))

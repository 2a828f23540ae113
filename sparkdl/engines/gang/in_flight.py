"""Iterations that the ranks of a gang have been asked to run, some of them ahead of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkdl.engines.gang.rank import CallMethod
from sparkdl.engines.gang.rank_messages import RankReport
from sparkdl.gang.rank_group import RankGroup
from sparkdl.replica.iteration import Iteration, IterationRows


@dataclass(frozen=True)
class FinishedIteration:
    """The reports of an iteration."""

    results: list[RankReport]
    seconds: float  # without those of earlier iterations in flight
    ended: float


@dataclass
class _Asked:
    iteration: Iteration
    begun: float
    results: list[RankReport] | None = None
    ended: float = 0.0

    def note(self, results: list[RankReport], ended: float) -> list[RankReport]:
        """Note the reports of the ranks and when the last one came; return the reports."""
        self.results, self.ended = results, ended
        return results


class InFlight:
    """A queue of iterations whose reports have not been fetched, the oldest first."""

    def __init__(self, gang: RankGroup, step: Callable[[Iteration], IterationRows]) -> None:
        self._gang, self._step = gang, step
        self._waiting: deque[_Asked] = deque()
        self._ended = 0.0

    def ask(self, iterations: Sequence[Iteration]) -> None:
        """Send the ranks those of ``iterations`` that they have not been sent yet."""
        last = self._waiting[-1].iteration.index if self._waiting else -1
        new = [each for each in iterations if each.index > last]
        if new:
            begun = time.monotonic()
            self._gang.send([CallMethod("run", (self._step(each),)) for each in new])
            self._waiting.extend(_Asked(each, begun) for each in new)

    def answer(self, iteration: Iteration) -> FinishedIteration:
        """Wait for the reports of ``iteration``, which must be the oldest in the queue."""
        now = self._waiting.popleft()
        assert now.iteration.index == iteration.index
        results = self._done(now)
        before, self._ended = self._ended, max(now.ended, self._ended)
        return FinishedIteration(results, self._ended - max(now.begun, before), self._ended)

    def settle(self) -> None:
        """Wait until the ranks have finished all iterations in the queue, and keep their reports."""
        for asked in self._waiting:
            self._done(asked)

    def forget(self) -> None:
        """Clear the queue, because the ranks that were asked no longer exist."""
        self._waiting.clear()

    def _done(self, asked: _Asked) -> list[RankReport]:
        """Wait for the ranks' reports. All earlier iterations must have been waited for."""
        if asked.results is None:
            number, epoch = asked.iteration.index + 1, asked.iteration.epoch + 1
            doing = f"iteration {number}, epoch {epoch}"
            return asked.note(*self._gang.answers(doing))
        return asked.results

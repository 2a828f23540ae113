"""Iterations that the ranks of a gang have been asked for, some of them ahead of time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkdl.engines.gang.rank import CallMethod
from sparkdl.engines.gang.rank_messages import RankReport
from sparkdl.gang.driver import Gang
from sparkdl.replica.iteration import Iteration, IterationRows


@dataclass(frozen=True)
class FinishedIteration:
    """What the ranks did in an iteration; how many seconds it took, those before left out, and when it
    had ended (``time.monotonic``)."""

    results: list[RankReport]
    seconds: float
    ended: float


@dataclass
class _Asked:
    iteration: Iteration
    begun: float
    results: list[RankReport] | None = None
    ended: float = 0.0


class InFlight:
    """Those of which nobody has had the answer, the oldest first. ``step``: what the ranks are told."""

    def __init__(self, gang: Gang, step: Callable[[Iteration], IterationRows]) -> None:
        self._gang, self._step = gang, step
        self._waiting: deque[_Asked] = deque()
        self._ended = 0.0

    def ask(self, iterations: Sequence[Iteration]) -> None:
        """For those that the ranks have not been asked for."""
        last = self._waiting[-1].iteration.index if self._waiting else -1
        new = [each for each in iterations if each.index > last]
        if new:
            begun = time.monotonic()
            self._gang.send([CallMethod("run", (self._step(each),)) for each in new])
            self._waiting.extend(_Asked(each, begun) for each in new)

    def answer(self, iteration: Iteration) -> FinishedIteration:
        """Wait for that of ``iteration``, which is the oldest."""
        now = self._waiting.popleft()
        assert now.iteration.index == iteration.index
        results = self._done(now)
        before, self._ended = self._ended, max(now.ended, self._ended)
        return FinishedIteration(results, self._ended - max(now.begun, before), self._ended)

    def settle(self) -> None:
        """Wait until the ranks have done all of it. The answers are kept."""
        for asked in self._waiting:
            self._done(asked)

    def forget(self) -> None:
        """The ranks that were asked are no more."""
        self._waiting.clear()

    def _done(self, asked: _Asked) -> list[RankReport]:
        """What the ranks answer; that of all before must have been waited for."""
        if asked.results is None:
            number, epoch = asked.iteration.index + 1, asked.iteration.epoch + 1
            doing = f"iteration {number}, epoch {epoch}"
            asked.results, asked.ended = self._gang.answers(doing)
        return asked.results

"""The configuration of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sparkdl.loop.state import TrainState, next_counters
from sparkdl.loop.trigger import Trigger
from sparkdl.model.buffers import TrainingOptions
from sparkdl.replica.iteration import Decisions


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The constants of a run that its loop uses."""

    stop: Trigger
    options: TrainingOptions
    histograms: Trigger | None = None  # None: never
    recorded: Mapping[int, Decisions] = field(default_factory=dict)  # by iteration, from 1

    def recorded_decisions(self, state: TrainState) -> Decisions | None:
        """Return what to repeat in the iteration after ``state``; None: there is nothing."""
        return self.recorded.get(state.iteration + 1)

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

"""The configuration of the training loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sparkdl.loop.state import TrainState, next_counters
from sparkdl.loop.trigger import Trigger
from sparkdl.model.options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The constants of a run that its loop uses.

    Attributes:
        stop: When training ends.
        options: How gradients that are not finite, and the loss scale, are handled.
        histograms: When an iteration reports histograms; None: never.
    """

    stop: Trigger
    options: TrainingOptions
    histograms: Trigger | None = None

    @staticmethod
    def of(trainer: Any) -> LoopConfig:
        """Take the constants from the fields of a trainer."""
        return LoopConfig(stop=trainer.stop, options=trainer.options, histograms=trainer.histograms)

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

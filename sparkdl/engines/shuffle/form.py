"""The form of an iteration: one stage or two, with or without a shuffle between the two."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparkdl.replica.iteration import SliceReport

STAGE_SECONDS = 0.010
"""The measured cost of a stage (docs/internals/engine-notes.md), and so the most by which the tasks of
a single stage may take longer than those of two."""
TRIALS = 3
"""The number of updates to measure first. The fastest counts, because the first ones include setup."""


class Form:
    """The choice between one stage and two, made by measuring the update in two stages.

    With one stage, each of M replicas updates all N slices; with two, each slice is updated once.
    The bits are the same either way, so a choice that depends on timing does not affect results.

    Args:
        stages: The setting ``spark.sparkdl.stages``.
        replicas: M.
        slices: N.
        slots: The number of task slots.
    """

    def __init__(self, stages: str, replicas: int, slices: int, slots: int) -> None:
        self._stages = stages
        one, two = math.ceil(replicas / slots) * slices, math.ceil(slices / slots)
        self._more = one - two
        self._seconds: list[float] = []

    @property
    def shuffles(self) -> bool:
        """Return whether two stages meet at a shuffle even if no bytes have to travel between nodes."""
        return self._stages == "shuffle"

    @property
    def at_once(self) -> bool:
        """Return whether one stage is better, as far as has been measured."""
        if self._stages != "auto":
            return self._stages == "one"
        measured = len(self._seconds) >= TRIALS
        return measured and self._more * min(self._seconds) < STAGE_SECONDS

    def note(self, reports: Sequence[SliceReport]) -> None:
        """Record how long the synchronization tasks of an iteration took."""
        if len(self._seconds) < TRIALS:
            self._seconds.append(max(sum(report.seconds.values()) for report in reports))

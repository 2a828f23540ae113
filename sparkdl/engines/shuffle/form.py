"""Whether an iteration is one stage or two, and whether these meet at a shuffle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparkdl.replica.iteration import SliceReport

STAGE_SECONDS = 0.010
"""What a stage costs, measured (docs/internals/engine-notes.md): what one stage may cost more in
its tasks."""
TRIALS = 3
"""Updates that are measured first; the fastest counts, as the first ones also set things up."""


class Form:
    """Decides by measuring the update in two stages; ``stages`` is ``spark.sparkdl.stages``.

    In one stage each of M replicas updates all of N slices, in two each slice is updated once; on
    ``slots`` task slots. The bits are the same, so that a choice by the clock harms no result.
    """

    def __init__(self, stages: str, replicas: int, slices: int, slots: int) -> None:
        self._stages = stages
        one, two = math.ceil(replicas / slots) * slices, math.ceil(slices / slots)
        self._more = one - two
        self._seconds: list[float] = []

    @property
    def shuffles(self) -> bool:
        """Whether two stages meet at a shuffle also where nothing has to travel."""
        return self._stages == "shuffle"

    @property
    def at_once(self) -> bool:
        """Whether one stage is better, as far as is known."""
        if self._stages != "auto":
            return self._stages == "one"
        measured = len(self._seconds) >= TRIALS
        return measured and self._more * min(self._seconds) < STAGE_SECONDS

    def note(self, reports: Sequence[SliceReport]) -> None:
        """What the synchronization tasks of an iteration took."""
        if len(self._seconds) < TRIALS:
            self._seconds.append(max(sum(report.seconds.values()) for report in reports))

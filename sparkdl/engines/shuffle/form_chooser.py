"""The choice of an iteration's form, by what it asks for and by measuring the update."""

from __future__ import annotations

import math

from sparkdl.engines.shuffle.forms import STAGE_SECONDS, Form, OneStage, TwoJobs
from sparkdl.engines.shuffle.messages import IterationMessage
from sparkdl.engines.shuffle.placement import Placement
from sparkdl.engines.shuffle.reports import IterationReports
from sparkdl.engines.shuffle.shuffled import Shuffled
from sparkdl.engines.shuffle.spec import ShuffleSpec
from sparkdl.gang.slots import task_slots

TRIALS = 3
"""The number of updates to measure first. The fastest counts, because the first ones include setup."""


class FormChooser:
    """The choice among the forms of an iteration.

    With one stage, each of M replicas updates all N slices; with two, each slice is updated once.
    The bits are the same in every form, so a choice that depends on timing does not affect results.
    """

    def __init__(self, spec: ShuffleSpec, placement: Placement, stages: str) -> None:
        self._stages, self._placement = stages, placement
        self._clips_norm = spec.options.clips_norm
        replicas, slices, slots = (
            spec.run.replicas,
            spec.run.slices,
            task_slots(spec.resources.context),
        )
        one, two = math.ceil(replicas / slots) * slices, math.ceil(slices / slots)
        self._more = one - two
        self._seconds: list[float] = []
        self._one_stage = OneStage(placement, spec.resources)
        self._two_jobs = TwoJobs(placement, spec.resources)
        self._shuffled = Shuffled.of(spec, placement)
        self._ruled_out: set[type[Form]] = set()

    def choose(self, message: IterationMessage) -> list[Form]:
        """Return the forms that the iteration can have, the best one first.

        One stage leaves norms and histograms to the next iteration, so it cannot be if they must be
        known when this one ends.
        """
        found: list[Form] = []
        if self._placement.single_node(message.states):
            early = self._clips_norm or message.histograms
            if self._one_stage_pays and not early:
                found.append(self._one_stage)
            if self._stages != "shuffle":
                found.append(self._two_jobs)
        return [*(form for form in found if type(form) not in self._ruled_out), self._shuffled]

    @property
    def _one_stage_pays(self) -> bool:
        """Return whether one stage is better, as far as has been measured."""
        if self._stages != "auto":
            return self._stages == "one"
        measured = len(self._seconds) >= TRIALS
        return measured and self._more * min(self._seconds) < STAGE_SECONDS

    def rule_out(self, form: Form) -> None:
        """Choose a form no more, because its messages are too large."""
        self._ruled_out.add(type(form))

    def note(self, reports: IterationReports) -> None:
        """Record how long the tasks took that updated one slice each."""
        if reports.slices and not reports.skipped and len(self._seconds) < TRIALS:
            self._seconds.append(max(sum(each.seconds.values()) for each in reports.slices))

"""What every engine offers the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sparkdl.data.batches import EpochPlan
from sparkdl.sync.records import ReplicaReport


@dataclass(frozen=True)
class Iteration:
    """What the loop asks of an engine: iteration ``index`` is global batch ``batch`` of ``epoch``
    (all from 0). ``hyperparameters``: a schedule's values, one mapping a parameter group.
    ``description``: for the Spark UI."""

    index: int
    epoch: int
    batch: int
    hyperparameters: tuple[Mapping[str, Any], ...] | None
    description: str


@dataclass(frozen=True)
class StepResult:
    """``loss``: the mean over the global batch. ``seconds``: by activity, the slowest task's."""

    loss: float
    samples: int
    seconds: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Runs iterations. What it holds in Spark belongs to the fit's ``Resources``."""

    plan: EpochPlan

    def step(self, iteration: Iteration) -> StepResult:
        """Run and commit an iteration."""

    def weights(self) -> torch.Tensor:
        """The flat vector as it stands, brought to the driver."""


def summarize(reports: Sequence[ReplicaReport], seconds: Mapping[str, float]) -> StepResult:
    """The result of a step from its replicas' reports, in replica order."""
    ordered = sorted(reports, key=lambda report: report.replica)
    samples = sum(report.count for report in ordered)
    loss = sum(report.loss * report.count for report in ordered if report.count) / samples
    return StepResult(loss, samples, seconds)


def slowest(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each activity the largest number of seconds."""
    result: dict[str, float] = {}
    for seconds in many:
        for activity, value in seconds.items():
            result[activity] = max(value, result.get(activity, 0.0))
    return result

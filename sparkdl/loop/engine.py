"""What every engine offers the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.epoch import EpochPlan
from sparkdl.model.flat import Layout
from sparkdl.replica.iteration import Iteration, ReplicaReport, SliceReport
from sparkdl.slices.histogram import Histogram
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.slices.update import EMA

ReadState = Callable[[SliceSpec, torch.dtype], SliceState]
"""Gives the state of a slice from elsewhere: a checkpoint, an earlier run. Runs in tasks."""


@dataclass(frozen=True)
class IterationResult:
    """``loss``: the mean over the global batch. ``seconds``: by activity, the slowest task's.

    ``not_finite``: for each replica whose loss or gradient was inf or NaN, what it was; the update
    was then left out. ``gradient_norm``: before clipping, where the norm is clipped. ``traffic``: for
    each node, by its token, the bytes of gradients and weights that left it and arrived there.
    ``ended``: when (``time.monotonic``), where it was not just now.
    """

    loss: float
    samples: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    not_finite: Mapping[int, str] = field(default_factory=dict)
    gradient_norm: float | None = None
    histograms: Mapping[str, Histogram] | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    ended: float | None = None


CURRENT, AVERAGE, BEST = "current", "average", "best"
"""Which weights: those of the last iteration, their moving average, those that were kept."""


def weights_of(state: SliceState, which: str) -> torch.Tensor:
    """A slice's weights, or their moving average; not a copy where that can be."""
    average = state.arrays.get(EMA) if which == AVERAGE else None
    if average is None:
        return state.weights
    return torch.cat([average, state.weights[len(average) :]])


@dataclass(frozen=True)
class StateWork:
    """What is to be done with a state: ``use(index, plan, state)`` of every slice, of these weights;
    ``residuals(replica, kept)`` of every replica that keeps something."""

    states: tuple[tuple[Callable[[int, SliceSpec, SliceState], Any], str], ...]
    residuals: Callable[[int, ByParameter], Any]


@dataclass(frozen=True)
class StateWorkResult:
    """The results, for each of :attr:`StateWork.states` in the order of the slices; those of
    residuals."""

    states: tuple[list[Any], ...]
    residuals: list[Any]


class PendingStateWork(Protocol):
    """Uses of the state as it was, under way while training goes on."""

    @property
    def ready(self) -> bool:
        """Whether all are done, as far as is known."""

    def used(self) -> StateWorkResult | None:
        """Wait for the results; None where the state was lost before. Raises what a use raised."""


class Engine(Protocol):
    """Runs iterations. What it holds in Spark belongs to the fit's ``Resources``."""

    plan: EpochPlan

    @property
    def begins_ahead(self) -> bool:
        """Whether it begins iterations that :meth:`run` is told will follow."""

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Write version 0 of the state: the recipe's, or what ``read`` gives; or the weights that
        are kept as the best.

        Raises the first of ``reported`` that ``read`` raised in a task.
        """

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Run and commit an iteration. ``then``: what :meth:`run` is called with next, while nothing
        else is asked for that concerns the state: these may be begun."""

    def score(self) -> list[Any]:
        """Score the validation samples that the engine was built with, with the weights as they stand.

        Returns:
            The states of the scorer, of all partitions merged.
        """

    def keep_best(self) -> None:
        """Keep a copy of the weights as they stand, instead of the one before."""

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """A flat vector, brought to the driver."""

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """``use(index, plan, state)`` of every slice, run where it lies; the results in order."""

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """Let every replica keep what ``read`` gives, as if its last iteration had left it.

        Raises the first of ``reported`` that ``read`` raised in a task.
        """

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """``use(replica, kept)`` of every replica that keeps something between iterations, run where
        it lies; the results in order."""


class TrainingEngine(Engine, Protocol):
    """One that a run is made with: what it loses it brings back, or has nothing to lose."""

    recoveries: int
    """How often a state that was lost has been brought back."""


def summarize(
    replicas: Sequence[ReplicaReport],
    slices: Sequence[SliceReport],
    layout: Layout,
    seconds: Mapping[str, float],
    traffic: Mapping[str, Traffic] | None = None,
) -> IterationResult:
    """The result of a step from the reports of its replicas and slices."""
    ordered = sorted(replicas, key=lambda report: report.replica)
    total = sum(report.weight for report in ordered)
    loss = sum(report.loss * report.weight for report in ordered if report.weight)
    return IterationResult(
        loss=loss / total if total else math.nan,
        samples=sum(report.count for report in ordered),
        seconds=seconds,
        not_finite={r.replica: r.not_finite for r in ordered if r.not_finite},
        gradient_norm=next((s.norm for s in slices if s.norm is not None), None),
        histograms=_joined(slices, layout),
        traffic=traffic or {},
    )


def _joined(slices: Sequence[SliceReport], layout: Layout) -> dict[str, Histogram] | None:
    """Histograms by "weights/NAME" and "gradients/NAME", over all slices."""
    parts: dict[str, list[Histogram]] = {}
    for report in slices:
        for (what, number), histogram in report.histograms.items():
            parts.setdefault(f"{what}/{layout.segments[number].name}", []).append(histogram)
    return {name: Histogram.join(many) for name, many in parts.items()} or None


def slowest(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each activity the largest number of seconds."""
    result: dict[str, float] = {}
    for seconds in many:
        for activity, value in seconds.items():
            result[activity] = max(value, result.get(activity, 0.0))
    return result


def summed(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each activity the seconds of all together."""
    result: dict[str, float] = {}
    for seconds in many:
        for activity, value in seconds.items():
            result[activity] = result.get(activity, 0.0) + value
    return result


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that left a node and that arrived there, without headers."""

    gradients_sent: int = 0
    weights_sent: int = 0
    gradients_received: int = 0
    weights_received: int = 0

    @property
    def sent(self) -> int:
        return self.gradients_sent + self.weights_sent

    @property
    def received(self) -> int:
        return self.gradients_received + self.weights_received


def busiest(traffic: Mapping[str, Traffic]) -> int:
    """Bytes in the busiest direction of the busiest node."""
    return max((max(node.sent, node.received) for node in traffic.values()), default=0)


ReadResiduals = Callable[[int], ByParameter | None]
"""Gives what replica m keeps from elsewhere: a checkpoint. Runs in tasks."""

"""The result of an iteration, from the reports of its replicas and slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparkdl.model.flat import Layout
from sparkdl.replica.compute import added_up
from sparkdl.replica.iteration import Decisions, ReplicaReport, SliceReport
from sparkdl.slices.update import Histogram


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that a node sent and received, without headers."""

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
    """Return the bytes in the busiest direction of the busiest node."""
    return max((max(node.sent, node.received) for node in traffic.values()), default=0)


@dataclass(frozen=True)
class IterationResult:
    """The result of an iteration."""

    loss: float  # mean over the global batch
    samples: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # by activity, of the slowest task
    not_finite: Mapping[int, str] = field(default_factory=dict)  # not empty: update skipped
    gradient_norm: float | None = None  # before clipping; None: not clipped
    histograms: Mapping[str, Histogram] | None = None  # by "weights/NAME" and "gradients/NAME"
    traffic: Mapping[str, Traffic] = field(default_factory=dict)  # by node id
    ended: float | None = None  # time.monotonic(); None: now
    losses: Mapping[str, float] = field(default_factory=dict)  # named losses of a step
    decisions: Decisions = field(default_factory=dict)  # needed to repeat it


def summarize(
    replicas: Sequence[ReplicaReport],
    slices: Sequence[SliceReport],
    layout: Layout,
    seconds: Mapping[str, float],
    traffic: Mapping[str, Traffic] | None = None,
) -> IterationResult:
    """Return the result of an iteration from the reports of its replicas and slices."""
    ordered = sorted(replicas, key=lambda report: report.replica)
    total = sum(report.weight for report in ordered)
    loss = sum(report.loss * report.weight for report in ordered if report.weight)
    named = added_up(report.losses for report in ordered)
    return IterationResult(
        loss=loss / total if total else math.nan,
        samples=sum(report.count for report in ordered),
        seconds=seconds,
        not_finite={r.replica: r.not_finite for r in ordered if r.not_finite},
        gradient_norm=next((s.norm for s in slices if s.norm is not None), None),
        histograms=_joined(slices, layout),
        traffic=traffic or {},
        losses={name: s / c for name, (s, c) in named.items() if c},
        decisions=_done(ordered),
    )


def _done(replicas: Sequence[ReplicaReport]) -> Decisions:
    """Return how many micro-batches or steps each replica did; nothing if all did theirs."""
    names = [report.passed.recorded_as for report in replicas if report.passed.missed]
    return {f"{names[0]}{each.replica}": each.passed.parts for each in replicas if names}


def _joined(slices: Sequence[SliceReport], layout: Layout) -> dict[str, Histogram] | None:
    """Return histograms by "weights/NAME" and "gradients/NAME", over all slices."""
    parts: dict[str, list[Histogram]] = {}
    for report in slices:
        for (what, number), histogram in report.histograms.items():
            parts.setdefault(f"{what}/{layout.segments[number].name}", []).append(histogram)
    return {name: Histogram.join(many) for name, many in parts.items()} or None


def slowest(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return for each activity the largest number of seconds."""
    result: dict[str, float] = {}
    for seconds in many:
        for activity, value in seconds.items():
            result[activity] = max(value, result.get(activity, 0.0))
    return result


def summed(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return for each activity the sum of the seconds."""
    result: dict[str, float] = {}
    for seconds in many:
        for activity, value in seconds.items():
            result[activity] = result.get(activity, 0.0) + value
    return result

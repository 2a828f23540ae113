"""The result of an iteration, of the reports that tasks made, and the next state of the run.

The state includes the loss scale of fp16 training, which changes as in ``torch.amp.GradScaler``
(Micikevicius et al., 2018). fp16 gradients underflow below 6e-8. So the loss is multiplied by a
large power of two and the gradients are divided by it again. If a gradient overflows on any
replica, no slice is updated and the scale is halved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparkdl.errors import TrainingError
from sparkdl.loop.history import History
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState, next_counters
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.replica.compute import added_up
from sparkdl.replica.iteration import Decisions, Iteration, ReplicaReport, SliceReport
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


logger = logging.getLogger("sparkdl")


def first_state(options: TrainingOptions) -> TrainState:
    """Return the state at the start of a run."""
    return TrainState(loss_scale=FIRST_SCALE if options.scales_loss else 1.0)


def previous_state(state: TrainState, history: History) -> TrainState:
    """Return the state before the last iteration of a run that continues from ``state``.

    It has only what the history contains. At the start of a run it is ``state`` itself.
    """
    if not state.iteration:
        return state
    iteration, ends = state.iteration - 1, state.position == 0
    records = history.last(2)
    record = records[0] if len(records) == 2 else {}
    return replace(
        state,
        iteration=iteration,
        epoch=max(0, state.epoch - ends),
        position=(state.iterations_per_epoch if ends else state.position) - 1,
        samples=record.get("samples", 0),
        loss=record.get("loss", math.nan),
        seconds=record.get("seconds", 0.0),
        gradient_norm=record.get("gradient_norm"),
        validations=tuple(v for v in state.validations if v.iteration <= iteration),
    )


def catch_up(schedule: Schedule, state: TrainState, history: History) -> TrainState:
    """Bring a fresh ``schedule`` to where a run continues.

    Return ``state`` with the learning rates of the last iteration.
    """
    if not state.iteration:
        return state
    previous = previous_state(state, history)
    schedule.catch_up(previous)
    state = replace(state, learning_rates=schedule.learning_rates)
    rates, recorded = state.learning_rates, [r["learning_rate"] for r in history.last(1)]
    same = not rates or all(math.isclose(rates[0], rate, rel_tol=1e-6) for rate in recorded)
    if not same and schedule.changes() is not None:
        logger.warning(
            "resume: the schedule gives iteration %d the learning rate %.3g, and the run before had "
            "%.3g. The schedule, or the number of iterations that it is made for (total_steps), is "
            "another one now; training continues with the new one.",
            state.iteration,
            rates[0],
            recorded[0],
        )
    schedule.after(previous, state)
    return state


def next_iteration(
    state: TrainState, schedule: Schedule, histograms: bool, decisions: Decisions | None = None
) -> Iteration:
    """Return the iteration after ``state``, where ``schedule`` stands.

    ``decisions`` are to be repeated; None: the engine decides.
    """
    return Iteration(
        index=state.iteration,
        epoch=state.epoch,
        batch=state.position,
        hyperparameters=schedule.changes(),
        description=describe(state),
        loss_scale=state.loss_scale,
        histograms=histograms,
        decisions=decisions,
    )


def advance(
    state: TrainState,
    result: IterationResult,
    options: TrainingOptions,
    learning_rates: tuple[float, ...],
    seconds: float,
) -> TrainState:
    """Return the state after a committed iteration.

    Raise TrainingError for a gradient that is not finite, unless a smaller loss scale can correct
    it or the iteration is to be skipped. ``seconds`` are those of the run so far.
    """
    skipped = bool(result.not_finite)
    if skipped and options.on_nan == "raise" and state.loss_scale == 1.0:
        raise TrainingError(_not_finite(state, result, options))
    scale, age = state.loss_scale, 0
    if options.scales_loss:
        scale, age = next_scale(state.loss_scale, state.loss_scale_age, skipped)
    return replace(
        next_counters(state),
        samples=state.samples + result.samples,
        loss=result.loss,
        losses=result.losses,
        learning_rates=learning_rates,
        seconds=seconds,
        gradient_norm=result.gradient_norm,
        skipped=state.skipped + skipped,
        loss_scale=scale,
        loss_scale_age=age,
        timings=result.seconds,
        bytes_sent=busiest(result.traffic),
        decisions=result.decisions,
        histograms=result.histograms,
    )


def _not_finite(state: TrainState, result: IterationResult, options: TrainingOptions) -> str:
    found = "; ".join(f"{what} in replica {m}" for m, what in result.not_finite.items())
    remedy = 'Lower the learning rate, clip with clip_norm=1.0, or pass on_nan="skip".'
    if options.wire == "fp16":
        other = remedy[0].lower() + remedy[1:]
        remedy = f'fp16 overflows above 65,504: use wire="bf16". Otherwise: {other}'
    return (
        f"iteration {state.iteration + 1}, epoch {state.epoch + 1}: not finite: {found} "
        f"(mean loss {result.loss:.4g}). {remedy}"
    )


def describe(state: TrainState) -> str:
    """Return the text that the Spark UI shows for the coming iteration."""
    text = f"sparkdl: epoch {state.epoch + 1} · iteration {state.iteration + 1}"
    return text if state.iteration == 0 else f"{text} · loss {state.loss:.4g}"


FIRST_SCALE = 2.0**16


GROWTH_ITERATIONS = 2000


def next_scale(scale: float, age: int, skipped: bool) -> tuple[float, int]:
    """Return the scale of the next iteration and its age, the iterations since it changed.

    The scale is halved after an overflow, and doubled after 2,000 iterations without one.
    """
    if skipped:
        return max(1.0, scale / 2), 0
    if age + 1 >= GROWTH_ITERATIONS:
        return scale * 2, 0
    return scale, age + 1

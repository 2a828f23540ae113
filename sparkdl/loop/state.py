"""Where a training run stands: one immutable value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.slices.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class Validated:
    """One validation: after which iteration and epoch, and the value of each metric by name."""

    iteration: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state after an iteration; triggers and callbacks see nothing else of the loop."""

    iteration: int = 0
    """Iterations completed."""
    epoch: int = 0
    """Epochs completed."""
    position: int = 0
    """Iterations completed of the epoch that is under way; 0 between two epochs."""
    samples: int = 0
    """Samples seen, all epochs together."""
    loss: float = float("nan")
    """Mean loss of the last global batch."""
    learning_rates: tuple[float, ...] = ()
    """Of the last iteration, one a parameter group."""
    seconds: float = 0.0
    """Since the first iteration began; of a resumed run, the earlier parts included."""
    iterations_per_epoch: int = 0
    """Of the data that are trained on; the last batch may be short."""
    gradient_norm: float | None = None
    """The global norm of the last gradient before clipping; None without ``clip_norm``, and with
    ``local_steps`` above 1, where each replica clips its own."""
    skipped: int = 0
    """Iterations whose update was left out because a gradient was not finite."""
    loss_scale: float = 1.0
    """What the loss of the next iteration is multiplied by; 1 unless ``precision="fp16"``."""
    loss_scale_age: int = 0
    """Iterations since the loss scale changed."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the last iteration by activity, the slowest task's: schedule, data, fetch,
    forward, backward, pipeline (both, of stages), compress, publish, reduce, update; ``iteration`` is
    the whole of it. And snapshot, where one was taken after it."""
    bytes_sent: int = 0
    """Bytes of gradients and weights that the last iteration sent between nodes, without headers: of
    the node and the direction (out or in) that had most. 0 on one node."""
    histograms: Mapping[str, Histogram] | None = None
    """Of the last iteration where ``Trainer.histograms`` asked for them: "weights/NAME" and
    "gradients/NAME" for each trainable parameter."""
    validations: tuple[Validated, ...] = ()
    """Every validation so far, oldest first. Where ``partial_fit`` goes on, see
    :func:`recent_validations`."""
    best: Validated | None = None
    """The validation whose weights are kept; None without ``Validation(best=...)``."""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    """For each metric of the validation, whether more is better."""
    checkpoint: str | None = None
    """The last checkpoint that was committed."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last validation's values by name; empty before the first."""
        return self.validations[-1].metrics if self.validations else {}


MOST_VALIDATIONS = 1000
"""So many validations a stream takes along from one batch of data to the next, and a few more."""


def recent_validations(validations: Sequence[Validated]) -> tuple[Validated, ...]:
    """The last :data:`MOST_VALIDATIONS`, and of those before them the ones with the least and the
    greatest value of each metric.

    So a trigger that compares recent validations with the best one of all before them decides the same;
    one whose patience is :data:`MOST_VALIDATIONS` or more does not.
    """
    old, recent = validations[:-MOST_VALIDATIONS], validations[-MOST_VALIDATIONS:]
    kept: set[int] = set()
    for name in {name for validated in old for name in validated.metrics}:
        values = {n: v.metrics[name] for n, v in enumerate(old) if name in v.metrics}
        known = {n: value for n, value in values.items() if not math.isnan(value)}
        if known:
            kept |= {min(known, key=known.__getitem__), max(known, key=known.__getitem__)}
    return (*(old[n] for n in sorted(kept)), *recent)


def next_counters(state: TrainState) -> TrainState:
    """What the counters will be after the next iteration."""
    ends = state.position + 1 == state.iterations_per_epoch
    position = 0 if ends else state.position + 1
    return replace(
        state, iteration=state.iteration + 1, epoch=state.epoch + ends, position=position
    )

"""The state of a training run, as one immutable value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.slices.update import Histogram


@dataclass(frozen=True, kw_only=True)
class Validated:
    """One validation: the iteration and epoch after which it was made, and the value of each metric
    by name. ``arrays`` has the curves and matrices, as lists and dictionaries of numbers."""

    iteration: int
    epoch: int
    metrics: Mapping[str, float]
    arrays: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state after an iteration. It is all that triggers and callbacks see of the loop."""

    iteration: int = 0
    """Iterations completed."""
    epoch: int = 0
    """Epochs completed."""
    position: int = 0
    """Iterations completed in the current epoch; 0 between two epochs."""
    samples: int = 0
    """Samples seen, over all epochs."""
    loss: float = float("nan")
    """Mean loss of the last global batch."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """The named losses of the last global batch, where ``Trainer(step=)`` returns such; and the
    distance between replicas, where :class:`sparkdl.Gossip` averages them."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of the last iteration, one for each parameter group."""
    seconds: float = 0.0
    """Seconds since the first iteration began; in a resumed run the earlier parts are included."""
    iterations_per_epoch: int = 0
    """Iterations of an epoch of the training data; the last batch may be short."""
    gradient_norm: float | None = None
    """The global norm of the last gradient before clipping; None without ``clip_norm``, and with
    ``local_steps`` above 1, where each replica clips its own gradient."""
    skipped: int = 0
    """Iterations whose update was skipped because a gradient was not finite."""
    loss_scale: float = 1.0
    """The factor of the loss in the next iteration; 1 unless ``precision="fp16"``."""
    loss_scale_age: int = 0
    """Iterations since the loss scale changed."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the last iteration by activity, those of the slowest task: schedule, data, fetch,
    forward, backward, pipeline (forward and backward of pipeline stages), compress, publish,
    reduce, update. ``iteration`` is the total. ``snapshot`` is added if one was taken after the
    iteration.
    """
    bytes_sent: int = 0
    """Bytes of gradients and weights that the last iteration sent between nodes, without headers,
    for the busiest node and its busiest direction (out or in). 0 on one node."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """The decisions of the consistency model on the last iteration, by name."""
    histograms: Mapping[str, Histogram] | None = None
    """Histograms of the last iteration, if ``Trainer.histograms`` requested them: "weights/NAME"
    and "gradients/NAME" for each trainable parameter."""
    validations: tuple[Validated, ...] = ()
    """Every validation so far, oldest first. For continued ``partial_fit`` see
    :func:`recent_validations`."""
    best: Validated | None = None
    """The validation whose weights are kept; None without ``Validation(best=...)``."""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    """For each metric of the validation, whether more is better."""
    checkpoint: str | None = None
    """The last checkpoint that was committed."""
    batch: int | None = None
    """The number of the last batch of a stream, if ``partial_fit`` is given such numbers."""

    def has_seen(self, batch: int | None) -> bool:
        """Return whether a batch of a stream was trained on to its end."""
        if batch is None or self.batch is None:
            return False
        return batch < self.batch or (batch == self.batch and self.position == 0)

    @property
    def staleness(self) -> int:
        """Return the number of versions by which the weights that the last gradients were computed on
        were older than those that they were applied to; 0 unless ``Trainer(consistency=)`` allows
        more."""
        return self.decisions.get("staleness", 0)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the last validation's values by name; empty before the first."""
        return self.validations[-1].metrics if self.validations else {}


MOST_VALIDATIONS = 1000
"""The number of validations, plus a few, that a stream carries from one batch of data to the next."""


def recent_validations(validations: Sequence[Validated]) -> tuple[Validated, ...]:
    """Return the last :data:`MOST_VALIDATIONS`, and of the earlier ones those with the smallest and
    the largest value of each metric.

    So a trigger that compares recent validations with the best of all before them decides the same;
    but not one whose patience is :data:`MOST_VALIDATIONS` or more.
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
    """Return ``state`` with the counters after the next iteration."""
    ends = state.position + 1 == state.iterations_per_epoch
    position = 0 if ends else state.position + 1
    return replace(
        state, iteration=state.iteration + 1, epoch=state.epoch + ends, position=position
    )

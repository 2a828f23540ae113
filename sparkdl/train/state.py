"""Where a training run stands: one immutable value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state after an iteration; triggers and callbacks see nothing else of the loop."""

    iteration: int = 0
    """Iterations completed."""
    epoch: int = 0
    """Epochs completed."""
    samples: int = 0
    """Samples seen, all epochs together."""
    loss: float = float("nan")
    """Mean loss of the last global batch."""
    learning_rates: tuple[float, ...] = ()
    """Of the last iteration, one a parameter group."""
    seconds: float = 0.0
    """Since the first iteration began."""
    iterations_per_epoch: int = 0

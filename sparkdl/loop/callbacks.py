"""Callbacks: what may happen around the loop, as documented no-ops."""

from __future__ import annotations

from typing import Any

from sparkdl.loop.state import TrainState


class StopTraining(Exception):
    """A callback raises it to end the training: ``fit`` returns the model as it stands.

    The other callbacks still hear of the event, the iteration under way is completed (of a gang also
    those that its ranks have begun), and ``history.stopped`` is "callback", or "callback: " and what
    this was given.
    """


class Callback:
    """Override what you need. Each hook is given the trainer and an immutable state.

    The ranks of a gang may be some iterations ahead of the hooks, which hear of each in its turn.
    :class:`sparkdl.StopTraining` ends the training well; what else a hook raises ends the fit.
    """

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        """Samples, replicas and state are in place; no iteration has run."""

    def on_epoch_start(self, trainer: Any, state: TrainState) -> None:
        """Before the first iteration of an epoch."""

    def on_iteration_start(self, trainer: Any, state: TrainState) -> None:
        """Before the jobs of an iteration are submitted."""

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        """An iteration is committed; ``state`` counts it."""

    def on_epoch_end(self, trainer: Any, state: TrainState) -> None:
        """After the last iteration of an epoch."""

    def on_validation_end(self, trainer: Any, state: TrainState) -> None:
        """Metrics of a validation are in the state."""

    def on_checkpoint(self, trainer: Any, state: TrainState) -> None:
        """A checkpoint is committed."""

    def on_recovery(self, trainer: Any, state: TrainState) -> None:
        """State that was lost with an executor has been brought back: the run goes on from ``state``.
        No iteration is told of twice."""

    def on_fit_end(self, trainer: Any, state: TrainState) -> None:
        """The last iteration is committed; not called where the fit fails, or is interrupted a second
        time."""

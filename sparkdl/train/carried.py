"""Continuing from the end of an earlier fit: its weights, optimizer state and counters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParameterError
from sparkdl.infer.saved import StoredState
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.model.recipe import weights_digest
from sparkdl.session import connected_session_of, context_of, is_connected
from sparkdl.spark.failures import reading_explained

if TYPE_CHECKING:
    from sparkdl.infer.model import TrainedModel


@dataclass(frozen=True)
class CarriedRun:
    """The end of one ``partial_fit``, from which the next one continues."""

    trained: TrainedModel
    state: TrainState
    best: tuple[bytes, ...] | None = None  # packed slices; None: not kept
    schedule: Schedule | None = None  # None: made anew and brought to ``state``


def chosen_state(start: TrainedModel | None, optimizer_state: bool | None) -> StoredState | None:
    """Return the optimizer state to begin with, or None if it is not wanted or not there.

    Raises ParameterError if ``optimizer_state`` does not go with ``start``.
    """
    if start is None or optimizer_state is False:
        if start is None and optimizer_state is not None:
            raise ParameterError(
                "optimizer_state= has no effect without start=: pass start= too, or leave it out."
            )
        return None
    if start.optimizer_state is None and optimizer_state:
        raise ParameterError(
            "the model in start= has no optimizer state, because it was trained without "
            "Trainer(keep_optimizer_state=True). Train it with that, or pass optimizer_state=False."
        )
    kept = start.optimizer_state
    if kept is not None and kept.weights != weights_digest(start.module):
        raise ParameterError(
            "start.module was changed after its training, so its optimizer state no longer belongs "
            "to it. Pass optimizer_state=False to continue with the weights alone."
        )
    return kept


def has_rows(data: Any) -> bool:
    """Return whether the data has rows. Raises what a fit raises if ``data`` cannot be read."""
    if is_connected(data):
        connected_session_of(data, "partial_fit")
    else:
        context_of(data)
    with reading_explained():
        return not data.isEmpty()


def begin_batch(
    before: TrainState, iterations_per_epoch: int, each_an_epoch: bool = False
) -> TrainState:
    """Return the state at the start of new data: counters continue, the position is 0.

    With ``each_an_epoch`` a pass that was cut short counts as an epoch.
    """
    epoch = before.epoch + (each_an_epoch and before.position != 0)
    return replace(before, epoch=epoch, position=0, iterations_per_epoch=iterations_per_epoch)

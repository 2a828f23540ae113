"""A fit as it is asked for, and the end of one, from which another may go on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.care.rules import problems_of_start
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.errors import ParameterError, raise_all, shown
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.saved import StoredState
from sparkdl.loop.history import History
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.model.recipe import weights_digest
from sparkdl.plain import is_whole, plain
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class CarriedRun:
    """The end of a fit, from which the next ``partial_fit`` continues."""

    trained: TrainedModel
    state: TrainState
    best: tuple[bytes, ...] | None = None  # packed slices; None: not kept
    schedule: Schedule | None = None  # None: made anew and brought to ``state``


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """A training that is asked for, and the state that it begins with."""

    trainer: TrainerSpec
    resume: str | os.PathLike[str] | None = None
    start: TrainedModel | None = None
    kept: StoredState | None = None  # the optimizer state to begin with
    any_data: bool = False  # the checkpoint may come from other data
    replay: History | None = None  # its decisions are repeated
    before: CarriedRun | None = None  # the pass before this one
    one_pass: bool = False  # over a part of all data: ``stop`` has no effect
    plan: Mapping[str, Any] | None = None  # by which fields were decided, as plain values
    batch: int | None = None  # the number of the pass's rows in their stream

    @staticmethod
    def of(
        trainer: TrainerSpec,
        resume: str | os.PathLike[str] | None = None,
        start: TrainedModel | None = None,
        optimizer_state: bool | None = None,
        any_data: bool = False,
        replay: History | None = None,
    ) -> FitRequest:
        """Check the arguments of ``Trainer.fit`` and return its request."""
        raise_all(ParameterError, list(problems_of_start(resume, start, optimizer_state, replay)))
        if resume is not None and start is not None:
            raise ParameterError(
                "resume= and start= cannot be combined: a resumed run has its own weights. Pass one "
                "of them."
            )
        kept = chosen_state(start, optimizer_state)
        return FitRequest(
            trainer=trainer, resume=resume, start=start, kept=kept, any_data=any_data, replay=replay
        )

    @property
    def other_data(self) -> bool:
        """Return whether the checkpoint may come from other data than this run's."""
        return self.one_pass or self.any_data

    def has_seen(self, state: TrainState) -> bool:
        """Return whether the batch was trained on to its end, and say so."""
        seen = state.has_seen(self.batch)
        if seen:
            logger.warning(
                "batch %s changes nothing: the model was trained on the batches up to %s. A stream "
                "that begins anew needs a trainer, and a path of checkpoints, of its own.",
                *(self.batch, state.batch),
            )
        return seen

    def checkpoints(self, again: bool = False) -> ResumeCandidates | None:
        """Return the checkpoints to resume from, if any, once new ones can be written.

        A run that is submitted ``again`` finds its own.
        """
        where, resuming = self.trainer.checkpoint, None
        if self.resume is not None:
            resuming = ResumeCandidates(
                where, self.resume, self.other_data, self.one_pass, self.batch
            )
        if where is not None:
            store = CheckpointStore(where.path)
            store.prepare()
            if resuming is None and self.before is None and not again:
                store.tell_of_another_run(where.keep)
        return resuming


def checked_batch(batch: Any) -> int | None:
    """Return the number of a batch. Raises ParameterError for what is none."""
    number = plain(batch)
    if number is not None and not is_whole(number, 0):
        raise ParameterError(
            f"batch={shown(batch)}: give the number of the batch, which foreachBatch passes second."
        )
    return number


class PassSeries:
    """The passes of a trainer's ``partial_fit``, of which each continues from the last."""

    def __init__(self) -> None:
        self.last: CarriedRun | None = None

    def begin(self) -> CarriedRun | None:
        """Return the end of the last pass, whose schedule a pass steps that may yet fail: then the
        next one makes a new schedule."""
        before = self.last
        if before is not None:
            self.last = replace(before, schedule=None)
        return before

    def end(self, run: CarriedRun) -> TrainedModel:
        """Take the end of a pass, and return its model."""
        self.last = run
        return run.trained


def chosen_state(start: TrainedModel | None, optimizer_state: bool | None) -> StoredState | None:
    """Return the optimizer state to begin with, or None if it is not wanted or not there.

    Raises ParameterError if ``optimizer_state`` does not go with ``start``.
    """
    if start is None or optimizer_state is False:
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


def begin_batch(
    before: TrainState, iterations_per_epoch: int, each_an_epoch: bool = False
) -> TrainState:
    """Return the state at the start of new data: counters continue, the position is 0.

    With ``each_an_epoch`` a pass that was cut short counts as an epoch.
    """
    epoch = before.epoch + (each_an_epoch and before.position != 0)
    return replace(before, epoch=epoch, position=0, iterations_per_epoch=iterations_per_epoch)

"""A fit in a session of Spark Connect, as the client sees it; its course is in rank 0 of the gang.

The client checks and builds what needs no data, says where the rows go, submits the gang, submits it
again if a rank was lost, and makes the result. See :mod:`sparkdl.connect.rank`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyspark.sql import DataFrame

from sparkdl.checkpoint import Checkpoint
from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.manifest import ModelIdentity
from sparkdl.checkpoint.resume import LATEST, ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.connect.control import ControlClient
from sparkdl.connect.news import HIDDEN, FollowedFit
from sparkdl.connect.rank import MAX_ROWS_BYTES, STORED, FitOrder, LedEnd, LedFit
from sparkdl.connect.rows import ConnectedRows, PersistedSamples, for_gang
from sparkdl.data.fields import NO_ROWS
from sparkdl.errors import DataError, ModelError, ParameterError, StateLostError, cannot_travel
from sparkdl.gang.connect import check_slots_of, hosts_of, in_tasks, run_led, slots_of
from sparkdl.gang.led import RESULT, LedTask
from sparkdl.loop.callbacks import added_callbacks
from sparkdl.loop.interrupt import interruptible
from sparkdl.loop.progress import Progress, progress_of
from sparkdl.model.preparation import dumps
from sparkdl.session import SessionFacts
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.broadcasts import sent_bytes
from sparkdl.spark.failures import end_of_session_explained, reading_explained
from sparkdl.train.course import check_replay
from sparkdl.train.placed_samples import check_validation_data
from sparkdl.train.plain_tasks import clean_nodes
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.request import CarriedRun, FitRequest
from sparkdl.train.sizes import check_mesh, check_sizes
from sparkdl.usercode import accompanied

logger = logging.getLogger("sparkdl")
MAX_LOSSES = 16
"""The number of times that ranks may be lost without a new checkpoint, if the run writes any."""
LOSSES_FROM_START = 4
"""The same of a run without checkpoints, which begins again each time."""


def run(data: Any, request: FitRequest, facts: SessionFacts) -> CarriedRun:
    """Train in a session of Spark Connect; see :func:`sparkdl.train.fit.run`.

    A replay is only checked, since a gang decides nothing.
    """
    with end_of_session_explained(facts.session):
        settings = facts.settings
        if request.quiet:
            settings = replace(settings, progress=HIDDEN)
        progress = progress_of(settings.progress, "", time.monotonic(), request.one_pass)
        with contextlib.closing(progress):
            return _run(data, request, facts, settings, progress)


def _run(
    data: Any, request: FitRequest, facts: SessionFacts, settings: Settings, progress: Progress
) -> CarriedRun:
    session = facts.session
    trainer = for_gang(request.trainer)
    check_replay(trainer, request.replay)
    check_validation_data(trainer, facts)
    progress.doing("building the model")
    model = prepare(trainer, request.start)
    progress.doing("starting workers")
    if request.kept is not None:
        request.kept.check(ModelIdentity.of(model.layout), model.optimizers)
    if (checkpoint := trainer.checkpoint) is not None:
        checkpoint = replace(checkpoint, path=_absolute(checkpoint.path))
        trainer = replace(trainer, checkpoint=checkpoint)
    resume = None if request.resume is None else _absolute(request.resume)
    request = replace(request, trainer=trainer, resume=resume)
    newest = NewestCheckpoint.seen(session, request, resume)
    ranks = trainer.number_of_replicas or newest.replicas
    if isinstance(data, PersistedSamples):
        data.check(trainer, model.float_dtype)
        ranks = data.replicas
    ranks = ranks or slots_of(session, trainer.resource_profile)
    check_sizes(trainer, model.layout, ranks, None, settings.slab_dir)
    check_mesh(trainer, model, ranks)
    _check_result(request, model)
    check_slots_of(session, ranks, trainer.resource_profile)
    slab = SlabConfig.new(settings.slab_dir, f"connect-{session.session_id}")
    if isinstance(data, PersistedSamples):
        rows = data.rows.into(slab)
    else:
        rows = ConnectedRows.of(trainer, data, ranks, model.float_dtype, slab)
    callbacks = (*trainer.callbacks, *added_callbacks(trainer.callbacks))
    request = replace(request, trainer=replace(trainer, callbacks=callbacks))
    order = sent_bytes(_order(request, model, settings), "fit", session)
    columns = len(trainer.feature_columns), trainer.weight is not None
    fit = LedFit(slab, rows.write, *columns, order, resume, MAX_ROWS_BYTES)
    progress.doing("starting the gang and reading rows")
    end = Submissions(request, session, settings, rows.frame, ranks, fit, newest, progress).end()
    if end is None:
        raise DataError(NO_ROWS)

    def weights(kind: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(end.weights.pop(kind)), dtype=model.layout.dtype)

    carried = end.fit.carried(trainer, model, weights)
    for callback, attributes in zip(callbacks, end.attributes, strict=True):
        vars(callback).update(pickle.loads(attributes))
    return carried


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in rank 0, whose working directory is another."""
    text = os.fspath(path)
    return text if text == LATEST else Folder.of(text).uri


def _check_result(request: FitRequest, model: PreparedModel) -> None:
    """Raise ParameterError if the result is too large for rows, and has no other way."""
    trainer = request.trainer
    kinds = 1 + (trainer.ema is not None) + bool(trainer.validation and trainer.validation.best)
    nbytes = model.layout.nbytes * kinds
    if nbytes > MAX_ROWS_BYTES and trainer.checkpoint is None:
        raise ParameterError(
            f"the result has {nbytes / 1e6:,.0f} MB of weights, and a Spark Connect session returns at "
            f"most {MAX_ROWS_BYTES / 1e6:,.0f} MB in rows: give Trainer(checkpoint="
            "sparkdl.Checkpoint(path)) a folder that the executors share, through which it comes."
        )


def _order(request: FitRequest, model: PreparedModel, settings: Settings) -> bytes:
    """Return the pickled order of the fit. Raises ParameterError if a part does not pickle."""
    trainer, nothing = request.trainer, ()
    weights = trainer.weights if request.start is not None else model.recipe.weights
    sent = replace(trainer, resource_profile=None, weights=weights)
    if trainer.validation is not None:
        validation: Any = replace(trainer.validation, data=nothing)  # type: ignore[arg-type]
        sent = replace(sent, validation=validation)
    order = FitOrder(replace(request, trainer=sent, replay=None), settings)
    try:
        return dumps(accompanied(order))
    except Exception as error:
        for callback in sent.callbacks:
            _check_pickles(
                callback,
                f"the callback {type(callback).__name__}",
                "In a Spark Connect session callbacks run in rank 0: let it open files and "
                "connections in on_fit_start, and keep no session.",
            )
        for name in ("stop", "schedule", "validation", "checkpoint", "histograms"):
            _check_pickles(
                getattr(sent, name),
                f"{name}=",
                "In a Spark Connect session rank 0 has it: let it hold no open resource.",
            )
        raise ModelError(
            cannot_travel("the trainer", error, "Define what it holds in a module.")
        ) from None


def _check_pickles(value: Any, what: str, remedy: str) -> None:
    try:
        dumps(accompanied(value))
    except Exception as error:
        raise ParameterError(cannot_travel(what, error, remedy)) from None


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint of a run's folder, as the executors see it."""

    uri: str = ""  # "": there is none
    iteration: int = 0
    replicas: int | None = None  # M of the checkpoint to resume from, if any

    @staticmethod
    def seen(session: Any, request: FitRequest, resume: Any) -> NewestCheckpoint:
        """Let an executor look for the checkpoints of a run, and for the one to ``resume`` from."""
        checkpoint = request.trainer.checkpoint
        if checkpoint is None and resume is None:
            return NewestCheckpoint()
        look = functools.partial(_newest_of, checkpoint, resume, request.other_data)
        with reading_explained("looking for checkpoints"):
            (newest,) = in_tasks(session, look, range(1))
        assert isinstance(newest, NewestCheckpoint)
        return newest


def _newest_of(
    checkpoint: Checkpoint | None, resume: Any, any_data: bool, number: int
) -> NewestCheckpoint:
    newest = NewestCheckpoint()
    if checkpoint is not None:
        for uri, manifest in CheckpointStore(checkpoint.path).candidates():
            newest = NewestCheckpoint(uri, manifest.iteration)
            break
    if resume is not None:
        candidates = ResumeCandidates(checkpoint, resume, any_data)
        newest = replace(newest, replicas=candidates.replicas)
    return newest


@dataclass(frozen=True)
class Submissions:
    """The submissions of a fit: one, and another for each time that ranks are lost."""

    request: FitRequest
    session: Any
    settings: Settings
    frame: DataFrame
    ranks: int
    fit: LedFit
    before: NewestCheckpoint  # the newest before the run
    progress: Progress

    def end(self) -> LedEnd | None:
        """Return the end of the fit, with its weights; None if there were no rows.

        Raise KeyboardInterrupt if the user interrupted before the training, or twice.
        """
        session, settings, trainer = self.session, self.settings, self.request.trainer
        fit, losses, last = self.fit, 0, self.before
        while True:
            control = ControlClient(session, hosts_of(session))
            task = LedTask(replace(fit, control=control.address), timeout=settings.timeout)
            follower = FollowedFit(control, trainer, self.ranks, settings, self.progress)
            try:
                with (
                    interruptible(ready=follower.trains) as interrupt,
                    contextlib.closing(follower),
                ):
                    follower.pass_on(interrupt)
                    profile = trainer.resource_profile
                    with reading_explained():
                        rows = run_led(self.frame, task, self.ranks, profile, follower)
                    end = self._end_of(rows)
                    if end is not None:
                        follower.ended(end.fit.state)
                return end
            except StateLostError as lost:
                if interrupt.asked:
                    raise KeyboardInterrupt from lost
                losses += 1
                newest = self._newest()
                if newest.uri != last.uri:
                    losses, last = 1, newest
                if losses >= (MAX_LOSSES if trainer.checkpoint else LOSSES_FROM_START):
                    raise
                resume, where = self.fit.resume, "the beginning"
                if newest.uri != self.before.uri:
                    resume, where = LATEST, f"the checkpoint after iteration {newest.iteration}"
                elif resume is not None:
                    where = "the checkpoint that it began with"
                reason = str(lost).partition("\n")[0].rstrip(".")
                logger.warning("%s. Submitted again, from %s.", reason, where)
                fit = replace(fit, resume=resume, again=True)
            except BaseException:
                clean_nodes(session, self.fit.slab, self.ranks)
                raise

    def _end_of(self, rows: dict[str, bytes]) -> LedEnd | None:
        if not rows:  # Spark runs no task for rows of which it knows that there are none
            return None
        if STORED in rows:
            rows = pickle.loads(rows[STORED]).fetch(self.session)
        end: LedEnd = pickle.loads(rows.pop(RESULT))
        return replace(end, weights=rows)

    def _newest(self) -> NewestCheckpoint:
        if self.request.trainer.checkpoint is None:
            return self.before
        return NewestCheckpoint.seen(self.session, self.request, None)

"""A fit in a session of Spark Connect, as the client sees it; its course is in rank 0 of the gang.

What the client does: it checks and builds what needs no data, says where the rows go, submits the gang,
submits it again if a rank was lost, and makes the result. See :mod:`sparkdl.train.connected_rank`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pyspark.sql import DataFrame

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.identity import ModelIdentity
from sparkdl.checkpoint.resume import LATEST
from sparkdl.data.arrow_tasks import WriteDataFrame
from sparkdl.data.fields import NO_ROWS, Field
from sparkdl.data.samples import Source, chosen_columns
from sparkdl.data.table_parts import WriteBoth, both_parts
from sparkdl.errors import (
    DataError,
    ModelError,
    ParameterError,
    SessionError,
    cannot_travel,
)
from sparkdl.gang.connect import check_slots_of, slots_of
from sparkdl.infer.kept_state import StoredState
from sparkdl.infer.shipped_module import INLINE_BYTES, Artifact
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.callbacks import Callback, added_callbacks
from sparkdl.loop.history import History
from sparkdl.model.pickling import dumps
from sparkdl.session import is_connected, settings_of
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.train.carried import CarriedRun
from sparkdl.train.connected_news import HIDDEN
from sparkdl.train.connected_rank import MAX_ROWS_BYTES, FitOrder, LedFit
from sparkdl.train.course import recorded_decisions, with_state
from sparkdl.train.fit_result import result_maker, trained_model
from sparkdl.train.place_samples import source
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.sizes import check_mesh, check_sizes
from sparkdl.train.submissions import NewestCheckpoint, Submissions, look
from sparkdl.usercode import accompanied

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def run_connected(
    trainer: Trainer,
    data: Any,
    resume: str | os.PathLike[str] | None = None,
    start: TrainedModel | None = None,
    kept: StoredState | None = None,
    carried: CarriedRun | None = None,
    one_pass: bool = False,
    any_data: bool = False,
    replay: History | None = None,
    quiet: bool = False,
    added: bool = True,
) -> CarriedRun:
    """Train in a session of Spark Connect; see :func:`sparkdl.train.fit.run`.

    Args:
        trainer: The user's trainer.
        data: The training data.
        resume: The checkpoint to resume from.
        start: The earlier result with whose weights to begin.
        kept: The optimizer state to begin with.
        carried: The end of the previous pass, for ``partial_fit``.
        one_pass: True for ``partial_fit``.
        any_data: The checkpoint may come from other data.
        replay: The history to repeat. A gang decides nothing, so it is only checked.
        quiet: Whether to show no progress.
        added: Whether callbacks that every fit of this process has are added.
    """
    session: Any = data.sparkSession
    settings = settings_of(None, session)
    if quiet:
        settings = replace(settings, progress=HIDDEN)
    trainer = for_gang(trainer)
    recorded_decisions(trainer, replay)
    model = prepare(trainer, start, _check_connected)
    if kept is not None:
        kept.check(ModelIdentity.of(model.layout), model.optimizers)
    resume = None if resume is None else _absolute(resume)
    found = NewestCheckpoint("", 0, None)
    if trainer.checkpoint is not None:
        path = _absolute(trainer.checkpoint.path)
        trainer = replace(trainer, checkpoint=replace(trainer.checkpoint, path=path))
    if trainer.checkpoint is not None or resume is not None:
        found = look(session, trainer, resume, one_pass or any_data)
    ranks = trainer.replicas or found.replicas or slots_of(session)
    check_sizes(trainer, model.layout, ranks, None, settings.slab_dir)
    check_mesh(trainer, model, ranks)
    _check_result(trainer, model)
    check_slots_of(session, ranks, trainer.resource_profile)
    slab = SlabConfig.new(settings.slab_dir, f"connect-{session.session_id}")
    frame, write, weighted = _rows(trainer, data, ranks, model.float_dtype, slab)
    callbacks = tuple(trainer.callbacks)
    if added:
        callbacks += tuple(added_callbacks(callbacks))
    order = _order(trainer, callbacks, model, start, kept, carried, one_pass, any_data, settings)
    features = len(trainer.feature_columns)
    fit = LedFit(slab, write, features, weighted, _sent(order, session), resume, MAX_ROWS_BYTES)
    submissions = Submissions(session, trainer, settings, frame, ranks, fit, found, one_pass)
    end = submissions.end()
    if end is None:
        raise DataError(NO_ROWS)
    make = result_maker(trainer, model, end.samples, end.output)

    def weights(kind: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(end.weights.pop(kind)), dtype=model.layout.dtype)

    trained = trained_model(make, model.payload, end.kinds, weights, end.history)
    with_state(trained, end.packed, model)
    _bring_back(callbacks, end.attributes)
    return CarriedRun(trained, end.state, end.packed_best, end.schedule)


def for_gang(trainer: Trainer) -> Trainer:
    """Return the trainer with the engine that a session of Spark Connect has."""
    if trainer.engine == "local":
        raise SessionError(
            'engine="local" trains in the process of a classic driver, which a Spark Connect session '
            'does not have: use engine="gang", whose ranks are tasks of one barrier stage.'
        )
    if trainer.min_ranks is not None:
        raise SessionError(
            f"min_ranks={trainer.min_ranks} cannot be had in a Spark Connect session, where each rank "
            "is a task: leave it out, or start a classic session."
        )
    if trainer.engine == "gang":
        return trainer
    try:
        own = replace(trainer, engine="gang")
    except ParameterError as error:
        raise SessionError(
            f'a Spark Connect session trains with engine="gang" only, and this trainer cannot: {error} '
            f'For engine="{trainer.engine}", start a classic session.'
        ) from None
    logger.warning(
        'training with engine="gang": the engine "%s" needs RDDs, which a Spark Connect session does '
        'not have. Say engine="gang" to leave this line out.',
        trainer.engine,
    )
    return own


def _check_connected(data: Any) -> None:
    """Raise SessionError or DataError unless ``data`` is a DataFrame of Spark Connect."""
    if not is_connected(data):
        raise SessionError(
            "it is not a DataFrame of a Spark Connect session, as the training data is: make both "
            "with one session."
        )


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in rank 0, whose working directory is another."""
    text = os.fspath(path)
    return text if text == LATEST else Folder.of(text).uri


def _check_result(trainer: Trainer, model: PreparedModel) -> None:
    """Raise ParameterError if the result is too large for rows, and cannot take another way."""
    kinds = 1 + (trainer.ema is not None) + bool(trainer.validation and trainer.validation.best)
    nbytes = model.layout.nbytes * kinds
    if nbytes > MAX_ROWS_BYTES and trainer.checkpoint is None:
        raise ParameterError(
            f"the result has {nbytes / 1e6:,.0f} MB of weights, and a Spark Connect session returns at "
            f"most {MAX_ROWS_BYTES / 1e6:,.0f} MB in rows: give Trainer(checkpoint="
            "sparkdl.Checkpoint(path)) a folder that the executors share, through which it comes."
        )


def _rows(
    trainer: Trainer, data: DataFrame, ranks: int, float_dtype: str, slab: SlabConfig
) -> tuple[DataFrame, WriteBoth, bool]:
    """Return the rows of both parts, what writes them, and whether samples have weights."""
    training: Source = source(trainer, data, ranks, float_dtype, slab)
    chosen, columns = chosen_columns(training)
    write, other = WriteBoth(WriteDataFrame(slab, columns), None), None
    if trainer.validation is not None:
        # where a rank reads the validation rows, it does not know the fields of the training yet
        fields: list[Any] = [
            Field(c.name, c.dtype, ()) if c.spec is None else None for c in columns
        ]
        theirs = replace(training, data=trainer.validation.data, fields=tuple(fields))
        try:
            other, columns = chosen_columns(theirs)
        except DataError as error:
            raise DataError(f"validation data: {error}") from None
        write = replace(write, validation=WriteDataFrame(slab, columns))
    return both_parts(chosen, other, ranks), write, trainer.weight is not None


def _order(
    trainer: Trainer,
    callbacks: tuple[Callback, ...],
    model: PreparedModel,
    start: TrainedModel | None,
    kept: StoredState | None,
    carried: CarriedRun | None,
    one_pass: bool,
    any_data: bool,
    settings: Settings,
) -> bytes:
    """Return the pickled order of the fit. Raises ParameterError if a part does not pickle."""
    weights = trainer.weights if start is not None else model.recipe.weights
    sent = replace(trainer, callbacks=callbacks, resource_profile=None, weights=weights)
    if trainer.validation is not None:
        nothing: Any = ()
        sent = replace(sent, validation=replace(trainer.validation, data=nothing))
    order = FitOrder(sent, start, kept, carried, one_pass, any_data, settings)
    try:
        return dumps(accompanied(order))
    except Exception as error:
        for callback in callbacks:
            _check_pickles(
                callback,
                f"the callback {type(callback).__name__}",
                "In a Spark Connect session callbacks run in rank 0: let it open files and "
                "connections in on_fit_start, and keep no session.",
            )
        raise ModelError(
            cannot_travel("the trainer", error, "Define what it holds in a module.")
        ) from None


def _bring_back(callbacks: Sequence[Callback], attributes: Sequence[bytes]) -> None:
    """Give the callbacks here the attributes that those in rank 0 have at the end."""
    for callback, packed in zip(callbacks, attributes, strict=True):
        if found := pickle.loads(packed):
            vars(callback).update(found)


def _check_pickles(value: Any, what: str, remedy: str) -> None:
    try:
        dumps(accompanied(value))
    except Exception as error:
        raise ParameterError(cannot_travel(what, error, remedy)) from None


def _sent(order: bytes, session: Any) -> bytes | Artifact:
    """Return an order as it travels with the query: itself, or the artifact that has it."""
    if len(order) <= INLINE_BYTES:
        return order
    name = hashlib.blake2b(order, digest_size=16).hexdigest()
    return Artifact.of(order, f"sparkdl-{name}.fit", session)

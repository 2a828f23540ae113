"""A fit in a session of Spark Connect, as the client sees it; its course is in rank 0 of the gang.

What the client does: it checks and builds what needs no data, says where the rows go, submits the gang,
submits it again if a rank was lost, and makes the result. See :mod:`sparkdl.train.connected_rank`.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.identity import ModelIdentity
from sparkdl.checkpoint.resume import LATEST
from sparkdl.data.fields import NO_ROWS
from sparkdl.errors import DataError, ModelError, ParameterError, cannot_travel
from sparkdl.gang.connect import check_slots_of, slots_of
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.saved import StoredState
from sparkdl.loop.callbacks import Callback, added_callbacks
from sparkdl.loop.history import History
from sparkdl.model.preparation import dumps
from sparkdl.session import connected_session_of, settings_of
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.broadcasts import sent_bytes
from sparkdl.spark.failures import end_of_session_explained
from sparkdl.train.carried import CarriedRun
from sparkdl.train.connected_checks import check_connected, check_result, for_gang
from sparkdl.train.connected_news import HIDDEN
from sparkdl.train.connected_rank import MAX_ROWS_BYTES, FitOrder, LedFit
from sparkdl.train.connected_rows import ConnectedRows, PersistedSamples
from sparkdl.train.course import check_replay, with_state
from sparkdl.train.fit_result import result_maker, trained_model
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

    ``replay`` is only checked, since a gang decides nothing; ``added``: callbacks that every fit of
    this process has are added.
    """
    placed = data if isinstance(data, PersistedSamples) else None
    session = connected_session_of(data if placed is None else placed.data, "fit")
    with end_of_session_explained(session):
        settings = settings_of(None, session)
        if quiet:
            settings = replace(settings, progress=HIDDEN)
        trainer = for_gang(trainer)
        check_replay(trainer, replay)
        model = prepare(trainer, start, check_connected)
        if kept is not None:
            kept.check(ModelIdentity.of(model.layout), model.optimizers)
        resume = None if resume is None else _absolute(resume)
        found = NewestCheckpoint("", 0, None)
        if trainer.checkpoint is not None:
            path = _absolute(trainer.checkpoint.path)
            trainer = replace(trainer, checkpoint=replace(trainer.checkpoint, path=path))
        if trainer.checkpoint is not None or resume is not None:
            found = look(session, trainer, resume, one_pass or any_data)
        if placed is not None:
            placed.check(trainer, model.float_dtype)
            ranks = placed.replicas
        else:
            ranks = (
                trainer.replicas or found.replicas or slots_of(session, trainer.resource_profile)
            )
        check_sizes(trainer, model.layout, ranks, None, settings.slab_dir)
        check_mesh(trainer, model, ranks)
        check_result(trainer, model, MAX_ROWS_BYTES)
        check_slots_of(session, ranks, trainer.resource_profile)
        slab = SlabConfig.new(settings.slab_dir, f"connect-{session.session_id}")
        if placed is not None:
            rows = placed.rows.into(slab)
        else:
            rows = ConnectedRows.of(trainer, data, ranks, model.float_dtype, slab)
        callbacks = tuple(trainer.callbacks)
        if added:
            callbacks += tuple(added_callbacks(callbacks))
        order = _order(
            trainer, callbacks, model, start, kept, carried, one_pass, any_data, settings
        )
        features, weighted = len(trainer.feature_columns), trainer.weight is not None
        sent = sent_bytes(order, "fit", session)
        fit = LedFit(slab, rows.write, features, weighted, sent, resume, MAX_ROWS_BYTES)
        end = Submissions(session, trainer, settings, rows.frame, ranks, fit, found, one_pass).end()
    if end is None:
        raise DataError(NO_ROWS)
    make = result_maker(trainer, model, end.samples, end.output)

    def weights(kind: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(end.weights.pop(kind)), dtype=model.layout.dtype)

    trained = trained_model(make, model.payload, end.kinds, weights, end.history)
    with_state(trained, end.packed, model)
    _bring_back(callbacks, end.attributes)
    return CarriedRun(trained, end.state, end.packed_best, end.schedule)


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in rank 0, whose working directory is another."""
    text = os.fspath(path)
    return text if text == LATEST else Folder.of(text).uri


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
        for name in ("stop", "schedule", "validation", "checkpoint", "histograms"):
            _check_pickles(
                getattr(sent, name),
                f"{name}=",
                "In a Spark Connect session rank 0 has it: let it hold no open resource.",
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

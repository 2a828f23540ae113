"""The periodic tasks of the training loop, validation and checkpoints, and the identity of a run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.checkpoint.identity import DataIdentity, ModelIdentity, consistency_text
from sparkdl.checkpoint.manifest import Manifest, RunIdentity
from sparkdl.checkpoint.resume import RestoredRun
from sparkdl.checkpoint.save import Checkpointer
from sparkdl.codec.describe import describe, describe_trainer
from sparkdl.data.fields import SampleHandle
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.recovery import RecoveringEngine
from sparkdl.loop.engine import Engine, PendingStateWork, StateWork
from sparkdl.loop.history import History
from sparkdl.loop.loop import PeriodicTask
from sparkdl.loop.state import TrainState
from sparkdl.loop.validation import Validator
from sparkdl.model.recipe import frozen_digest
from sparkdl.train.prepare import PreparedModel
from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def run_identity(
    trainer: Trainer, model: PreparedModel, handles: Sequence[SampleHandle]
) -> RunIdentity:
    """Return the identity of a run, as its checkpoints record it."""
    return RunIdentity(
        model=ModelIdentity.of(model.layout),
        data=DataIdentity.of(handles),
        constants={
            "replicas": len(handles),
            "batch_size": trainer.batch_size,
            "local_steps": trainer.options.local_steps,
            "consistency": consistency_text(describe(trainer.consistency_model)),
            "seed": trainer.seed,
        },
        optimizers=model.optimizers,
        options=trainer.options,
        frozen=frozen_digest(model.module),
        metric=trainer.validation.best if trainer.validation else None,
        compression=describe(
            trainer.consistency if trainer.options.keeps_own else trainer.compression
        ),
        config=describe_trainer(trainer),
    )


def periodic_tasks(
    trainer: Trainer,
    engine: Engine,
    validation: ValidationSet | None,
    identity: RunIdentity,
    manifest_model: Mapping[str, Any],
    state: TrainState,
    history: History,
    one_pass: bool,
) -> list[PeriodicTask]:
    """Return the tasks that the loop runs after an iteration when they are due, in order."""
    tasks: list[PeriodicTask] = []
    if validation is not None and trainer.validation is not None:
        tasks.append(Validator(engine, trainer.validation, validation.scorer, history))
    if trainer.checkpoint is not None:
        if "unknown" in manifest_model and state.iteration == 0:
            logger.warning(
                "the checkpoints of this run can be resumed, but sparkdl.load cannot read them, "
                "and save() of the trained model will fail: %s",
                manifest_model["unknown"],
            )
        noting, background = None, None
        if isinstance(engine, RecoveringEngine):
            noting = functools.partial(_noting, identity, engine)
            if trainer.checkpoint.asynchronous:
                background = functools.partial(_in_background, engine)
        checkpointer = Checkpointer(
            trainer.checkpoint,
            engine,
            identity,
            history,
            noting,
            background,
            model=manifest_model,
            begun=state,
            endless=one_pass,
        )
        checkpointer.check()
        tasks.append(checkpointer)
    return tasks


def _noting(run: RunIdentity, engine: RecoveringEngine) -> Callable[[str, Manifest], None]:
    """Return a function that tells the engine of a committed checkpoint of the present state.

    The engine may then go back to that checkpoint.
    """
    return functools.partial(_note_checkpoint, run, engine, engine.done)


def _note_checkpoint(
    run: RunIdentity, engine: RecoveringEngine, done: int, uri: str, manifest: Manifest
) -> None:
    load = RestoredRun.of(run, uri, manifest, History()).load
    engine.checkpointed(done, manifest.iteration, load)


def _in_background(engine: RecoveringEngine, uses: StateWork) -> PendingStateWork:
    return engine.later(lambda gang: gang.in_background(uses))

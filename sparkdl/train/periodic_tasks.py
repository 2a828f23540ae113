"""The stages of the loop that a trainer asks for: validation, and checkpoints."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.checkpoint.manifest import Manifest
from sparkdl.checkpoint.resume import Restored
from sparkdl.checkpoint.save import Checkpointer, Identity
from sparkdl.engines.recovery import Recovering
from sparkdl.loop.engine import Engine, Later, Uses, ValidationSet
from sparkdl.loop.history import History
from sparkdl.loop.loop import Stage
from sparkdl.loop.state import TrainState
from sparkdl.loop.validation import Validator
from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def stages_of(
    trainer: Trainer,
    engine: Engine,
    validation: ValidationSet | None,
    identity: Identity,
    told: Mapping[str, Any],
    state: TrainState,
    history: History,
    one_pass: bool,
) -> list[Stage]:
    """Return what the loop does after an iteration where it is due, in order.

    Args:
        trainer: What to validate on, and where and when to write checkpoints.
        engine: The engine that trains.
        validation: The validation samples in place, or None.
        identity: What model and data a checkpoint is of.
        told: What a checkpoint's manifest tells of the model.
        state: Where the run begins.
        history: The run's history, which grows.
        one_pass: Whether this is a ``partial_fit``, after which another may follow.

    Raises:
        CheckpointError: No checkpoint can be written where the trainer says.
    """
    stages: list[Stage] = []
    if validation is not None and trainer.validation is not None:
        stages.append(Validator(engine, trainer.validation, validation, history))
    if trainer.checkpoint is not None:
        if "unknown" in told and state.iteration == 0:
            logger.warning(
                "the checkpoints of this run can be resumed from, but sparkdl.load cannot read them, "
                "and save() of its result will fail: %s",
                told["unknown"],
            )
        noting, background = None, None
        if isinstance(engine, Recovering):
            noting = functools.partial(_noting, trainer, engine)
            if trainer.checkpoint.asynchronous:
                background = functools.partial(_in_background, engine)
        checkpointer = Checkpointer(
            trainer,
            engine,
            identity,
            history,
            noting,
            background,
            told=told,
            begun=state,
            endless=one_pass,
        )
        checkpointer.check()
        stages.append(checkpointer)
    return stages


def _noting(trainer: Trainer, engine: Recovering) -> Callable[[str, Manifest], None]:
    """For a checkpoint of the state as it stands: the engine may go back to it once it is committed."""
    return functools.partial(_note_checkpoint, trainer, engine, engine.done)


def _note_checkpoint(
    trainer: Trainer, engine: Recovering, done: int, uri: str, manifest: Manifest
) -> None:
    load = Restored.of(trainer, uri, manifest, History()).load
    engine.checkpointed(done, manifest.iteration, load)


def _in_background(engine: Recovering, uses: Uses) -> Later:
    return engine.later(lambda gang: gang.in_background(uses))

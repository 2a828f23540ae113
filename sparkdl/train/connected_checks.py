"""Checks of what a session of Spark Connect can train."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParameterError, SessionError
from sparkdl.session import is_connected

if TYPE_CHECKING:
    from sparkdl.train.prepare import PreparedModel
    from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")
_told_engines: set[str] = set()
"""The engines of which this process was told that the gang takes their place."""


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
    if trainer.engine not in _told_engines:
        _told_engines.add(trainer.engine)
        logger.warning(
            'training with engine="gang": the engine "%s" needs RDDs, which a Spark Connect session '
            'does not have. Say engine="gang" to leave this line out.',
            trainer.engine,
        )
    return own


def check_connected(data: Any) -> None:
    """Raise SessionError or DataError unless ``data`` is a DataFrame of Spark Connect."""
    if not is_connected(data):
        raise SessionError(
            "it is not a DataFrame of a Spark Connect session, as the training data is: make both "
            "with one session."
        )


def check_result(trainer: Trainer, model: PreparedModel, most: int) -> None:
    """Raise ParameterError if the result, above ``most`` bytes, has no other way than rows."""
    kinds = 1 + (trainer.ema is not None) + bool(trainer.validation and trainer.validation.best)
    nbytes = model.layout.nbytes * kinds
    if nbytes > most and trainer.checkpoint is None:
        raise ParameterError(
            f"the result has {nbytes / 1e6:,.0f} MB of weights, and a Spark Connect session returns at "
            f"most {most / 1e6:,.0f} MB in rows: give Trainer(checkpoint="
            "sparkdl.Checkpoint(path)) a folder that the executors share, through which it comes."
        )

"""Checks of the session and the model for a gang of a given size, before the data is read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyspark import SparkContext

from sparkdl.engines.gang.start import too_few
from sparkdl.errors import ParameterError, raise_all
from sparkdl.gang.slots import check_slots
from sparkdl.parallel.plan import parallel_of
from sparkdl.train.combinations import problems_of_min_ranks
from sparkdl.train.prepare import PreparedModel

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


def check_gang(trainer: Trainer, model: PreparedModel, context: SparkContext, ranks: int) -> None:
    """Raise an error if a gang of this many ranks cannot run.

    Args:
        trainer: The user's trainer.
        model: The prepared model.
        context: The SparkContext.
        ranks: The number of ranks.

    Raises:
        ParameterError: The ranks cannot share the work as the trainer says.
        ModelError: The model cannot be cut for this many ranks.
        SessionError: The ranks cannot run at once.
    """
    raise_all(ParameterError, list(problems_of_min_ranks(trainer.min_ranks, ranks)))
    parallel = parallel_of(trainer.parts, trainer.mesh, ranks)
    for part in parallel.parts.values():
        part.check_mesh(model.module, parallel.mesh)
    profile, least = trainer.resource_profile, trainer.min_ranks
    slots = check_slots(context, ranks, profile=profile, min_slots=least)
    if slots < ranks:
        logger.warning("%s.", too_few(slots, ranks))

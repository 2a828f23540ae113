"""Trials one after another, each a fit by the trainer's engine on the whole cluster."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark import SparkContext

from sparkdl.checkpoint.files import Folder
from sparkdl.errors import ModelError, ParameterError
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.engine import AVERAGE, BEST, CURRENT
from sparkdl.loop.interrupt import INTERRUPTED
from sparkdl.model.flat import FlatModule
from sparkdl.train.placed_samples import PlacedSamples
from sparkdl.train.trainer import Trainer
from sparkdl.tune.placements import Placements
from sparkdl.tune.record import Objective, TrialOutcome, failed, is_of_trial
from sparkdl.tune.runners import Ended, Proposed, RunningTrial, SearchInterrupted, check_alive
from sparkdl.tune.space import Domain
from sparkdl.tune.tasks import trainer_of


class OneByOne:
    """Trials one after another, each a fit by the trainer's engine on the whole cluster."""

    slots = 1

    def __init__(
        self,
        context: SparkContext,
        trainer: Trainer,
        space: Mapping[str, Domain],
        objective: Objective,
        placements: Placements,
        keep: bool,  # outcomes have the weights, to be written to a folder
    ) -> None:
        self._context, self._trainer, self._space = context, trainer, space
        self._objective, self._placements, self._keep = objective, placements, keep

    def start(self, trial: Proposed) -> RunningTrial:
        number, arguments, pruning, best = trial
        try:
            trainer = trainer_of(self._trainer, self._space, arguments)
            placed = self._placements.of(trainer, arguments)
        except (ModelError, ParameterError) as error:
            return Ended(TrialOutcome(failed(number, arguments, error)))
        self._placements.check_data(arguments)
        if pruning is not None:
            trainer = replace(trainer, callbacks=[*trainer.callbacks, pruning])
        try:
            trained = self._fit(trainer, placed, number)
        except Exception as error:
            if not is_of_trial(error):
                raise
            check_alive(self._context)
            return Ended(TrialOutcome(failed(number, arguments, error)))
        if trained.history.stopped == INTERRUPTED:
            raise SearchInterrupted
        record = self._objective.record(number, arguments, trained.history)
        if not self._objective.is_better(record, best):
            return Ended(TrialOutcome(record, history=trained.history))
        weights = weights_of(trained) if self._keep else {}
        return Ended(TrialOutcome(record, weights, trained.history, trained))

    def _fit(self, trainer: Trainer, placed: PlacedSamples, number: int) -> TrainedModel:
        checkpoint = trainer.checkpoint
        if checkpoint is None:
            return trainer.fit(placed)
        path = Folder.of(checkpoint.path).folder(f"trial-{number:06d}").uri
        own = replace(trainer, checkpoint=replace(checkpoint, path=path))
        return own.fit(placed, resume="latest")


def weights_of(trained: TrainedModel) -> dict[str, Any]:
    """Return the flat vector of each kind of weights of a result."""
    kinds = {CURRENT: trained, AVERAGE: trained.ema, BEST: trained.best}
    return {
        kind: FlatModule(copy.deepcopy(one.module)).flat
        for kind, one in kinds.items()
        if one is not None
    }

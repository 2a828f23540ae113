"""Validation during training: scores on the executors, with the replicas' current weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ParameterError, known_arguments, raise_all, shown
from sparkdl.loop.engine import Engine
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated
from sparkdl.loop.triggers import EveryEpoch, Trigger, no_trigger
from sparkdl.metrics.named import scalar_names
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.recipe import Part, problems_of_part
from sparkdl.plain import is_whole, make_plain

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

EVERY_EPOCH = EveryEpoch()


@known_arguments
@dataclass(frozen=True)
class Validation:
    """The data, the metrics and the times of validations.

    The metrics are in ``history`` and available to triggers:
    ``stop=max_epoch(50) | plateau("accuracy", 3)`` stops early.
    """

    data: DataFrame | RDD[Any]
    """Read once, with the trainer's columns, into slabs beside the training samples."""
    metrics: Sequence[Any] | Mapping[str, Any] = ()
    """The metrics, as for ``trained.evaluate``; "loss" is always included."""
    every: Trigger = EVERY_EPOCH
    """The trigger of a validation; by default each epoch."""
    best: str | None = None
    """A metric: the weights with its best value are kept, and returned as ``trained.best``."""
    batch_size: int = 1024
    """Rows in a forward pass of one replica."""
    output: Part = None
    """The part of the model's output that the metrics use, if it is not ``Trainer.output``."""

    def __post_init__(self) -> None:
        problems = []
        make_plain(self, "batch_size", "best")
        if not isinstance(self.every, Trigger):
            problems.append(no_trigger("Validation(every={})", self.every, "sparkdl.every_epoch()"))
        if not is_whole(self.batch_size, 1):
            problems.append(
                f"Validation(batch_size={shown(self.batch_size)}): give a whole number of at least 1."
            )
        problems += problems_of_part(self.output, "Validation: ")
        raise_all(ParameterError, problems)
        if isinstance(self.metrics, Iterator):  # it can be consumed only once
            object.__setattr__(self, "metrics", tuple(self.metrics))
        names = scalar_names(self.metrics)
        if self.best is not None and self.best not in names:
            raise ParameterError(
                f'Validation(best="{self.best}") is not one of its metrics: {", ".join(names)}.'
            )


class Validator:
    """The periodic task of the loop that validates when it is due, and keeps the best weights."""

    hook = "on_validation_end"

    def __init__(
        self, engine: Engine, validation: Validation, scorer: Scorer, history: History
    ) -> None:
        self._engine, self._validation, self._scorer = engine, validation, scorer
        self._history, self.every = history, validation.every

    def __call__(self, previous: TrainState, state: TrainState) -> TrainState:
        if not self.every(previous, state):
            return state
        values = self._scorer.values(self._engine.score())
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        arrays = {name: value for name, value in values.items() if name not in numbers}
        record = Validated(
            iteration=state.iteration, epoch=state.epoch, metrics=numbers, arrays=arrays
        )
        self._history.append_validation(record)
        higher = self._scorer.higher_is_better
        metric, best = self._validation.best, state.best
        if metric in arrays:
            raise ParameterError(
                f'Validation(best="{metric}"): the metric gives several numbers, of which none is the '
                'best: use a reduced one, for example with average="macro".'
            )
        if metric is not None and is_better(record, best, metric, higher[metric]):
            self._engine.keep_best()
            best = record
        return replace(
            state, validations=(*state.validations, record), best=best, higher_is_better=higher
        )

    def finish(self, state: TrainState) -> TrainState:
        """Return ``state``, because nothing is left to do, see
        :class:`sparkdl.loop.loop.PeriodicTask`."""
        return state


def is_better(record: Validated, best: Validated | None, metric: str, higher: bool) -> bool:
    """Return whether a validation's value is better than the best one before.

    NaN never is better, and neither is a missing value, if there was nothing to measure.
    """
    value = record.metrics.get(metric, math.nan)
    if math.isnan(value) or best is None:
        return not math.isnan(value)
    return value > best.metrics[metric] if higher else value < best.metrics[metric]

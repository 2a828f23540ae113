"""The outcome of one trial of a search: what was tried, and how good it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.codec.safe import from_plain, to_plain
from sparkdl.errors import ModelError, ParameterError, SparkdlError, TrainingError
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.history import History

COMPLETED, PRUNED, FAILED = "completed", "pruned", "failed"
PRUNING = "pruned"
"""The reason with which a trial is stopped that is not worth going on with."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The value of the search's metric at one validation of a trial."""

    iteration: int
    value: float


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial: a row of the table of a search.

    Attributes:
        number: The number of the trial, from 0.
        arguments: The values that were tried, by the names of the space; a value that is no number
            or text is described.
        status: "completed", "pruned" (stopped because others were better), or "failed".
        value: The value of the metric that the trial counts by; NaN if it has none.
        metrics: All metrics of the validation that it counts by.
        scores: The metric at every validation, in order.
        epochs: The number of completed epochs.
        iterations: The number of iterations.
        seconds: The time that the training took, in seconds.
        reason: Why the trial failed, or why the training ended early; empty if it did not.
    """

    number: int
    arguments: Mapping[str, Any]
    status: str
    value: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()
    epochs: int = 0
    iterations: int = 0
    seconds: float = 0.0
    reason: str = ""

    def to_json(self) -> Any:
        """Return the record as plain JSON values."""
        return to_plain(self, TrialRecord)

    @staticmethod
    def from_json(content: Any) -> TrialRecord:
        """Read the result of :meth:`to_json`.

        Raises:
            ValueError: It is no such result.
        """
        found: TrialRecord = from_plain(content, TrialRecord)
        return found


@dataclass(frozen=True)
class Objective:
    """The aim of a search."""

    metric: str
    higher: bool  # more is better
    best: bool  # a trial counts by its best validation, not by its last one

    def is_better(self, record: TrialRecord, best: TrialRecord | None) -> bool:
        """Return whether a record takes the place of the ``best`` one so far.

        Only completed trials with a value do. Of equal values the trial with the lower number is
        better, so that the best trial does not depend on which one ended first.
        """
        if record.status != COMPLETED or math.isnan(record.value):
            return False
        if best is None:
            return True
        if record.value == best.value:
            return record.number < best.number
        return record.value > best.value if self.higher else record.value < best.value

    def record(self, number: int, arguments: Mapping[str, Any], history: History) -> TrialRecord:
        """Return the record of a training that ended without an error."""
        validations = history.validations
        scores = tuple(
            Score(iteration=one["iteration"], value=one["metrics"].get(self.metric, math.nan))
            for one in validations
        )
        chosen = self._chosen([score.value for score in scores])
        status, reason = COMPLETED, history.stopped or ""
        if reason.endswith(f": {PRUNING}"):
            status, reason = PRUNED, "its validations were worse than those of other trials"
        elif chosen is None:
            status, reason = FAILED, "no validation was due before the training ended"
        last = history.last(1)
        return TrialRecord(
            number=number,
            arguments=dict(arguments),
            status=status,
            value=math.nan if chosen is None else scores[chosen].value,
            metrics={} if chosen is None else dict(validations[chosen]["metrics"]),
            scores=scores,
            epochs=int(last[-1]["epoch"]) if last else 0,
            iterations=len(history),
            seconds=float(last[-1]["seconds"]) if last else 0.0,
            reason=reason,
        )

    def _chosen(self, values: Sequence[float]) -> int | None:
        """Return the number of the validation that a trial counts by, or None if there is none."""
        known = [n for n, value in enumerate(values) if not math.isnan(value)]
        if not values or (self.best and not known):
            return None
        if not self.best:
            return len(values) - 1
        sign = -1 if self.higher else 1
        return min(known, key=lambda n: sign * values[n])


def is_of_trial(error: Exception) -> bool:
    """Return whether an error ends one trial only.

    What a trial was given, and what its functions and callbacks raise, does. Data, a session or a
    checkpoint that cannot be used, and what Spark reports of itself, ends the search.
    """
    if isinstance(error, SparkdlError):
        return isinstance(error, (ModelError, ParameterError, TrainingError))
    return not isinstance(error, (PySparkException, Py4JError, OSError))


def failed(number: int, arguments: Mapping[str, Any], error: BaseException) -> TrialRecord:
    """Return the record of a trial that ended with ``error``."""
    kind = type(error)
    text = str(error).strip()
    named = text if kind.__module__.startswith("sparkdl.") and text else f"{kind.__name__}: {text}"
    return TrialRecord(
        number=number, arguments=dict(arguments), status=FAILED, reason=named.removesuffix(": ")
    )


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial."""

    record: TrialRecord
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)  # flat; {} if not best
    history: History | None = None  # of the best so far, or for a log
    trained: TrainedModel | None = None  # if this process made the trial

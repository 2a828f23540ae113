"""The trials of a search, and its folder, from which a search goes on whose driver has ended.

``search.json`` says what is searched, and ``data.json`` on which data, for each way to read it. Each
finished trial has a file ``trial-000007.json``, and the best one so far
``model-000007.safetensors``, which is written before. A file appears only when it is complete.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.checkpoint.files import Folder, unfinished
from sparkdl.checkpoint.manifest import DataIdentity
from sparkdl.codec.files import (
    MAX_JSON_BYTES,
    checksum,
    is_changed,
    parse_json,
    parse_tensors,
    with_checksum,
)
from sparkdl.codec.safe import from_plain, to_plain
from sparkdl.data.fields import SampleHandle
from sparkdl.errors import CheckpointError, ModelError, ParameterError, SparkdlError, TrainingError
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

    @property
    def sign(self) -> int:
        """The factor that makes less of the metric better."""
        return -1 if self.higher else 1

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
        return self.sign * record.value < self.sign * best.value

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
        return min(known, key=lambda n: self.sign * values[n])


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


logger = logging.getLogger("sparkdl")
FORMAT, VERSION = "sparkdl-search", 1
SEARCH, DATA = "search.json", "data.json"
_TRIAL = re.compile(r"trial-(\d{6,})\.json")
_HISTORY = "history"
_MODEL = "model"
"""The key of the model's checksum in the file of its trial."""


class SearchFolder:
    """The files of one search."""

    def __init__(self, folder: Folder, search_id: str, objective: Objective) -> None:
        self._folder, self._objective = folder, objective
        self.search_id = search_id
        self.records: dict[int, TrialRecord] = {}
        self._best: TrialRecord | None = None

    @staticmethod
    def open(
        path: str | os.PathLike[str], told: Mapping[str, str], objective: Objective
    ) -> SearchFolder:
        """Open the folder of a search, which is created if there is none.

        A search goes on only if all of ``told``, what is searched in words, is the same.
        """
        folder, form = Folder.of(path), {"format": FORMAT, "version": VERSION}
        entries = folder.entries()
        trials = [name for name in entries if _TRIAL.fullmatch(name)]
        if SEARCH not in entries or not trials:
            names, known = {unfinished(name) or name for name in entries}, {SEARCH, DATA}
            if SEARCH in entries:  # its first trial may have been killed
                known |= {name for name in names if name.startswith(("model-", "trial-"))}
            if not names <= known:
                raise ParameterError(
                    f"path={str(folder)!r} has files in it and holds no search: give a new folder."
                )
            folder.make()
            if DATA in entries:
                folder.delete(DATA)
            found = SearchFolder(folder, secrets.token_hex(8), objective)
            higher = {"higher_is_better": objective.higher}
            folder.write(SEARCH, _json({**form, "id": found.search_id, **told, **higher}))
            return found
        content = _read(folder, SEARCH)
        if not isinstance(content, dict) or not form.items() <= content.items():
            raise ParameterError(f"{folder}/{SEARCH} is no {FORMAT} of version {VERSION}.")
        differing = [
            f"{name} is {value} here and {content.get(name)} there"
            for name, value in told.items()
            if content.get(name) != value
        ]
        if differing:
            raise ParameterError(
                f"{folder} holds another search: {'; '.join(differing)}. Give a folder of its own, or "
                "search as before."
            )
        found = SearchFolder(folder, str(content.get("id")), objective)
        found._read_trials(trials, set(entries))
        return found

    def check_data(
        self, reading: str, training: Sequence[SampleHandle], validation: Sequence[SampleHandle]
    ) -> None:
        """Raise ParameterError if earlier trials of this search had other data."""
        there = _read(self._folder, DATA) if DATA in self._folder.entries() else {}
        here = {"data": DataIdentity.of(training), "validation data": DataIdentity.of(validation)}
        for what, data in here.items() if reading in there else ():
            stored = from_plain(there[reading][what], DataIdentity)
            if stored != data:
                raise ParameterError(
                    f"{self._folder} holds a search on other {what}, of {sum(stored.rows):,} rows; "
                    f"this {what} has {sum(data.rows):,}. Give a folder of its own, or the same data."
                )
        if reading not in there:
            plain = {what: to_plain(data, DataIdentity) for what, data in here.items()}
            self._folder.write(DATA, _json({**there, reading: plain}))

    def add(self, outcome: TrialOutcome) -> None:
        """Write a finished trial, with its model if it is the best one."""
        record, before = outcome.record, self._best
        best = bool(outcome.weights) and self._objective.is_better(record, before)
        content = record.to_json()
        if best and outcome.history is not None:
            history = torch.frombuffer(bytearray(outcome.history.to_bytes()), dtype=torch.uint8)
            tensors = {kind: flat.contiguous() for kind, flat in outcome.weights.items()}
            data = safetensors.torch.save({**tensors, _HISTORY: history})
            self._folder.write(_model(record.number), data)
            content[_MODEL] = checksum(data)
        self._folder.write(_trial(record.number), _json(content))
        self.records[record.number] = record
        if best:
            self._best = record
            if before is not None:
                self._folder.delete(_model(before.number))

    def model(self, number: int) -> tuple[Mapping[str, torch.Tensor], History]:
        """Return the weights by kind and the history of the best trial."""
        if _model(number) not in self._folder.entries():
            raise ParameterError(
                f"{self._folder} has the model of the best of its {len(self.records)} trials only, and "
                f"of those asked for trial {number} is the best: search with as many trials as before."
            )
        try:
            data = self._folder.read(_model(number))
            if checksum(data) != _read(self._folder, _trial(number)).get(_MODEL, checksum(data)):
                raise ValueError("its checksum differs")
            tensors, _ = parse_tensors(data)
            history = History.from_bytes(tensors.pop(_HISTORY).numpy().tobytes())
        except (KeyError, ValueError) as error:
            raise ParameterError(
                f"{self._folder}/{_model(number)} is damaged ({error}): delete "
                f"{_trial(number)} beside it, and the trial is made again."
            ) from error
        return tensors, history

    def _read_trials(self, names: Sequence[str], there: set[str]) -> None:
        """Read the finished trials. A trial that cannot be read is made again."""
        for name in names:
            try:
                record = TrialRecord.from_json(_read(self._folder, name))
                if _trial(record.number) != name:
                    raise ValueError(f"it holds trial {record.number}")
            except (CheckpointError, ParameterError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s/%s: its trial is made again: %s", self._folder, name, error)
                continue
            self.records[record.number] = record
        for record in self.records.values():
            if self._objective.is_better(record, self._best):
                self._best = record
        if self._best is not None and _model(self._best.number) not in there:
            number = self._best.number
            logger.warning(
                "%s has no %s: trial %d is made again", self._folder, _model(number), number
            )
            del self.records[number]
            self._best = None


def finished_trials(path: str | os.PathLike[str]) -> tuple[list[TrialRecord], Objective]:
    """Return the finished trials of the folder of a search, by number, and what it sought.

    Raises ParameterError if the folder cannot be read.
    """
    folder = Folder.of(path)
    search, entries = _read(folder, SEARCH), folder.entries()
    metric = str(search.get("metric", "loss"))
    objective = Objective(metric, bool(search.get("higher_is_better", metric != "loss")), True)
    found = SearchFolder(folder, "", objective)
    found._read_trials([name for name in entries if _TRIAL.fullmatch(name)], set(entries))
    return [found.records[number] for number in sorted(found.records)], objective


def _trial(number: int) -> str:
    return f"trial-{number:06d}.json"


def _model(number: int) -> str:
    return f"model-{number:06d}.safetensors"


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(with_checksum(content), indent=1) + "\n").encode()


def _read(folder: Folder, name: str) -> Any:
    """Return the content of a JSON file. Raises ParameterError if it is none, or was changed."""
    try:
        content = parse_json(folder.read(name, MAX_JSON_BYTES))
    except ValueError as error:
        raise ParameterError(f"{folder}/{name} is damaged: {error}.") from error
    if is_changed(content):
        raise ParameterError(f"{folder}/{name} is damaged: its checksum differs.")
    return content

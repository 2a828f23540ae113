"""A search while it runs: the table of its trials with the progress, and its logs.

Logs, such as runs of MLflow, are what callbacks of the trainer or of every fit offer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.codec.describe import describe
from sparkdl.errors import ModelError, ParameterError
from sparkdl.loop.callbacks import added_callbacks
from sparkdl.loop.history import History
from sparkdl.loop.progress import LOG_SECONDS, log_line, shows_bar
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import trainer_of
from sparkdl.tune.folder import Objective, SearchFolder, TrialOutcome, TrialRecord
from sparkdl.tune.space import Domain

if TYPE_CHECKING:
    from sparkdl.tune.result import SearchResult


class SearchLog(Protocol):
    """A place where a search is logged, by the driver."""

    def open(self, trainer: Trainer, space: Mapping[str, str]) -> None:
        """Begin to log a search over ``space`` in words; raise ParameterError if that cannot be."""

    def add(self, trainer: Trainer | None, record: TrialRecord, history: History | None) -> None:
        """Log a trial that has ended; ``history`` is None if only the record is known."""

    def close(self, result: Any) -> None:
        """End the log; ``result`` is None if the search failed."""


class SearchLogs:
    """All logs of one search.

    Use it as a context manager: leaving it ends the logs.
    """

    def __init__(
        self, logs: Sequence[SearchLog], trainer: Trainer, space: Mapping[str, Domain]
    ) -> None:
        self._logs, self._trainer, self._space = logs, trainer, space
        self.result: SearchResult | None = None
        """The result, once it is there."""

    @staticmethod
    def of(trainer: Trainer, space: Mapping[str, Domain]) -> tuple[SearchLogs, Trainer]:
        """Return the logs that callbacks offer, and the trainer with the other callbacks alone."""
        own = [(callback, callback.for_search()) for callback in trainer.callbacks]
        added = [callback.for_search() for callback in added_callbacks(trainer.callbacks)]
        logs: list[SearchLog] = [
            log for log in (*(log for _, log in own), *added) if log is not None
        ]
        others = [callback for callback, log in own if log is None]
        return SearchLogs(logs, trainer, space), replace(trainer, callbacks=others)

    def __bool__(self) -> bool:
        return bool(self._logs)

    def add(self, record: TrialRecord, history: History | None) -> None:
        """Log a trial that has ended, see :meth:`SearchLog.add`."""
        if not self._logs:
            return
        own: Trainer | None
        try:
            own = trainer_of(self._trainer, self._space, record.arguments)
        except (ModelError, ParameterError):
            own = None
        for log in self._logs:
            log.add(own, record, history)

    def __enter__(self) -> SearchLogs:
        words = {name: describe(domain) for name, domain in self._space.items()}
        for log in self._logs:
            log.open(self._trainer, words)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for log in self._logs:
            log.close(self.result)


class TrialTable:
    """The finished trials while a search runs, in a folder too if there is one.

    It is a context manager that shows the progress.
    """

    def __init__(
        self,
        objective: Objective,
        folder: SearchFolder | None,
        progress: str,
        trials: int,
        logs: SearchLogs,
    ) -> None:
        self._logs = logs
        self._objective, self._trials, self._progress = objective, trials, progress
        self.folder = folder
        self.earlier = {} if folder is None else dict(folder.records)
        self.records: dict[int, TrialRecord] = {}
        self.best: TrialRecord | None = None
        self.best_outcome: TrialOutcome | None = None  # also None if only the folder has it
        self._bar: Any = None
        self._told_at = time.monotonic()

    def add(self, outcome: TrialOutcome) -> None:
        """Add a trial that has just ended."""
        if self.folder is not None:
            self.folder.add(outcome)
        record = outcome.record
        self._logs.add(record, outcome.history)
        if self._note(record):
            self.best_outcome = outcome
        now = time.monotonic()
        if self._progress == "auto" and self._bar is None and now - self._told_at > LOG_SECONDS:
            self._told_at = now
            log_line(f"search: {len(self.records)} of {self._trials} trials{self._best_so_far}")

    def add_earlier(self, number: int) -> TrialRecord:
        """Add a trial that the folder has, and return it."""
        record = self.earlier[number]
        self._logs.add(record, None)
        if self._note(record):
            self.best_outcome = None
        return record

    def _note(self, record: TrialRecord) -> bool:
        """Add a record, and return whether it is the best one now."""
        self.records[record.number] = record
        better = self._objective.is_better(record, self.best)
        if better:
            self.best = record
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(self._best_so_far.removeprefix(", "))
        return better

    @property
    def _best_so_far(self) -> str:
        if self.best is None:
            return ""
        return f", best {self._objective.metric} {self.best.value:.4g} in trial {self.best.number}"

    def __enter__(self) -> TrialTable:
        if shows_bar(self._progress):
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._trials, unit="trial", dynamic_ncols=True, desc="search")
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

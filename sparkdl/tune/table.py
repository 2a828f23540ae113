"""The table of trials while a search runs: records, the best one, and the progress."""

from __future__ import annotations

import time
from typing import Any

from sparkdl.loop.progress import LOG_SECONDS, log_line, shows_bar
from sparkdl.tune.folder import SearchFolder
from sparkdl.tune.logs import SearchLogs
from sparkdl.tune.record import Objective, TrialOutcome, TrialRecord


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

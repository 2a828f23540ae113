"""The logs of a search, such as runs of MLflow: callbacks of the trainer or of every fit offer them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from sparkdl.codec.describe import describe
from sparkdl.errors import ModelError, ParameterError
from sparkdl.loop.callbacks import added_callbacks
from sparkdl.loop.history import History
from sparkdl.train.trainer import Trainer
from sparkdl.tune.record import TrialRecord
from sparkdl.tune.space import Domain
from sparkdl.tune.tasks import trainer_of

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

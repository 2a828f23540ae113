"""Trials in a session of Spark Connect: each is a fit of a gang, several at once, in threads here."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pyspark.errors import PySparkException

from sparkdl.connect.rows import for_gang
from sparkdl.errors import ModelError, ParameterError, SessionError
from sparkdl.gang.connect import slots_of
from sparkdl.loop.callbacks import none_added
from sparkdl.loop.interrupt import INTERRUPTED
from sparkdl.train.fit import fit
from sparkdl.train.request import FitRequest
from sparkdl.train.trainer import Trainer
from sparkdl.tune.record import Objective, TrialOutcome, TrialRecord, failed, is_of_trial
from sparkdl.tune.runners import Ended, Proposed, RunningTrial, SearchInterrupted
from sparkdl.tune.space import Domain
from sparkdl.tune.tasks import trainer_of


def check_search(trainer: Trainer, path: Any) -> None:
    """Raise :class:`SessionError` for what a search cannot have in a Spark Connect session."""
    for name, value in (("path=", path), ("Trainer(checkpoint=)", trainer.checkpoint)):
        if value is not None:
            raise SessionError(
                f"{name} cannot be had by a search in a Spark Connect session, which keeps its trials "
                "in this process: leave it out, or start a classic session."
            )


class ConnectedTrials:
    """Trials as fits of gangs. Use it as a context manager; leaving it ends trials that run."""

    def __init__(
        self,
        data: Any,
        trainer: Trainer,
        space: Mapping[str, Domain],
        objective: Objective,
        parallel: int | None,  # trials at once; None: as many as have slots
    ) -> None:
        self._session: Any = data.sparkSession
        self._data, self._space, self._objective = data, space, objective
        trainer = for_gang(trainer)
        self.slots = 1
        if parallel != 1:
            trainer = replace(trainer, replicas=trainer.replicas or 1)
            most = max(1, slots_of(self._session) // (trainer.replicas or 1))
            self.slots = min(most, parallel or most)
        self._trainer, self._tag = trainer, f"sparkdl-{secrets.token_hex(8)}"
        self._threads = ThreadPoolExecutor(self.slots) if parallel != 1 else None

    def start(self, trial: Proposed) -> RunningTrial:
        number, arguments, pruning, best = trial
        try:
            trainer = trainer_of(self._trainer, self._space, arguments)
        except (ModelError, ParameterError) as error:
            return Ended(TrialOutcome(failed(number, arguments, error)))
        if pruning is not None:
            trainer = replace(trainer, callbacks=[*trainer.callbacks, pruning])
        if self._threads is None:
            outcome = self._outcome(number, arguments, trainer, best)
            if outcome.history is not None and outcome.history.stopped == INTERRUPTED:
                raise SearchInterrupted
            return Ended(outcome)
        return _Trial(self._threads.submit(self._outcome, number, arguments, trainer, best))

    def _outcome(
        self,
        number: int,
        arguments: Mapping[str, Any],
        trainer: Trainer,
        best: TrialRecord | None,
    ) -> TrialOutcome:
        self._session.addTag(self._tag)
        request = FitRequest(trainer=trainer, quiet=self._threads is not None)
        try:
            with none_added():
                trained = fit(self._data, request).trained
        except Exception as error:
            if not is_of_trial(error):
                raise
            return TrialOutcome(failed(number, arguments, error))
        finally:
            self._session.removeTag(self._tag)
        record = self._objective.record(number, arguments, trained.history)
        kept = trained if self._objective.is_better(record, best) else None
        return TrialOutcome(record, history=trained.history, trained=kept)

    def __enter__(self) -> ConnectedTrials:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._threads is not None:
            with contextlib.suppress(PySparkException):
                self._session.interruptTag(self._tag)
            self._threads.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Trial:
    """A trial in a thread."""

    future: Future[TrialOutcome]

    @property
    def done(self) -> bool:
        return self.future.done()

    def outcome(self) -> TrialOutcome:
        return self.future.result()

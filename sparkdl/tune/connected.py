"""Trials in a session of Spark Connect: each is a fit of a gang, several at once, in threads here."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pyspark.errors import PySparkException

from sparkdl.connect.rows import for_gang
from sparkdl.errors import SessionError
from sparkdl.gang.connect import slots_of
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import none_added
from sparkdl.train.fit import fit
from sparkdl.train.request import FitRequest
from sparkdl.train.trainer import Trainer
from sparkdl.tune.record import Objective
from sparkdl.tune.runner import FitsHere, Proposed, RunningTrial
from sparkdl.tune.space import Domain


def check_search(trainer: Trainer, path: Any) -> None:
    """Raise :class:`SessionError` for what a search cannot have in a Spark Connect session."""
    for name, value in (("path=", path), ("Trainer(checkpoint=)", trainer.checkpoint)):
        if value is not None:
            raise SessionError(
                f"{name} cannot be had by a search in a Spark Connect session, which keeps its trials "
                "in this process: leave it out, or start a classic session."
            )


class ConnectedTrials(FitsHere):
    """Trials as fits of gangs, one after another, or several at once in threads."""

    def __init__(
        self,
        data: Any,
        trainer: Trainer,
        space: Mapping[str, Domain],
        objective: Objective,
        parallel: int | None,  # trials at once; None: as many as have slots
    ) -> None:
        self._data, self._session, trainer = data, data.sparkSession, for_gang(trainer)
        if parallel != 1:
            trainer = replace(trainer, replicas=trainer.number_of_replicas or 1)
            most = max(1, slots_of(self._session) // (trainer.number_of_replicas or 1))
            self.slots = min(most, parallel or most)
        super().__init__(None, trainer, space, objective, None)
        self._tag = f"sparkdl-{secrets.token_hex(8)}"
        self._threads = ThreadPoolExecutor(self.slots) if parallel != 1 else None

    def _start(self, trial: Proposed, trainer: Trainer, placed: Any) -> RunningTrial:
        if self._threads is None:
            return super()._start(trial, trainer, placed)
        return self._threads.submit(self._outcome, trial, trainer, placed)

    def _fit(self, trainer: Trainer, placed: Any, number: int) -> TrainedModel:
        self._session.addTag(self._tag)
        try:
            with none_added():
                request = FitRequest(trainer=trainer, quiet=self._threads is not None)
                return fit(self._data, request).trained
        finally:
            self._session.removeTag(self._tag)

    def __exit__(self, *exc_info: object) -> None:
        if self._threads is not None:
            with contextlib.suppress(PySparkException):
                self._session.interruptTag(self._tag)
            self._threads.shutdown(cancel_futures=True)

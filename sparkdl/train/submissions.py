"""The submissions of a fit in a session of Spark Connect, and the queries around them."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame

from sparkdl.checkpoint.resume import LATEST, ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.errors import SparkdlError, StateLostError
from sparkdl.gang.connect import control_of, run_led
from sparkdl.gang.led import RESULT, LedTask
from sparkdl.loop.interrupt import interruptible
from sparkdl.settings import Settings
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.worker import finish_task
from sparkdl.train.connected_news import FollowedFit
from sparkdl.train.connected_rank import STORED, FitEnd, LedFit
from sparkdl.train.plain_tasks import clean_nodes
from sparkdl.usercode import accompanied

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")
MAX_LOSSES = 16
"""The number of times that ranks may be lost without a new checkpoint, if the run writes any."""
LOSSES_FROM_START = 4
"""The same of a run without checkpoints, which begins again each time."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint of a run's folder."""

    uri: str  # "": there is none
    iteration: int
    replicas: int | None  # M of the checkpoint to resume from, if any


@dataclass(frozen=True)
class _Look:
    """The task that looks for checkpoints, where the executors see them."""

    checkpoint: Any
    resume: str | None
    any_data: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        found: Any
        try:
            found = self._found()
        except SparkdlError as error:
            found = error
        yield pa.RecordBatch.from_arrays(
            [pa.array([pickle.dumps(found)], pa.binary())], names=["found"]
        )
        finish_task()

    def _found(self) -> NewestCheckpoint:
        uri, iteration, replicas = "", 0, None
        if self.checkpoint is not None:
            for place, manifest in CheckpointStore(self.checkpoint.path).candidates():
                uri, iteration = place, manifest.iteration
                break
        if self.resume is not None:
            replicas = ResumeCandidates(self.checkpoint, self.resume, self.any_data).replicas
        return NewestCheckpoint(uri, iteration, replicas)


def look(session: Any, trainer: Trainer, resume: str | None, any_data: bool) -> NewestCheckpoint:
    """Return what the executors see of a run's checkpoints."""
    task = accompanied(_Look(trainer.checkpoint, resume, any_data))
    with reading_explained("looking for checkpoints"):
        table = session.range(0, 1, 1, 1).mapInArrow(task, "found binary").toArrow()
    found: Any = pickle.loads(table.to_pylist()[0]["found"])
    if isinstance(found, SparkdlError):
        raise found
    assert isinstance(found, NewestCheckpoint)
    return found


@dataclass(frozen=True)
class Submissions:
    """The submissions of a fit: one, and another for each time that ranks are lost."""

    session: Any
    trainer: Trainer
    settings: Settings
    frame: DataFrame
    ranks: int
    fit: LedFit
    before: NewestCheckpoint  # the newest before the run
    one_pass: bool = False

    def end(self) -> FitEnd | None:
        """Return the end of the fit, with its weights; None if there were no rows.

        Raise KeyboardInterrupt if the user interrupted before the training, or twice.
        """
        follower: FollowedFit | None = None

        def training() -> bool:
            return follower is not None and follower.training

        fit, losses, last = self.fit, 0, self.before
        while True:
            control = control_of(self.session)
            task = LedTask(replace(fit, control=control.address), timeout=self.settings.timeout)
            profile, settings = self.trainer.resource_profile, self.settings
            try:
                with interruptible(ready=training) as interrupt:
                    follower = FollowedFit(
                        self.trainer, self.ranks, settings, self.one_pass, interrupt
                    )
                    with contextlib.closing(follower):
                        with reading_explained():
                            rows = run_led(self.frame, task, self.ranks, profile, control, follower)
                        end = self._end_of(rows)
                        if end is not None:
                            follower.ended(end.state)
                return end
            except StateLostError as lost:
                if interrupt.asked:
                    raise KeyboardInterrupt from lost
                losses += 1
                newest = self._newest()
                if newest.uri != last.uri:
                    losses, last = 1, newest
                if losses >= (MAX_LOSSES if self.trainer.checkpoint else LOSSES_FROM_START):
                    raise
                resume, where = self.fit.resume, "the beginning"
                if newest.uri != self.before.uri:
                    resume, where = LATEST, f"the checkpoint after iteration {newest.iteration}"
                elif resume is not None:
                    where = "the checkpoint that it began with"
                reason = str(lost).partition("\n")[0].rstrip(".")
                logger.warning("%s. Submitted again, from %s.", reason, where)
                fit = replace(fit, resume=resume, again=True)
            except BaseException:
                clean_nodes(self.session, self.fit.slab, self.ranks)
                raise

    def _end_of(self, rows: dict[str, bytes]) -> FitEnd | None:
        if not rows:  # Spark runs no task for rows of which it knows that there are none
            return None
        if STORED in rows:
            rows = pickle.loads(rows[STORED]).fetch(self.session)
        end: FitEnd = pickle.loads(rows.pop(RESULT))
        return replace(end, weights=rows)

    def _newest(self) -> NewestCheckpoint:
        if self.trainer.checkpoint is None:
            return self.before
        return look(self.session, self.trainer, None, any_data=False)

"""The barrier stage of a gang."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext
from pyspark.resource import ResourceProfile

from sparkdl.errors import StateLostError, TrainingError
from sparkdl.gang.rank_task import Rendezvous
from sparkdl.gang.slots import with_profile
from sparkdl.spark.failures import deleted, explain, of_python
from sparkdl.spark.frames import map_frames, shuffle_frames, stage_name
from sparkdl.spark.properties import own_properties

CLOSE_SECONDS = 15.0


class BarrierJob:
    """A barrier stage that can be submitted repeatedly, each time as a job of its own.

    Nobody waits for the end of the job.
    """

    def __init__(
        self, context: SparkContext, group: str, retried: bool, profile: ResourceProfile | None
    ) -> None:
        self._context, self._group = context, group
        self._retried, self._profile = retried, profile
        self._job: Any = None

    def submit(self, source: RDD, meeting: Rendezvous, description: str) -> None:
        """Submit the stage, in place of any earlier one."""
        self.cancel()
        with own_properties(self._context), stage_name(self._context, "gang"):
            self._context.setJobGroup(self._group, description)
            ranks = map_frames(source, meeting, barrier=True)
            if self._profile is not None:
                ranks = with_profile(ranks, self._profile)
            ending = shuffle_frames(ranks, 1) if self._retried else ranks
            self._job = ending._jrdd.collectAsync()

    def cancel(self) -> None:
        """Free the slots of the last job.

        If Spark has restarted it, its tasks wait for a driver that no longer needs them.
        """
        if self._job is not None and not self._job.isDone():
            self._job.cancel(True)

    def check(self) -> None:
        """Raise an error if the stage ended before all its tasks had connected."""
        if not self._job.isDone():
            return
        job, self._job = self._job, None
        try:
            job.get()
        except Py4JError as error:
            raise not_together(error) from None
        raise StateLostError("the gang did not come together: its ranks ended at once.")

    def close(self) -> None:
        """Wait until the tasks have ended, and cancel those that do not.

        Close their connections before.
        """
        job, self._job = self._job, None
        if job is None:
            return
        with contextlib.suppress(Py4JError, OSError):  # the session may be stopped already
            until = time.monotonic() + CLOSE_SECONDS
            while not job.isDone() and time.monotonic() < until:
                time.sleep(0.01)
            if not job.isDone():
                self._context.cancelJobGroup(self._group)


def is_one_to_one(rdd: RDD) -> bool:
    """Return whether Spark runs a barrier stage over ``rdd``.

    It refuses an RDD that does not have a partition for each partition of every RDD that the stage
    reads, as after ``coalesce`` or ``union``, even if the RDD is persisted (SPARK-24820).
    """
    count, seen, left = rdd.getNumPartitions(), set(), [rdd._jrdd.rdd()]
    while left:
        one = left.pop()
        if one.getNumPartitions() != count:
            return False
        if one.id() not in seen:
            seen.add(one.id())
            behind = one.dependencies()
            for dependency in map(behind.apply, range(behind.size())):
                if dependency.getClass().getSimpleName() != "ShuffleDependency":
                    left.append(dependency.rdd())
    return True


def not_together(error: Exception) -> TrainingError:
    """Return the error to raise if a Spark job failed before the gang was complete."""
    text = str(error)
    reason = explain(text)
    kind = TrainingError if of_python(text) and not deleted(reason) else StateLostError
    return kind(f"the gang did not come together: {reason}")

"""What a fit holds in Spark, and how all of it is given back, however the fit ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext, StorageLevel
from pyspark.core.rdd import RDD
from pyspark.errors import PySparkException

from sparkdl.data.partition_writer import close_partitions
from sparkdl.errors import TrainingError
from sparkdl.loop.interrupt import interrupts_held
from sparkdl.replica.run import forget
from sparkdl.slab.gpu_memory import holders_awaited
from sparkdl.slab.pool import close_pool
from sparkdl.slab.root import SlabConfig, open_root, remove_root
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.executors import Executor, executor_awaited, executors, task_per_executor
from sparkdl.spark.frames import forget_shuffles, is_local, stage_name
from sparkdl.spark.properties import own_properties
from sparkdl.spark.watchdog import Watchdog
from sparkdl.spark.worker import finish_task

CANCEL_SECONDS = 10.0
LAG_SECONDS = 5.0
"""So long the end of a fit that failed waits for Spark's own books, which say what still runs."""


class FitResources:
    """Persisted RDDs, broadcasts, and slabs of one fit; its Spark jobs are one job group, and the
    thread has local properties of its own meanwhile.

    A context manager: on leaving, what still runs is cancelled, the slabs are deleted on every node
    that may have some, RDDs are unpersisted and broadcasts destroyed. What a killed
    node kept is swept there when the next fit begins, see :mod:`sparkdl.slab.root`.
    """

    def __init__(
        self, context: SparkContext, slab: SlabConfig, timeout: float | None = None
    ) -> None:
        """``timeout``: seconds in which nothing may happen in a job, see :class:`Watchdog`."""
        self.context, self.slab, self._timeout = context, slab, timeout
        self._watch: Watchdog | None = None
        self._rdds: list[RDD] = []
        self._passing: list[RDD] = []
        self._broadcasts: list[BroadcastBytes] = []
        self._shuffled: RDD | None = None
        self._closing = contextlib.ExitStack()
        self._properties = contextlib.ExitStack()

    def __enter__(self) -> FitResources:
        self._properties.enter_context(own_properties(self.context))
        self.context.setJobGroup(self.slab.name, "sparkdl: reading the samples")
        self._watch = Watchdog(self.context, self.slab.name, self._timeout)
        return self

    def persist(self, rdd: RDD) -> RDD:
        """Persist ``rdd`` (memory, then disk: a lost block would move its task) until the end."""
        self._rdds.append(rdd.persist(StorageLevel.MEMORY_AND_DISK))
        return rdd

    def replicated(self, rdd: RDD) -> RDD:
        """Compute ``rdd`` and keep it on the disks of two executors, where there are as many, until
        it is forgotten or at the end."""
        self._passing.append(rdd.persist(StorageLevel.DISK_ONLY_2))
        try:
            rdd._jrdd.count()
        except Exception:
            self.forget(rdd)
            raise
        return rdd

    def stored(self, rdd: RDD) -> RDD:
        """Persist ``rdd`` until it is forgotten or at the end."""
        self._passing.append(rdd.persist(StorageLevel.MEMORY_AND_DISK))
        return rdd

    def forget(self, rdd: RDD) -> None:
        """Let go of what was :meth:`replicated` or :meth:`stored`."""
        self._passing.remove(rdd)
        with contextlib.suppress(Py4JError):
            rdd.unpersist()

    def broadcast(self, parts: Sequence[bytes]) -> BroadcastBytes:
        """Broadcast them until the end."""
        self._broadcasts.append(BroadcastBytes.of(self.context, parts))
        return self._broadcasts[-1]

    def closing(self, thing: Any) -> None:
        """Call its ``close()`` before all else at the end."""
        self._closing.callback(thing.close)

    def shuffled(self, rdd: RDD | None) -> None:
        """The shuffles behind ``rdd`` are needed until the next call, or the end."""
        if self._shuffled is not None:
            forget_shuffles(self._shuffled)
        self._shuffled = rdd

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        with interrupts_held():
            self._give_back(failed=kind is not None)

    def _give_back(self, failed: bool) -> None:
        alive = self._is_alive()
        with contextlib.suppress(Py4JError, OSError):
            self._closing.close()
        if alive:
            with contextlib.suppress(Py4JError, PySparkException):
                self._cancel(failed)
            with contextlib.suppress(Py4JError, PySparkException):
                self._clean_nodes()
        if self._watch is not None:
            self._watch.stop()
        _clean_here(self.slab)
        if alive:
            self.shuffled(None)
            for rdd in (*self._rdds, *self._passing):
                with contextlib.suppress(Py4JError):
                    rdd.unpersist()
            for broadcast in self._broadcasts:
                broadcast.destroy()
        self._properties.close()

    def _is_alive(self) -> bool:
        """Whether Spark is. Its JVM may have been killed, while the model was on its way back, say."""
        try:
            return self.context._jsc is not None and not self.context._jsc.sc().isStopped()
        except (Py4JError, OSError):
            return False

    def _cancel(self, failed: bool) -> None:
        """Cancel the fit's jobs and wait until their tasks are gone, so that none makes a slab.

        Of a job that failed, too: Spark ends it with its first task that fails for good, and the
        others notice within some seconds. It may not even know that they have begun, since what tells
        it follows the scheduler from afar.
        """
        if failed:
            with contextlib.suppress(Py4JError):  # it waited in vain
                bus = self.context._jsc.sc().listenerBus()  # type: ignore[union-attr]
                bus.waitUntilEmpty(int(1e3 * LAG_SECONDS))
        tracker = self.context.statusTracker()
        if tracker.getActiveJobsIds():
            self.context.cancelJobGroup(self.slab.name)
        deadline = time.monotonic() + CANCEL_SECONDS
        while self._running_tasks() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _running_tasks(self) -> int:
        """Of the last jobs of the fit; the ones before have ended well."""
        tracker, store = self.context.statusTracker(), self.context._jsc.sc().statusStore()
        running = 0
        for job in sorted(tracker.getJobIdsForGroup(self.slab.name))[-2:]:
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info else ():
                with contextlib.suppress(Py4JError):  # a stage that Spark has not begun
                    running += store.lastStageAttempt(stage).numActiveTasks()
        return running

    def _clean_nodes(self) -> None:
        """Run :class:`CleanNode` on each executor that may have slabs.

        Not where the persisted partitions lie: they may have moved and left slabs behind, and one
        that an executor loses meanwhile would be computed anew, with slabs on whatever executors
        that takes.
        """
        self.context.setJobDescription("sparkdl: removing the slabs")
        places: list[Executor | None] = [one for one in executors(self.context) if one.used]
        if is_local(self.context) and self._any_job():
            places = [None]
        if places:
            name = stage_name(self.context, "remove the slabs")
            with name, executor_awaited(self.context):
                self.context.runJob(task_per_executor(self.context, places), CleanNode(self.slab))

    def _any_job(self) -> bool:
        """Whether tasks of the fit may have written something, also ones that failed."""
        return bool(self.context.statusTracker().getJobIdsForGroup(self.slab.name))


class CleanNode:
    """Task that removes a run's slabs from its node and lets go of them in its process."""

    def __init__(self, slab: SlabConfig) -> None:
        self.slab = slab

    def __call__(self, frames: Iterable[bytes]) -> Iterator[bytes]:
        for _ in frames:
            pass
        _clean_here(self.slab)
        finish_task()
        return iter(())


def _clean_here(slab: SlabConfig) -> None:
    forget(slab.name)
    close_partitions()
    close_pool(slab)
    root = None
    with contextlib.suppress(OSError):  # it is none of ours
        root = open_root(slab)
    with holders_awaited([] if root is None else list(root.directories)):
        remove_root(slab)


MAX_SUBMISSIONS = 16
"""How often a job is submitted when tasks find themselves on another node than expected.

On a busy cluster that happens several times in a row: speculative twins run on other hosts, and so do
tasks that have waited for ``spark.locality.wait``.
"""


def samples_changed(doing: str, partition: int) -> TrainingError:
    """What to raise where a partition that was computed again is another."""
    return TrainingError(
        f"{doing}: partition {partition} was computed again and holds other rows: the source of the "
        "data is not deterministic. Write it out (df.write.parquet) or checkpoint it, and fit on that."
    )


def compute_again(rdd: RDD) -> None:
    """Let go of what is persisted of ``rdd``; it is persisted again as it is computed.

    Nobody waits for that: an executor that has just died does not answer for two minutes. A block
    that is let go of too late, when it is there anew, is computed once more. In local mode, where
    blocks are read without what computes them, it must not be let go of too late, and nobody dies.
    """
    rdd.unpersist(blocking=is_local(rdd.ctx))
    rdd.persist(StorageLevel.MEMORY_AND_DISK)

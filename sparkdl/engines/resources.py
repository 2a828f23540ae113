"""The Spark resources of a fit, and their release when the fit ends, with or without an error."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext, StorageLevel
from pyspark.errors import PySparkException

from sparkdl.data.partition_reader import lies_here
from sparkdl.data.samples import MAX_READINGS, deleted_without_end
from sparkdl.errors import StateLostError, TrainingError, counted
from sparkdl.loop.interrupt import interrupts_held
from sparkdl.slab.pool import clean_here
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.executors import (
    Executor,
    executor_awaited,
    executors,
    own_properties,
    task_per_executor,
)
from sparkdl.spark.failures import Watchdog, faults_explained
from sparkdl.spark.frames import (
    collect_frames,
    compute_again,
    forget_last_shuffle,
    forget_shuffles,
    is_local,
    stage_name,
    store_frames,
    stored_frames,
)
from sparkdl.spark.worker import finish_task

CANCEL_SECONDS = 10.0
LAG_SECONDS = 5.0
"""The time that a failed fit waits at its end for Spark's listener bus, which reports running tasks."""


class FitResources:
    """The persisted RDDs, broadcasts and slabs of one fit.

    The fit's Spark jobs form one job group, and its thread has its own local properties in the
    meantime.

    Use it as a context manager. Leaving it cancels running jobs, deletes the slabs on every node
    that may have some, unpersists RDDs and destroys broadcasts. What a killed node leaves behind is
    removed there when the next fit begins; see :mod:`sparkdl.slab.root`. Resources that outlive the
    block are left by :meth:`keep`, and given back by entering and leaving them again.
    """

    def __init__(
        self, context: SparkContext, slab: SlabConfig, timeout: float | None = None
    ) -> None:
        """Create the resources of a fit, whose job group has the name of the slabs.

        ``timeout`` is in seconds without progress, see :class:`Watchdog`; None: no timeout.
        """
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

    def keep(self) -> None:
        """Leave the job group and give the thread its properties back; everything held stays."""
        if self._watch is not None:
            self._watch.stop()
        self._properties.close()

    def persist(self, rdd: RDD) -> RDD:
        """Persist ``rdd`` until the end of the fit.

        It is kept in memory and spills to disk, because a lost block would move its task.
        """
        self._rdds.append(rdd.persist(StorageLevel.MEMORY_AND_DISK))
        return rdd

    def replicated(self, rdd: RDD) -> RDD:
        """Compute ``rdd``, and persist it until :meth:`forget` or the end of the fit.

        It is kept on the disks of two executors, if there are two.
        """
        self._passing.append(rdd.persist(StorageLevel.DISK_ONLY_2))
        try:
            rdd._jrdd.count()
        except Exception:
            self.forget(rdd)
            raise
        return rdd

    def forget(self, rdd: RDD) -> None:
        """Unpersist an RDD that :meth:`replicated` persisted."""
        self._passing.remove(rdd)
        with contextlib.suppress(Py4JError):
            rdd.unpersist()

    def broadcast(self, parts: Sequence[bytes]) -> BroadcastBytes:
        """Broadcast ``parts`` until the end of the fit."""
        self._broadcasts.append(BroadcastBytes.of(self.context, parts))
        return self._broadcasts[-1]

    def closing(self, thing: Any) -> None:
        """Register ``thing``, whose ``close()`` is called first at the end of the fit."""
        self._closing.callback(thing.close)

    def shuffled(self, rdd: RDD | None) -> None:
        """Keep the shuffles of ``rdd`` until the next call or the end of the fit.

        The shuffles of the previous call's RDD are deleted.
        """
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
        clean_here(self.slab)
        if alive:
            self.shuffled(None)
            for rdd in (*self._rdds, *self._passing):
                forget_last_shuffle(rdd, only_frames=True)
                with contextlib.suppress(Py4JError):
                    rdd.unpersist()
            for broadcast in self._broadcasts:
                broadcast.destroy()
        self._properties.close()

    def _is_alive(self) -> bool:
        """Return whether Spark is alive. Its JVM may have been killed, e.g. during the last job."""
        try:
            return self.context._jsc is not None and not self.context._jsc.sc().isStopped()
        except (Py4JError, OSError):
            return False

    def _cancel(self, failed: bool) -> None:
        """Cancel the fit's jobs and wait until their tasks have ended, so that none creates a slab.

        This includes jobs that failed: Spark ends a job at its first task that fails for good, and
        the other tasks notice seconds later. Spark's status store may not even know yet that these
        have started, because it follows the scheduler with a delay.
        """
        if failed:
            with contextlib.suppress(Py4JError):  # the wait timed out
                bus = self.context._jsc.sc().listenerBus()  # type: ignore[union-attr]
                bus.waitUntilEmpty(int(1e3 * LAG_SECONDS))
        tracker = self.context.statusTracker()
        if tracker.getActiveJobsIds():
            self.context.cancelJobGroup(self.slab.name)
        deadline = time.monotonic() + CANCEL_SECONDS
        while self._running_tasks() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _running_tasks(self) -> int:
        """Count the running tasks of the fit's last two jobs; earlier jobs have ended normally."""
        tracker, store = self.context.statusTracker(), self.context._jsc.sc().statusStore()
        running = 0
        for job in sorted(tracker.getJobIdsForGroup(self.slab.name))[-2:]:
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info else ():
                with contextlib.suppress(Py4JError):  # Spark has not started this stage
                    running += store.lastStageAttempt(stage).numActiveTasks()
        return running

    def _clean_nodes(self) -> None:
        """Run :func:`clean_node` on each executor that may have slabs.

        It does not run over the persisted partitions. They may have moved and left slabs behind,
        and a partition that is lost in the meantime would be recomputed, with new slabs on
        arbitrary executors.
        """
        self.context.setJobDescription("sparkdl: removing the slabs")
        places: list[Executor | None] = [one for one in executors(self.context) if one.used]
        if is_local(self.context) and (self._rdds or self._any_job()):
            places = [None]
        if places:
            name = stage_name(self.context, "remove the slabs")
            with name, executor_awaited(self.context):
                task = functools.partial(clean_node, self.slab)
                self.context.runJob(task_per_executor(self.context, places), task)

    def rows_read(self) -> str:
        """Return how far the jobs that read have come: rows, or tasks if Spark counts no rows."""
        sc: Any = self.context._jsc.sc()  # type: ignore[union-attr]
        tracker, store = self.context.statusTracker(), sc.statusStore()
        jobs = map(tracker.getJobInfo, sorted(tracker.getJobIdsForGroup(self.slab.name)))
        told = ""
        for number in (stage for job in jobs if job for stage in job.stageIds):
            with contextlib.suppress(Py4JError):  # Spark has not started this stage
                stage = store.lastStageAttempt(number)
                rows, tasks, ended = (
                    stage.inputRecords(),
                    stage.numTasks(),
                    stage.numCompleteTasks(),
                )
                if rows or not told:
                    told = _how_far(rows, tasks, ended)
        return told

    def _any_job(self) -> bool:
        """Return whether tasks of the fit, including failed ones, may have written something."""
        return bool(self.context.statusTracker().getJobIdsForGroup(self.slab.name))


def _how_far(rows: int, tasks: int, ended: int) -> str:
    """Return ``1.2 of about 4.0 M``; how many rows there are follows from the tasks that have ended."""
    if not rows:
        return f"in {counted(tasks, 'task')}, {ended} ended"
    whole = rows * tasks / ended if ended else 0.0
    unit, sign = next((u for u in ((1e6, " M"), (1e3, " k")) if max(rows, whole) >= u[0]), (1, ""))
    digits = 0 if unit == 1 else 1
    about = f" of about {whole / unit:.{digits}f}" if tasks > ended > 0 else ""
    return f"{rows / unit:.{digits}f}{about}{sign}"


def clean_node(slab: SlabConfig, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Remove a run's slabs from the node of a task, and release them in its process."""
    for _ in frames:
        pass
    clean_here(slab)
    finish_task()
    return iter(())


MAX_SUBMISSIONS = 16
"""The number of submissions of a job whose tasks run on other nodes than expected.

On a busy cluster this can happen several times in a row: speculative copies of tasks run on other
hosts, and so do tasks that have waited for ``spark.locality.wait``.
"""


def samples_changed(doing: str, partition: int) -> TrainingError:
    """Return the error to raise if a partition differs after it was recomputed."""
    return TrainingError(
        f"{doing}: partition {partition} was computed again and holds other rows: the source of the "
        "data is not deterministic. Write it out (df.write.parquet) or checkpoint it, and fit on that."
    )


_writing = threading.Lock()


def write_again(samples: RDD, slab: SlabConfig) -> None:
    """Have each partition of the samples written again, on the node where it is read.

    In local mode this happens at once, because tasks read stored blocks there, see
    :func:`sparkdl.spark.frames.stored_frames`. Fits in other threads may have the same samples: what
    one of them has written serves all. Otherwise it happens when the partitions are read.
    """
    if not is_local(samples.ctx):
        compute_again(samples)
        return
    doing = "writing the samples again"
    with _writing:
        for _ in range(MAX_READINGS):
            if _written_here(samples, slab):
                return
            compute_again(samples)
            with contextlib.suppress(StateLostError), faults_explained(doing):
                store_frames(samples)
    raise deleted_without_end(doing, slab)


def _written_here(samples: RDD, slab: SlabConfig) -> bool:
    """Return whether the stored samples are on the driver's node."""
    root = open_root(slab, create=True)
    assert root is not None
    with contextlib.suppress(StateLostError), faults_explained("looking for the samples"):
        frames = collect_frames(stored_frames(samples))
        return all(lies_here(pickle.loads(frame), root.node_id) for frame in frames)
    return False

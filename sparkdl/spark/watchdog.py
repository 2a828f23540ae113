"""A timeout for every wait of a fit: jobs in which nothing happens are cancelled with a reason."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext

from sparkdl.compat import cancel_group
from sparkdl.spark.failures import WAITED

MOST = 8
"""The largest number of tasks that a message names."""


class Watchdog:
    """A thread that watches the jobs of a job group until :meth:`stop`.

    If none of their tasks starts or ends for ``seconds`` (None: no limit), the jobs are cancelled,
    and Spark reports the reason to whoever waits for them.
    """

    def __init__(self, context: SparkContext, group: str, seconds: float | None) -> None:
        self._context, self._group, self._seconds = context, group, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sparkdl-watch", daemon=True)
        if seconds is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        assert self._seconds is not None
        pause = min(10.0, self._seconds / 4)
        before, since = None, 0.0
        while not self._stopped.wait(pause):
            with contextlib.suppress(Py4JError, OSError):
                stages = self._stages()
                since = since + pause if stages and stages == before else 0.0
                before = stages
                if since >= self._seconds:
                    self._cancel(stages)
                    since = 0.0

    def _stages(self) -> list[tuple[Any, ...]]:
        """Return the state of each active stage and job, which changes whenever something happens."""
        tracker = self._context.statusTracker()
        found: list[tuple[Any, ...]] = []
        active = set(tracker.getActiveJobsIds())
        for job in sorted(active.intersection(tracker.getJobIdsForGroup(self._group))):
            info = tracker.getJobInfo(job)
            for number in sorted(info.stageIds if info else ()):
                stage = tracker.getStageInfo(number)
                if stage is not None:
                    found.append((job, *stage))
            found.append((job,))
        return found

    def _cancel(self, stages: list[tuple[Any, ...]]) -> None:
        """Cancel the jobs, with a reason that names the tasks that still run."""
        store = self._context._jsc.sc().statusStore()
        waited = []
        for number in dict.fromkeys(stage[1] for stage in stages if len(stage) > 1):
            with contextlib.suppress(Py4JError):  # Spark has not started this stage
                data = store.lastStageAttempt(number)
                tasks = store.taskList(number, data.attemptId(), 1 << 20)
                waited += [
                    f"partition {task.partitionId()} on executor {task.executorId()} ({task.host()})"
                    for task in (tasks.apply(i) for i in range(tasks.size()))
                    if task.status() == "RUNNING"
                ]
        if len(waited) > MOST:
            waited[MOST:] = [f"{len(waited) - MOST} more"]
        executors = self._context._jsc.sc().getExecutorMemoryStatus().size() - 1  # less the driver
        if waited:
            whom, who = ", ".join(waited), "tasks really take that long"
        elif executors:
            whom = f"a free executor: there are {executors}, but no task of the job runs"
            who = "others really need them for that long"
        else:
            whom = "an executor: there is none, so no task can run"
            who = "the cluster really takes that long"
        reason = (
            f"{WAITED} {self._seconds:g} s for {whom}. Nothing happened in that time. If {who}, "
            "raise spark.sparkdl.timeout.seconds."
        )
        cancel_group(self._context, self._group, reason)

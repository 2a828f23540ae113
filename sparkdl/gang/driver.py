"""The driver's side of a gang: a barrier stage of ranks that run its commands.

The barrier stage of a gang.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext
from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile

from sparkdl.errors import ParameterError, SparkdlError, StalledError, StateLostError, TrainingError
from sparkdl.gang.channel import Listener
from sparkdl.gang.oversubscribe import (
    HostedRank,
    Oversubscription,
    assign_ranks,
    describe_task,
    ended,
    gpus_shared_out,
    pack_records,
    start_rank_processes,
)
from sparkdl.gang.process_group import Where, form_group
from sparkdl.gang.rank_group import ArrivedRanks, ConnectedRanks, StartableGroup, named_ranks
from sparkdl.gang.rank_task import Rendezvous
from sparkdl.gang.slots import SLOT_SECONDS, check_slots, slots_now, with_profile
from sparkdl.spark.executors import own_properties
from sparkdl.spark.failures import deleted, explain, of_python
from sparkdl.spark.frames import collect_and_forget, map_frames, shuffle_frames, stage_name

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


YEAR_SECONDS = 365 * 86400.0


class Gang(StartableGroup):
    """Ranks 0 to M-1, one for each partition of ``source``, from :meth:`start` to :meth:`close`.

    After an error of a command the gang has ended.

    [Note: whom a gang consists of] Each :meth:`start` submits a job of its own. If ranks of an
    earlier job connect late, the driver closes their connections, and a task ends with its
    connection. If ``retried``, the barrier stage ends in a shuffle, because Spark runs such a stage
    again if a rank is lost before it has connected, whereas it fails a result stage. Spark may then
    run too few tasks: if a rank ends successfully just after another has failed, it runs only the
    failed one again (seen with Spark 4.3). The driver then submits the job again.
    """

    ahead = True

    def __init__(
        self,
        context: SparkContext,
        source: RDD,
        group: str,
        *,
        device: str = "auto",
        timeout: float | None = None,
        output: bool = False,
        retried: bool = True,
        profile: ResourceProfile | None = None,
        hosting: Oversubscription | None = None,
    ) -> None:
        """Create the gang without starting it.

        ``timeout`` is in seconds, for a command and for the start. If ``retried``, Spark runs the
        stage again when a rank is lost before the gang is complete. With ``hosting``, a task may
        host several ranks, and the caller has checked the number of slots.
        """
        self.size = self.tasks = source.getNumPartitions()
        self._context, self._source, self._profile = context, source, profile
        self._device, self._timeout, self._output = device, timeout, output
        self._stage, self._hosting = BarrierJob(context, group, retried, profile), hosting
        self._listener: Listener | None = None
        self.where: list[Where] = []
        self._ranks: ConnectedRanks | None = None
        self._hosts: ConnectedRanks | None = None

    @property
    def running(self) -> bool:
        return self._ranks is not None

    def start(self) -> None:
        """Start the ranks, or start them again if some were lost.

        Raise StalledError if there are no longer enough slots, or they do not connect in time.
        """
        again = self._listener is not None  # then lost executors may come back
        self.leave()
        if self._listener is None:
            conf = self._context._conf
            host = conf.get("spark.driver.host", "") or "localhost"
            self._listener = Listener(conf.get("spark.driver.bindAddress", "") or host)
            self._meeting = Rendezvous(
                host, self._listener.port, self._listener.key, self._device, self._output
            )
        deadline = time.monotonic() + (self._timeout or YEAR_SECONDS)
        while self._ranks is None:
            self.tasks = self._slots(again, deadline)
            if self.tasks == self.size:
                come = self._come(self._source, self.size, self._meeting, deadline)
            else:
                come = self._gather_hosted(deadline)
            self._ranks = None if come is None else ConnectedRanks(come, self._timeout)
            again = True
        joining = functools.partial(self.call, doing="joining the process group")
        self.where = form_group(joining, self._timeout or YEAR_SECONDS)

    def _slots(self, again: bool, deadline: float) -> int:
        """Return the number of tasks for the stage."""
        least = self._hosting.min_slots if self._hosting is not None else None
        wait = deadline - time.monotonic() if again else SLOT_SECONDS
        enough = self.tasks if again else least  # slots that were missing before may stay missing
        try:
            return check_slots(self._context, self.size, wait, self._profile, least, enough)
        except ParameterError:
            if not again:
                raise
            self._stage.cancel()  # Spark has restarted it, and it waits for the same slots
            have = slots_now(self._context, self._profile)
            raise StalledError(
                f"executors were lost, and none came in their place within {wait:.0f} s: the gang "
                f"needs {least or self.size} task slots at once, and this session has {have}. Fit "
                "again where there are as many, with resume= from a checkpoint; or let fewer task "
                "slots do the work: min_ranks says how few."
            ) from None

    def _gather_hosted(self, deadline: float) -> ArrivedRanks | None:
        """Start the ranks as processes of fewer tasks.

        Return None if the stage must be submitted again.

        See the note in :mod:`sparkdl.gang.oversubscribe`.
        """
        assert self._hosting is not None
        doing, node_of = "starting the ranks", self._hosting.node_of
        self._stage.cancel()
        frames = self._records()
        source = self._context.parallelize(range(self.tasks), self.tasks)
        come = self._come(source, self.tasks, replace(self._meeting, device="cpu"), deadline)
        if come is None:
            return None
        self._hosts = ConnectedRanks(come, self._timeout, noun="task")
        look = functools.partial(describe_task, self._hosting.node_here, self._device)
        places = self._hosts.call(look, doing)
        shares = assign_ranks([node_of(own) for own in frames], [place.node for place in places])
        gpus = gpus_shared_out(places, shares)
        self._meeting = replace(self._meeting, job=self._meeting.job + 1)
        begin = functools.partial(start_rank_processes, self._meeting.job, self.size)
        hosted = [[HostedRank(rank, gpus[rank], frames[rank]) for rank in own] for own in shares]
        self._hosts.call_each([functools.partial(begin, own) for own in hosted], doing)
        arrivals = ArrivedRanks(self._meeting.job, self.size)
        self._await(arrivals, deadline, self._check_processes)
        return arrivals

    def _records(self) -> list[list[Any]]:
        """Return the records of each partition. Spark computes them again if they are lost."""
        try:
            with stage_name(self._context, "find the samples"):
                return [
                    pickle.loads(frame)
                    for frame in collect_and_forget(map_frames(self._source, pack_records))
                ]
        except (Py4JError, PySparkException) as error:
            raise not_together(error) from None

    def _come(
        self, source: RDD, size: int, meeting: Rendezvous, deadline: float
    ) -> ArrivedRanks | None:
        """Submit the stage and wait until its tasks have connected.

        Return None if Spark runs too few of them, or too few can run.
        """
        assert self._listener is not None
        self._meeting = replace(self._meeting, job=self._meeting.job + 1)
        numbered = replace(meeting, job=self._meeting.job)
        self._stage.submit(source, numbered, f"sparkdl: a gang of {self.size} ranks")
        arrivals = ArrivedRanks(numbered.job, size)
        self._await(arrivals, deadline, self._check_job)
        if arrivals.missing or arrivals.too_few:
            arrivals.disconnect()
            return None
        return arrivals

    def _await(self, arrivals: ArrivedRanks, deadline: float, check: Callable[[], bool]) -> None:
        """Wait until all ranks have connected, or ``check`` says that they will not."""
        assert self._listener is not None
        try:
            while arrivals.missing and not arrivals.too_few:
                arrived = self._listener.accept(0.5)
                if arrived is not None:
                    arrivals.admit(*arrived)
                elif not check():
                    return
                elif time.monotonic() > deadline:
                    late = named_ranks(arrivals.missing)
                    self.close()
                    raise StalledError(
                        f"the gang did not come together in {self._timeout:g} s: {late} of {self.size} "
                        "did not come."
                    )
        except SparkdlError:
            arrivals.disconnect()
            self.leave()
            raise

    def _check_job(self) -> bool:
        """Return whether the stage's tasks may still connect."""
        self._stage.check()
        if self._hosting is None:
            return True
        return slots_now(self._context, self._profile) >= self.tasks

    def _check_processes(self) -> bool:
        """Return whether the processes of ranks may still connect. Raise an error if one has ended."""
        assert self._hosts is not None
        for gone in self._hosts.call(ended, "starting the ranks"):
            for rank, status in gone.items():
                if status < 0:
                    raise StateLostError(
                        f"starting the ranks: the process of rank {rank} was killed (signal {-status})."
                    )
                raise TrainingError(
                    f"starting the ranks: the process of rank {rank} ended with status {status}. What "
                    "it has to say of it is in its executor's log, stderr."
                )
        return True

    def answers(self, doing: str) -> tuple[list[Any], float]:
        assert self._ranks is not None
        try:
            return self._ranks.answers(doing)
        except StalledError:
            self.close()
            raise
        except TrainingError:
            self.leave()
            raise

    def leave(self) -> None:
        """Close the connections, which ends the ranks.

        The next :meth:`start` brings new ones together.
        """
        for team in (self._ranks, self._hosts):
            if team is not None:
                team.close()
        self._ranks = self._hosts = None

    def close(self) -> None:
        """End the ranks, and wait until their tasks have ended."""
        self.leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._stage.close()

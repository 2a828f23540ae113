"""The driver's side of a gang: a barrier stage of ranks that do what it says."""

from __future__ import annotations

import contextlib
import functools
import math
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext, cloudpickle
from pyspark.core.rdd import RDD
from pyspark.resource import ResourceProfile

from sparkdl.errors import ParameterError, SessionError, StalledError, StateLostError, TrainingError
from sparkdl.frames import map_frames, shuffle_frames, stage_name
from sparkdl.gang.arrivals import Arrivals
from sparkdl.gang.channel import Channel, ChannelError, Listener
from sparkdl.gang.group import form_group
from sparkdl.gang.member import ERROR, OUTPUT, RESULT, Command, Failure, Meeting
from sparkdl.gang.profile import check_profile, in_java, with_profile
from sparkdl.report import explain, of_python

SLOT_SECONDS = 30.0
"""How long executors may take to come before too few task slots are an error."""
CLOSE_SECONDS = 15.0
YEAR_SECONDS = 365 * 86400.0
LOST = "lost"
"""In place of a message: the rank is gone."""
GRACE_SECONDS = 2.0
"""After the first failure of a rank, the others have so long to say what they know of it."""


class Gang:
    """Ranks 0 .. M-1, one a partition of ``source``, from :meth:`start` to :meth:`close`.

    [Note: whom a gang consists of] Each :meth:`start` submits a job of its own; ranks of an earlier
    one that come late are hung up on, and a task ends with its connection. Where ``retried``, the
    barrier stage ends in a shuffle, as Spark runs such a stage again where a rank is lost before it has
    come, and gives up one with the job's result. It may run too few of it: where a rank ends well just
    after another has failed, only the failed one (seen with Spark 4.3). That job is begun anew.
    """

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
    ) -> None:
        """``group``: the job group of the stage. ``timeout``: seconds within which a command, and
        the start, must end; None: no bound. ``output``: print what ranks print. ``profile``: what the
        stage's tasks are given, where that is not what others get."""
        self.size = source.getNumPartitions()
        self._context, self._source, self._group = context, source, group
        self._device, self._timeout, self._output = device, timeout, output
        self._retried, self._profile = retried, profile
        self._listener: Listener | None = None
        self._job: Any = None
        self._channels: list[Channel] = []
        self.hosts: list[str] = []

    @property
    def running(self) -> bool:
        return bool(self._channels)

    def start(self) -> None:
        """Bring the ranks together, anew where some were lost.

        Raises :class:`sparkdl.SessionError` where this session can have no such gang,
        :class:`sparkdl.TrainingError` where it does not come together.
        """
        again = self._listener is not None  # executors that were lost may come back
        wait = self._timeout or YEAR_SECONDS
        check_slots(self._context, self.size, wait if again else SLOT_SECONDS, self._profile)
        self.leave()
        if self._listener is None:
            conf = self._context.getConf()
            host = conf.get("spark.driver.host", "") or "localhost"
            self._listener = Listener(conf.get("spark.driver.bindAddress", "") or host)
            self._meeting = Meeting(
                host,
                self._listener.port,
                self._listener.key,
                self._device,
                self._output,
            )
        self._gather(time.monotonic() + (self._timeout or math.inf))
        joining = functools.partial(self.call, doing="joining the process group")
        form_group(joining, self._timeout or YEAR_SECONDS)

    def _gather(self, deadline: float) -> None:
        """Wait until every rank has come."""
        assert self._listener is not None
        arrivals = Arrivals(self._submit(), self.size)
        while arrivals.missing:
            arrived = self._listener.accept(0.5)
            if arrived is not None:
                arrivals.admit(*arrived)
                if arrivals.too_few:
                    arrivals.hang_up()
                    arrivals = Arrivals(self._submit(), self.size)
            elif self._job.isDone():
                arrivals.hang_up()
                self._end_of_job()
            elif time.monotonic() > deadline:
                arrivals.hang_up()
                self.close()
                raise StalledError(
                    f"the gang did not come together in {self._timeout:g} s: "
                    f"rank{'s' * (len(arrivals.missing) > 1)} "
                    f"{', '.join(map(str, arrivals.missing))} of {self.size} did not come."
                )
        self._channels = [arrivals.come[rank][0] for rank in range(self.size)]
        self.hosts = [arrivals.come[rank][1].host for rank in range(self.size)]

    def call(self, command: Command, doing: str = "a command") -> list[Any]:
        """``command(member)`` on every rank, at once; the results in rank order.

        Raises :class:`sparkdl.TrainingError` with the first failing rank's traceback, and
        :class:`sparkdl.StateLostError` where a rank is lost; the gang has ended then.
        """
        content = cloudpickle.dumps(command)
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(content)
            except ChannelError:
                self._fail(doing, {}, [rank])
        return [cloudpickle.loads(answer) for answer in self._answers(doing)]

    def _answers(self, doing: str) -> list[Any]:
        """The next result of every rank."""
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        lost: list[int] = []
        deadline = time.monotonic() + (self._timeout or math.inf)
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(answers) + len(failures) + len(lost) < self.size:
                left = deadline - time.monotonic()
                ready = selector.select(None if left == math.inf else max(0.0, left))
                if not ready:
                    break
                for key, _ in ready:
                    rank = key.data
                    try:
                        kind, content = self._channels[rank].receive()
                    except ChannelError:
                        kind = LOST
                    if kind == OUTPUT:
                        self._print(rank, content)
                        continue
                    selector.unregister(key.fileobj)
                    if kind == RESULT:
                        answers[rank] = content
                        continue
                    if kind == ERROR:
                        failures[rank] = content
                    else:
                        lost.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(answers) < self.size:
            self._fail(doing, failures, lost, sorted(answers))
        return [answers[rank] for rank in range(self.size)]

    def _fail(
        self,
        doing: str,
        failures: dict[int, Failure],
        lost: Sequence[int],
        answered: Sequence[int] = (),
    ) -> None:
        """Give the gang up and say why: a rank's own mistake, else a lost rank, else a late one."""
        hosts = self.hosts
        self.leave()
        own = [(rank, failure) for rank, failure in failures.items() if not failure.by_group]
        if own:
            rank, failure = own[0]
            raise TrainingError(
                f"{doing}: rank {rank} on {hosts[rank]} failed. {failure.kind}: "
                f"{failure.text.partition(chr(10))[0]}\n{failure.trace}"
            )
        if lost:
            names = ", ".join(f"{rank} on {hosts[rank]}" for rank in lost)
            raise StateLostError(
                f"{doing}: rank{'s' * (len(lost) > 1)} {names} went away (the process died or was "
                "killed, or its node is out of reach)."
            )
        if failures:
            rank, failure = next(iter(failures.items()))
            raise StateLostError(
                f"{doing}: the connection between the ranks broke. Rank {rank} on {hosts[rank]} says: "
                f"{failure.text.partition(chr(10))[0]}"
            )
        late = [rank for rank in range(self.size) if rank not in answered]
        self.close()
        raise StalledError(
            f"{doing}: waited {self._timeout:g} s for "
            f"{', '.join(f'rank {rank} on {hosts[rank]}' for rank in late)}. Where it takes so long by "
            "right, raise the timeout."
        )

    def _print(self, rank: int, text: str) -> None:
        for line in text.split("\n"):
            print(f"[rank {rank}] {line}", file=sys.stdout)

    def _submit(self) -> int:
        """The stage, in a job of its own, whose end nobody waits for, in place of any before; its
        number."""
        if self._job is not None and not self._job.isDone():
            self._job.cancel(True)
        self._meeting = replace(self._meeting, job=self._meeting.job + 1)
        before = {
            key: self._context.getLocalProperty(key)
            for key in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
        }
        self._context.setJobGroup(self._group, f"sparkdl: a gang of {self.size} ranks")
        try:
            with stage_name(self._context, "gang"):
                ranks = map_frames(self._source, self._meeting, barrier=True)
                if self._profile is not None:
                    ranks = with_profile(ranks, self._profile)
                ending = shuffle_frames(ranks, 1) if self._retried else ranks
                self._job = ending._jrdd.collectAsync()
        finally:
            for key, value in before.items():
                self._context.setLocalProperty(key, value)  # type: ignore[arg-type]
        return self._meeting.job

    def _end_of_job(self) -> None:
        """The stage has ended before all its ranks came."""
        job, self._job = self._job, None
        try:
            job.get()
        except Py4JError as error:
            text = str(error)
            kind = TrainingError if of_python(text) else StateLostError
            raise kind(f"the gang did not come together: {explain(text)}") from None
        raise StateLostError("the gang did not come together: its ranks ended at once.")

    def leave(self) -> None:
        """Hang up on the ranks, which then end: the next :meth:`start` brings others together."""
        for channel in self._channels:
            channel.close()
        self._channels = []

    def close(self) -> None:
        """End the ranks, and wait until their tasks have ended."""
        self.leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        job, self._job = self._job, None
        if job is None:
            return
        with contextlib.suppress(Py4JError, OSError):  # the session may be stopped already
            until = time.monotonic() + CLOSE_SECONDS
            while not job.isDone() and time.monotonic() < until:
                time.sleep(0.01)
            if not job.isDone():
                self._context.cancelJobGroup(self._group)


def check_slots(
    context: SparkContext,
    ranks: int,
    seconds: float = SLOT_SECONDS,
    profile: ResourceProfile | None = None,
) -> None:
    """Wait so long until ``ranks`` tasks, of ``profile``, can run at once.

    Raises :class:`SessionError` where they never can, :class:`ParameterError` where they still cannot.
    """
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        raise SessionError(
            "a gang needs all of its ranks at once, which Spark does not do with dynamic allocation: "
            "set spark.dynamicAllocation.enabled=false and a fixed number of executors."
        )
    if profile is not None:
        check_profile(context, profile)
    sc, given = context._jsc.sc(), in_java(context, profile)
    until = time.monotonic() + seconds
    while (slots := int(sc.maxNumConcurrentTasks(given))) < ranks:
        if time.monotonic() > until or (context.master or "").startswith("local["):
            raise ParameterError(
                f"a gang of {ranks} ranks needs {ranks} task slots at once, and this session has "
                f"{slots}: ask for at most {slots} ranks, or for more executors or cores."
            )
        time.sleep(0.5)

"""Placement of tasks on chosen executors, which puts neighboring partitions on the same executor.

Spark deals out the tasks of a stage in turn: of four partitions, one of two executors gets 0 and 2,
the other 1 and 3. Then no node has two replicas whose gradients meet in the tree of sums (see
[Note: the shape of a sum]), and each gradient would have to be sent separately. Therefore this
module says where to read the samples, with the executors of a host one after another. Replicas live
where their samples are.

The Python daemons are started while the driver still prepares a session's first fit. A daemon imports
torch and more for two seconds when Spark first has a Python task for its executor. Meanwhile the
driver builds the model, imports what torch's first optimizer needs, and plans the query, which takes
about as long. Otherwise a user would wait for both in sequence.

On a cluster the driver waits for the daemons: if executors lack sparkdl or torch, that is told before
any data are read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext
from pyspark.serializers import NoOpSerializer

from sparkdl.compat import to_seq
from sparkdl.errors import SessionError
from sparkdl.spark.failures import check_session
from sparkdl.spark.frames import is_local, map_frames, setting, stage_name, zip_frames

NEW_MS = 15_000
"""The age in ms up to which Spark may not know an executor's tasks yet.

A change within 100 ms of the last recorded one is only recorded with the next change, or with the
next heartbeat, 10 s later.
"""


@dataclass(frozen=True, order=True)
class Executor:
    """An executor of the session."""

    host: str
    name: str
    slots: int  # tasks that it runs at a time
    used: bool = True  # it may have had tasks

    @property
    def place(self) -> str | None:
        """Return its name as a preferred location; a host with an underscore has none (None)."""
        return None if "_" in self.host else f"executor_{self.host}_{self.name}"


def shared_out(executors: Sequence[Executor], partitions: int) -> list[Executor]:
    """Return an executor for each partition: executors in order, in proportion to their slots.

    The list is empty if there are fewer than two executors, if not all partitions could run at
    once, or if an executor cannot be named as a preferred location.
    """
    slots = [executor for executor in sorted(executors) for _ in range(executor.slots)]
    if len(executors) < 2 or len(slots) < partitions or None in [one.place for one in executors]:
        return []
    return [slots[partition * len(slots) // partitions] for partition in range(partitions)]


def place_contiguously(rdd: RDD) -> RDD:
    """Return ``rdd`` (one frame per partition) with a preferred location for each partition.

    Spark may ignore it.
    """
    context, partitions = rdd.ctx, rdd.getNumPartitions()
    chosen = shared_out(executors(context), partitions)
    if not chosen:
        return rdd
    return map_frames(zip_frames(rdd, task_per_executor(context, chosen)), _left)


def executors(context: SparkContext) -> list[Executor]:
    """Return the executors that are there now; none in local mode."""
    sc = context._jsc.sc()
    if sc.isLocal():
        return []
    each = int(context._conf.get("spark.task.cpus", "1") or 1)
    listed = sc.statusStore().executorList(True)
    now = time.time() * 1000
    found = []
    for i in range(listed.size()):
        one = listed.apply(i)
        host, _, port = one.hostPort().rpartition(":")
        host = host if host and port.isdigit() else one.hostPort()
        if one.id() != "driver":
            used = one.totalTasks() > 0 or now - one.addTime().getTime() < NEW_MS
            found.append(Executor(host, one.id(), one.totalCores() // each, used))
    return found


def cluster_facts(context: SparkContext) -> Iterator[tuple[str, str]]:
    """Yield what a report tells of the cluster."""
    yield "Spark master", str(context.master)
    if not is_local(context):
        yield "executors", f"{context._jsc.sc().getExecutorMemoryStatus().size() - 1:,}"
    yield "task slots", f"{context.defaultParallelism:,}"


def task_per_executor(context: SparkContext, chosen: Sequence[Executor | None]) -> RDD:
    """Return an RDD of one empty frame per partition, each with a preferred location or with none."""
    jvm: Any = context._jvm
    pairs = jvm.java.util.ArrayList()
    for executor in chosen:
        places = jvm.java.util.ArrayList()
        if executor is not None and executor.place is not None:
            places.add(executor.place)
        pairs.add(jvm.scala.Tuple2(b"", to_seq(jvm, places)))
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    made = context._jsc.sc().makeRDD(to_seq(jvm, pairs), tag)
    return RDD(jvm.org.apache.spark.api.java.JavaRDD.fromRDD(made, tag), context, NoOpSerializer())


def _left(partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for frame, _ in pairs:
        yield frame


WAIT = "spark.locality.wait"


ENOUGH_SECONDS = 3.0
"""The default of Spark for ``spark.locality.wait``."""


ONE_SECONDS = 60.0
"""The time that a task waits for its executor if it could do nothing elsewhere."""


@contextlib.contextmanager
def waiting_for_locality(context: SparkContext) -> Iterator[None]:
    """Make Spark hold a task for its executor for at least :data:`ENOUGH_SECONDS` inside the block.

    Sessions set this wait to 0 to speed up queries. A sparkdl task that runs elsewhere than its
    state can do nothing, and if there are more such tasks than slots, Spark would send some
    elsewhere each time. Spark reads the setting when a stage begins. The three finer settings, if
    given, stay as they are.
    """
    sc = context._jsc.sc() if context._jsc is not None else None
    if sc is None or sc.isLocal():
        yield
        return

    def enough() -> bool:
        return int(sc.conf().getTimeAsMs(WAIT, "3s")) >= ENOUGH_SECONDS * 1000

    with setting(sc.conf(), WAIT, f"{ENOUGH_SECONDS:g}s", enough):
        yield


@contextlib.contextmanager
def executor_awaited(context: SparkContext) -> Iterator[None]:
    """Make each task inside the block wait for its executor, or go to another if that is lost."""
    conf = context._jsc.sc().conf()  # type: ignore[union-attr]
    with setting(conf, f"{WAIT}.process", f"{ONE_SECONDS:g}s", lambda: False):
        yield


@contextlib.contextmanager
def own_properties(context: SparkContext) -> Iterator[None]:
    """Give this thread a copy of its local properties inside the block; restore them afterwards.

    Threads may share one set of properties, as those of ``pyspark.ml.tuning`` do. The jobs of each
    would then be submitted with the values that any of them set last. For example, they would be in
    the job group of another fit, and cancelled with it.
    """
    if context._jsc is None:  # the context was stopped
        yield
        return
    spark = context._jsc.sc()
    before = spark.getLocalProperties()
    spark.setLocalProperties(before.clone())
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError, OSError):  # it may have been stopped in the meantime
            spark.setLocalProperties(before)


SECONDS_TO_END = 5
SECONDS_TO_START = 30
"""The longest wait for the daemons of a cluster, whose executors may still have to come."""
_begun: WeakSet[SparkContext] = WeakSet()


@contextlib.contextmanager
def warming_up(context: SparkContext) -> Iterator[None]:
    """Start a daemon on each executor, if no fit of this session has done so.

    In local mode the block does not wait for the daemons unless it raises an error. On a cluster it
    begins when they run, and SessionError is raised if their Python cannot run tasks of sparkdl.

    An error is often followed by the end of the session. Spark would then report a task that has not
    started as crashed, and a running one as missing its broadcast. Therefore tasks get
    ``SECONDS_TO_END``, and any that has not started is cancelled.
    """
    if context in _begun:
        yield
        return
    _begun.add(context)
    jvm: Any = context._jvm
    places = task_per_executor(context, executors(context) or [None])
    with own_properties(context), stage_name(context, "start Python"):
        starting = map_frames(places, nothing)._jrdd.countAsync()
    try:
        _check(context, starting)
        yield
    except BaseException:
        with contextlib.suppress(Py4JError):  # the time is up, or Spark is gone
            seconds = jvm.java.util.concurrent.TimeUnit.SECONDS
            try:
                starting.get(SECONDS_TO_END, seconds)
            finally:
                starting.cancel(True)
        raise


def check_python(context: SparkContext) -> None:
    """Raise SessionError if executors of a cluster cannot run tasks of sparkdl."""
    if not context._jsc.sc().isLocal():  # type: ignore[union-attr]
        with warming_up(context):
            pass


def _check(context: SparkContext, starting: Any) -> None:
    """Wait for the daemons of a cluster; any failure but that of their Python is left to later jobs."""
    jvm: Any = context._jvm
    if context._jsc.sc().isLocal():  # type: ignore[union-attr]
        return
    try:
        starting.get(SECONDS_TO_START, jvm.java.util.concurrent.TimeUnit.SECONDS)
    except Py4JError as error:
        try:
            check_session(str(error))
        except SessionError:
            _begun.discard(context)
            raise


def nothing(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Task: do nothing, because the worker has started when the task begins."""
    for _ in frames:
        pass
    return iter(())

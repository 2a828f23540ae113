"""Tasks on executors of our choice, and by it partitions side by side on the same executor.

Spark deals the tasks of a stage out like cards: of four partitions on two executors one gets 0 and 2,
the other 1 and 3. Then no node has two replicas whose gradients meet in the tree of sums (see [Note:
the shape of a sum]), and each would have to be sent by itself. So the samples are read where this
module says, executors of a host one after another; replicas live where their samples are.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.core.rdd import RDD
from pyspark.serializers import NoOpSerializer

from sparkdl.session import conf_of
from sparkdl.spark.frames import map_frames, zip_frames

NEW_MS = 15_000
"""Of an executor that is no older Spark may not know its tasks yet: what changes within 100 ms of what
it noted last is noted with the next change, or with the next heartbeat, 10 s later."""


@dataclass(frozen=True, order=True)
class Executor:
    """``slots``: tasks that it runs at a time; ``used``: whether it may have had any."""

    host: str
    name: str
    slots: int
    used: bool = True

    @property
    def place(self) -> str | None:
        """Its name as a preferred location; a host with an underscore has none."""
        return None if "_" in self.host else f"executor_{self.host}_{self.name}"


def shared_out(executors: Sequence[Executor], partitions: int) -> list[Executor]:
    """An executor for each partition: in order, to each by its slots. Empty where there is no choice,
    or not all partitions would run at once, or an executor cannot be named as a place."""
    slots = [executor for executor in sorted(executors) for _ in range(executor.slots)]
    if len(executors) < 2 or len(slots) < partitions or None in [one.place for one in executors]:
        return []
    return [slots[partition * len(slots) // partitions] for partition in range(partitions)]


def place_contiguously(rdd: RDD) -> RDD:
    """``rdd``, one frame a partition, with a wish where each is computed; Spark may do otherwise."""
    context, partitions = rdd.ctx, rdd.getNumPartitions()
    chosen = shared_out(executors(context), partitions)
    if not chosen:
        return rdd
    return map_frames(zip_frames(rdd, task_per_executor(context, chosen)), _left)


def executors(context: SparkContext) -> list[Executor]:
    """Those that are there now."""
    sc = context._jsc.sc()
    if sc.isLocal():
        return []
    each = int(conf_of(context).get("spark.task.cpus", "1") or 1)
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


def task_per_executor(context: SparkContext, chosen: Sequence[Executor | None]) -> RDD:
    """An RDD of one empty frame a partition, each with a wish where it is computed, or with none."""
    jvm: Any = context._jvm
    scala = jvm.scala.jdk.javaapi.CollectionConverters
    pairs = jvm.java.util.ArrayList()
    for executor in chosen:
        places = jvm.java.util.ArrayList()
        if executor is not None and executor.place is not None:
            places.add(executor.place)
        pairs.add(jvm.scala.Tuple2(b"", scala.asScala(places).toSeq()))
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    made = context._jsc.sc().makeRDD(scala.asScala(pairs).toSeq(), tag)
    return RDD(jvm.org.apache.spark.api.java.JavaRDD.fromRDD(made, tag), context, NoOpSerializer())


def _left(partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for frame, _ in pairs:
        yield frame


WAIT = "spark.locality.wait"


ENOUGH_SECONDS = 3.0
"""Spark's own default."""


ONE_SECONDS = 60.0
"""How long a task that is for one executor, and would do nothing elsewhere, waits for it."""


_set: dict[str, tuple[int, str | None]] = {}
"""Of each setting: in how many blocks of now it is ours, and what it was before the first."""


_lock = threading.Lock()


@contextlib.contextmanager
def waiting_for_locality(context: SparkContext) -> Iterator[None]:
    """Inside the block Spark keeps a task for its executor for :data:`ENOUGH_SECONDS` at least.

    Sessions set it to 0 for the sake of queries. A task of ours that runs elsewhere than its state can
    do nothing, and where there are more of them than slots Spark would send some elsewhere each time.
    Spark looks it up as a stage begins; the three finer settings, if given, stay as they are.
    """
    sc = context._jsc.sc() if context._jsc is not None else None
    if sc is None or sc.isLocal():
        yield
        return
    enough = sc.conf().getTimeAsMs(WAIT, "3s") >= ENOUGH_SECONDS * 1000 and WAIT not in _set
    with contextlib.nullcontext() if enough else _setting(sc.conf(), WAIT, ENOUGH_SECONDS):
        yield


@contextlib.contextmanager
def executor_awaited(context: SparkContext) -> Iterator[None]:
    """Inside the block a task goes to the executor it is for, or, where that is lost, to another."""
    with _setting(context._jsc.sc().conf(), f"{WAIT}.process", ONE_SECONDS):  # type: ignore[union-attr]
        yield


@contextlib.contextmanager
def _setting(conf: Any, key: str, seconds: float) -> Iterator[None]:
    """Inside the block ``key`` is so many seconds, and what it was before once the last of such blocks
    has ended: two fits of a session may train at once."""
    with _lock:
        count, before = _set.get(key, (0, None))
        if count == 0:
            before = conf.get(key) if conf.contains(key) else None
            conf.set(key, f"{seconds:g}s")
        _set[key] = count + 1, before
    try:
        yield
    finally:
        with _lock, contextlib.suppress(Py4JError):  # the session may be gone
            count, before = _set.pop(key)
            if count > 1:
                _set[key] = count - 1, before
            elif before is None:
                conf.remove(key)
            else:
                conf.set(key, before)

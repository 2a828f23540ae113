"""RDDs of raw byte frames: map, zip and shuffle with no pickling of the payload.

PySpark pickles what crosses between Python and the JVM. The records of a training iteration are
bytes already, so these few functions hand them over as they are. They use the same JVM classes that
``RDD.partitionBy`` and ``RDD.zip`` use.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext, TaskContext
from pyspark.core.rdd import RDD, PipelinedRDD
from pyspark.serializers import NoOpSerializer, PairDeserializer, pack_long
from pyspark.util import _load_from_socket

Frames = Iterable[bytes]
_FILES = "spark.shuffle.sort.bypassMergeThreshold"
FEW_FILES = 4
"""So many a task may write as well as one."""
_PARTITIONER_ID = 0x5DA7  # any constant: equal partitioners compare equal across our RDDs


PLACE = re.compile(
    r"\n?\[partition (?P<partition>\d+), attempt (?P<attempts>\d+), on (?P<node>\S+)\]"
)
"""The note that a task adds to an exception that leaves it; attempts count from 1."""


@dataclass(frozen=True)
class _Located:
    """A task whose exceptions say where they happened: since 4.1 Spark's report does not."""

    task: Callable[[int, Any], Frames]

    def __call__(self, partition: int, records: Any) -> Iterator[bytes]:
        try:
            yield from self.task(partition, records)
        except Exception as error:
            context = TaskContext.get()
            if context is not None and not any(map(PLACE.match, getattr(error, "__notes__", ()))):
                attempt = context.attemptNumber() + 1
                error.add_note(
                    f"[partition {partition}, attempt {attempt}, on {socket.gethostname()}]"
                )
            raise


def map_frames(rdd: RDD, task: Callable[[int, Any], Frames], barrier: bool = False) -> RDD:
    """``task(partition, records) -> frames`` over ``rdd``; the result is an RDD of raw frames.

    ``barrier``: all tasks run at once, and can wait for each other.
    """
    mapped = PipelinedRDD(rdd, _Located(task), isFromBarrier=barrier)
    mapped._bypass_serializer = True
    mapped._jrdd_deserializer = NoOpSerializer()
    return mapped


def zip_frames(left: RDD, right: RDD) -> RDD:
    """Pairs of frames of two RDDs of frames with equal partitions and equal records in each."""
    return RDD(
        left._jrdd.zip(right._jrdd),
        left.ctx,
        PairDeserializer(NoOpSerializer(), NoOpSerializer()),
    )


def shuffle_frames(keyed: RDD, num_partitions: int, few_bytes: bool = False) -> RDD:
    """Send frames to partitions through a Spark shuffle.

    ``keyed`` comes from :func:`map_frames` with a task that yields :func:`send` pairs. ``few_bytes``:
    a task's frames have room in the JVM's memory, together.
    """
    jvm = keyed.ctx._jvm
    assert jvm is not None
    pairs = jvm.PairwiseRDD(keyed._jrdd.rdd()).asJavaPairRDD()
    partitioner = jvm.PythonPartitioner(num_partitions, _PARTITIONER_ID)
    sent = pairs.partitionBy(partitioner)
    if few_bytes and num_partitions > FEW_FILES:
        with _one_file_a_task(keyed.ctx):
            sent.rdd().dependencies()  # registers the shuffle
    return RDD(jvm.PythonRDD.valueOfPair(sent), keyed.ctx, NoOpSerializer())


@contextlib.contextmanager
def _one_file_a_task(context: SparkContext) -> Iterator[None]:
    """Shuffles that are registered inside the block sort what a task sends and write it as one file.

    By itself Spark opens a file for each partition where there are up to 200: M x N files in all.
    """
    assert context._jsc is not None
    conf = context._jsc.sc().conf()
    if conf.contains(_FILES):  # the user knows better
        yield
        return
    conf.set(_FILES, str(FEW_FILES))
    try:
        yield
    finally:
        conf.remove(_FILES)


def send(partition: int, frame: bytes) -> Iterator[bytes]:
    """Address ``frame`` to ``partition`` of the coming :func:`shuffle_frames`."""
    yield pack_long(partition)
    yield frame


def stored_frames(rdd: RDD) -> RDD:
    """The frames of a persisted RDD as they are stored, without its lineage; for local mode.

    Spark sends the partitions of an RDD with each of its tasks, and those of a narrow chain are the
    source's own: of ``parallelize`` or ``createDataFrame`` all rows, in every task of every job. Stored
    blocks go by name. One that is lost is not computed again, so only where none can be: in local mode
    what memory has no room for is on disk.
    """
    (blocks,) = _blocks(rdd, [range(rdd.getNumPartitions())])
    return RDD(blocks, rdd.ctx, NoOpSerializer())


def store_frames(rdd: RDD) -> None:
    """Compute the partitions of a persisted RDD that are not stored; nothing comes to the driver."""
    rdd._jrdd.count()


def stored_for(rdd: RDD, wanted: Sequence[Sequence[int]]) -> RDD:
    """An RDD whose m-th partition has the frames of those partitions of a persisted RDD that
    ``wanted[m]`` names, one or more, from wherever they are stored; without its lineage.

    ``rdd`` comes from :func:`map_frames` with a task that yields :func:`send` pairs, in the partitions
    that they are addressed to. Where a block is not found, tasks fail: see :func:`is_not_stored`.
    """
    jvm = rdd.ctx._jvm
    assert jvm is not None
    groups = list(dict.fromkeys(tuple(some) for some in wanted))
    together = [blocks.coalesce(1) for blocks in _blocks(rdd, groups)]
    partitions: list[RDD[bytes]] = [
        RDD(together[groups.index(tuple(some))], rdd.ctx, NoOpSerializer()) for some in wanted
    ]
    # Of pairs nothing says where they had best be read: what they are zipped with does.
    pairs = jvm.PairwiseRDD(rdd.ctx.union(partitions)._jrdd.rdd()).asJavaPairRDD()
    return RDD(jvm.PythonRDD.valueOfPair(pairs), rdd.ctx, NoOpSerializer())


def is_not_stored(error: Exception) -> bool:
    """Whether a job failed since a block of :func:`stored_for` is no longer stored anywhere."""
    return "Could not compute split, block" in str(error)


def _blocks(rdd: RDD, groups: Sequence[Sequence[int]]) -> list[Any]:
    """For each group of partitions of a persisted RDD a Java RDD of them, by the blocks' names."""
    jvm, gateway = rdd.ctx._jvm, rdd.ctx._gateway
    assert jvm is not None
    assert gateway is not None
    spark = jvm.org.apache.spark
    block_id, named, rdd_of, java = (
        spark.storage.BlockId,
        spark.storage.RDDBlockId,
        spark.rdd.BlockRDD,
        spark.api.java.JavaRDD,
    )
    source = rdd._jrdd.rdd()
    context, kind, number = source.context(), source.elementClassTag(), source.id()
    found = []
    for group in groups:
        blocks = gateway.new_array(block_id, len(group))
        for i, partition in enumerate(group):
            blocks[i] = named(number, partition)
        found.append(java(rdd_of(context, blocks, kind), kind))
    return found


def is_local(context: SparkContext) -> bool:
    """Whether driver and tasks are one process on one node for ever: ``local[...]``."""
    master = context.master or ""
    return master == "local" or master.startswith("local[")


def collect_frames(rdd: RDD) -> list[bytes]:
    """All frames of ``rdd``. As ``RDD.collect``, which would name the stage after itself."""
    jvm = rdd.ctx._jvm
    assert jvm is not None
    return _served(jvm.PythonRDD.collectAndServe(rdd._jrdd.rdd()))


class RunningJob:
    """A job that collects the frames of ``rdd``, under way; meanwhile the driver may do other things.

    The results come through the JVM's future: on a quiet machine an empty job takes 13 ms, of which
    :func:`collect_frames` makes 21, since it opens a socket for them.
    """

    FEW = 16
    """Up to so many frames are fetched one by one, each with a call; more through a socket."""

    def __init__(self, rdd: RDD, count: int) -> None:
        self._context, self._count = rdd.ctx, count
        self._future = rdd._jrdd.collectAsync()

    def frames(self) -> list[bytes]:
        """Wait for the end; all ``count`` frames, partition by partition."""
        found = self._future.get()
        if self._count <= self.FEW:
            return [bytes(found.get(i)) for i in range(self._count)]
        jvm = self._context._jvm
        assert jvm is not None
        iterator = jvm.scala.jdk.javaapi.CollectionConverters.asScala(found.iterator())
        return _served(jvm.PythonRDD.serveIterator(iterator, "sparkdl-frames"))


class StoringJob:
    """A job that stores all partitions of a persisted RDD and brings nothing back, under way."""

    def __init__(self, rdd: RDD) -> None:
        self._future = rdd._jrdd.countAsync()

    def wait(self) -> None:
        self._future.get()


def _served(address: Any) -> list[bytes]:
    stream: Any = _load_from_socket(address, NoOpSerializer())
    managed = stream if hasattr(stream, "__enter__") else contextlib.nullcontext(stream)  # < 4.3
    with managed as frames:
        return list(frames)


def collect_and_forget(rdd: RDD) -> list[bytes]:
    """All frames; the shuffles behind them are deleted."""
    try:
        return collect_frames(rdd)
    finally:
        forget_shuffles(rdd)


def forget_shuffles(rdd: RDD) -> None:
    """Delete the shuffle files behind ``rdd`` now, instead of at a garbage collection."""
    with contextlib.suppress(Py4JError):
        rdd._jrdd.rdd().cleanShuffleDependencies(False)


def forget_last_shuffle(rdd: RDD) -> None:
    """Likewise of the shuffle that ``rdd`` reads, and not of those behind it, which may be a user's:
    a job of another thread that reads one of these would find it empty."""
    with contextlib.suppress(Py4JError):
        read = rdd._jrdd.rdd()
        cleaner = read.context().cleaner()
        while cleaner.isDefined():
            dependency = read.dependencies().head()
            if dependency.getClass().getSimpleName() == "ShuffleDependency":
                cleaner.get().doCleanupShuffle(dependency.shuffleId(), False)
                break
            read = dependency.rdd()


@contextlib.contextmanager
def stage_name(context: SparkContext, name: str) -> Iterator[None]:
    """Name, in the Spark UI, the stages of RDDs made (and jobs run) inside the block."""
    context.setLocalProperty("callSite.short", name)
    try:
        yield
    finally:
        context.setLocalProperty("callSite.short", None)  # type: ignore[arg-type]

"""RDDs of raw byte frames, with map, zip and shuffle that do not pickle the payload.

PySpark pickles what crosses between Python and the JVM. The records of a training iteration are
bytes already, so these functions pass them on unchanged. They use the same JVM classes as
``RDD.partitionBy`` and ``RDD.zip``.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext, StorageLevel, TaskContext
from pyspark.serializers import CloudPickleSerializer, NoOpSerializer, PairDeserializer, pack_long

from sparkdl.compat import PipelinedRDD, load_from_socket, to_seq
from sparkdl.spark.worker import finish_task

Frames = Iterable[bytes]
_FILES = "spark.shuffle.sort.bypassMergeThreshold"
FEW_FILES = 4
"""The number of files up to which a task's shuffle output is written as fast as in one file."""
_DIRECT_BYTES = 256 << 10
"""The largest task that travels as it is; PySpark may broadcast larger ones."""
_PARTITIONER_ID = 0x5DA7  # any constant: equal partitioners compare equal across our RDDs


PLACE = re.compile(
    r"\n?\[partition (?P<partition>\d+), attempt (?P<attempts>\d+), on (?P<node>\S+)\]"
)
"""The note that a task adds to its exceptions; attempts count from 1."""


@dataclass(frozen=True)
class _Located:
    """A task that leaves its process as it was, and adds its location to its exceptions.

    Spark's report lacks the location from 4.1 on.
    """

    task: Callable[[int, Any], Frames]

    def __call__(self, partition: int, records: Any) -> Iterator[bytes]:
        try:
            yield from self.task(partition, records)
            finish_task()
        except Exception as error:
            context = TaskContext.get()
            if context is not None and not any(map(PLACE.match, getattr(error, "__notes__", ()))):
                attempt = context.attemptNumber() + 1
                error.add_note(
                    f"[partition {partition}, attempt {attempt}, on {socket.gethostname()}]"
                )
            raise


def map_frames(rdd: RDD, task: Callable[[int, Any], Frames], barrier: bool = False) -> RDD:
    """Run ``task(partition, records) -> frames`` over ``rdd``; return an RDD of raw frames."""
    mapped = _MappedFrames(rdd, _Located(task), isFromBarrier=barrier)
    mapped._bypass_serializer = True
    mapped._jrdd_deserializer = NoOpSerializer()
    return mapped


class _MappedFrames(PipelinedRDD[Any, Any]):
    """A PipelinedRDD that takes four calls of the JVM to make, where PySpark makes 14.

    Each takes 0.05 to 0.1 ms, and a training iteration has such an RDD of its own for each stage.
    """

    @property
    def _jrdd(self) -> Any:
        context = self.ctx
        if self._jrdd_val is None and context.profiler_collector is None:
            parts = self.func, None, self._prev_jrdd_deserializer, self._jrdd_deserializer
            command = CloudPickleSerializer().dumps(parts)
            if len(command) <= _DIRECT_BYTES and not list(context._pickled_broadcast_vars):
                environment = tuple(context.environment.items())
                made = _java_side(context, environment, tuple(context._python_includes))
                source, keeps = self._prev_jrdd.rdd(), self.preservesPartitioning
                made = made.PythonRDD(source, made.function(command), keeps, self.is_barrier)
                self._jrdd_val = made.asJavaRDD()
        return super()._jrdd


@dataclass(frozen=True)
class _JavaSide:
    """The Java classes and values of a session that every RDD of frames needs."""

    PythonRDD: Any
    SimplePythonFunction: Any
    values: tuple[Any, ...]

    def function(self, command: bytes) -> Any:
        return self.SimplePythonFunction(bytearray(command), *self.values)


@functools.lru_cache(maxsize=1)
def _java_side(
    context: SparkContext, environment: tuple[tuple[str, str], ...], includes: tuple[str, ...]
) -> _JavaSide:
    jvm = context._jvm
    assert jvm is not None
    variables, paths = jvm.java.util.HashMap(), jvm.java.util.ArrayList()
    for name, value in environment:
        variables.put(name, value)
    for path in includes:
        paths.add(path)
    broadcasts = jvm.java.util.ArrayList()
    python = context.pythonExec, context.pythonVer
    values = variables, paths, *python, broadcasts, context._javaAccumulator
    return _JavaSide(jvm.PythonRDD, jvm.SimplePythonFunction, values)


def zip_frames(left: RDD, right: RDD) -> RDD:
    """Return pairs of frames of two RDDs with as many partitions, and as many records in each."""
    return RDD(
        left._jrdd.zip(right._jrdd), left.ctx, PairDeserializer(NoOpSerializer(), NoOpSerializer())
    )


def shuffle_frames(keyed: RDD, num_partitions: int, few_bytes: bool = False) -> RDD:
    """Send frames to partitions through a Spark shuffle; a task yields :func:`send` pairs.

    With ``few_bytes`` all frames of a task together fit into the JVM's memory: each task sorts its
    output into a single file, unless the user has chosen. By default Spark opens one file per
    partition if there are up to 200 of them: M x N files in all.
    """
    jvm = keyed.ctx._jvm
    assert jvm is not None
    pairs = jvm.PairwiseRDD(keyed._jrdd.rdd()).asJavaPairRDD()
    sent = pairs.partitionBy(_partitioner(keyed.ctx, num_partitions))
    if few_bytes and num_partitions > FEW_FILES:
        conf = keyed.ctx._jsc.sc().conf()  # type: ignore[union-attr]
        with setting(conf, _FILES, str(FEW_FILES), unless=lambda: conf.contains(_FILES)):
            sent.rdd().dependencies()  # registers the shuffle
    return RDD(jvm.PythonRDD.valueOfPair(sent), keyed.ctx, NoOpSerializer())


def _partitioner(context: SparkContext, num_partitions: int) -> Any:
    assert context._jvm is not None
    return context._jvm.PythonPartitioner(num_partitions, _PARTITIONER_ID)


_set: dict[str, tuple[int, str | None]] = {}
"""For each setting, the number of blocks that now override it, and its value before the first."""
_lock = threading.Lock()


@contextlib.contextmanager
def setting(conf: Any, key: str, value: str, unless: Callable[[], bool]) -> Iterator[None]:
    """Set a value of Spark's configuration inside the block, ``unless`` the present one is as good.

    The old value returns when the last of overlapping blocks ends, as two fits may train in one
    session.
    """
    with _lock:
        count, before = _set.get(key, (0, None))
        as_good = count == 0 and unless()
        if count == 0 and not as_good:
            before = conf.get(key) if conf.contains(key) else None
            conf.set(key, value)
        if not as_good:
            _set[key] = count + 1, before
    try:
        yield
    finally:
        with _lock, contextlib.suppress(Py4JError):  # the session may be gone
            count, before = (0, None) if as_good else _set.pop(key)
            if count > 1:
                _set[key] = count - 1, before
            elif count and before is None:
                conf.remove(key)
            elif count:
                conf.set(key, before)


def send(partition: int, frame: bytes) -> Iterator[bytes]:
    """Address ``frame`` to ``partition`` of the :func:`shuffle_frames` that follows."""
    yield pack_long(partition)
    yield frame


def stored_frames(rdd: RDD) -> RDD:
    """Return the stored frames of a persisted RDD, without its lineage; for local mode only.

    Spark sends the partitions of an RDD with each of its tasks, and those of a narrow chain include
    the source's own: for ``parallelize`` or ``createDataFrame`` all rows, in every task of every
    job. Stored blocks go by name. A lost block is not recomputed, so this is only for local mode,
    where none can be lost: what does not fit into memory is on disk.
    """
    jvm, gateway = rdd.ctx._jvm, rdd.ctx._gateway
    assert jvm is not None
    assert gateway is not None
    spark, source, count = jvm.org.apache.spark, rdd._jrdd.rdd(), rdd.getNumPartitions()
    context, kind, number = source.context(), source.elementClassTag(), source.id()
    blocks = gateway.new_array(spark.storage.BlockId, count)
    for partition in range(count):
        blocks[partition] = spark.storage.RDDBlockId(number, partition)
    named = spark.api.java.JavaRDD(spark.rdd.BlockRDD(context, blocks, kind), kind)
    return RDD(named, rdd.ctx, NoOpSerializer())


def some_partitions(rdd: RDD, partitions: Iterable[int]) -> RDD:
    """Return an RDD of frames with some partitions of ``rdd``, which keep their numbers in tasks."""
    jvm = rdd.ctx._jvm
    assert jvm is not None
    numbers = jvm.java.util.ArrayList()
    for partition in partitions:
        numbers.add(partition)
    wanted = to_seq(jvm, numbers).toSet()  # is a function
    source = rdd._jrdd.rdd()
    pruned = jvm.org.apache.spark.rdd.PartitionPruningRDD.create(source, wanted)
    named = jvm.org.apache.spark.api.java.JavaRDD(pruned, source.elementClassTag())
    return RDD(named, rdd.ctx, NoOpSerializer())


def store_frames(rdd: RDD) -> None:
    """Compute and store the missing partitions of a persisted RDD; send nothing to the driver."""
    rdd._jrdd.count()


def is_local(context: SparkContext) -> bool:
    """Return whether driver and tasks always share one process on one node: ``local[...]``."""
    return is_local_master(context.master)


def is_local_master(master: str | None) -> bool:
    """Return whether a master stands for one process: ``local`` or ``local[...]``."""
    return master is not None and (master == "local" or master.startswith("local["))


def collect_frames(rdd: RDD) -> list[bytes]:
    """Return all frames of ``rdd``, like ``RDD.collect``, which would name the stage after itself."""
    jvm = rdd.ctx._jvm
    assert jvm is not None
    return _served(jvm.PythonRDD.collectAndServe(rdd._jrdd.rdd()))


class RunningJob:
    """A running job that collects the frames of ``rdd`` while the driver can do other things.

    The results come through the JVM's future. On a quiet machine, an empty job takes 13 ms this
    way, and 21 with :func:`collect_frames`, which opens a socket.
    """

    FEW = 16
    """The most frames that are fetched one by one, with a call each; more come through a socket."""

    def __init__(self, rdd: RDD, count: int) -> None:
        self._context, self._count = rdd.ctx, count
        self._future = rdd._jrdd.collectAsync()

    @property
    def done(self) -> bool:
        """Return whether the job has ended, with or without an error."""
        return bool(self._future.isDone())

    def cancel(self) -> None:
        """Cancel the job; its tasks may go on for a while."""
        with contextlib.suppress(Py4JError):
            self._future.cancel(True)

    def frames(self) -> list[bytes]:
        """Wait for the end, and return all ``count`` frames in order of the partitions."""
        found = self._future.get()
        if self._count <= self.FEW:
            return [bytes(found.get(i)) for i in range(self._count)]
        jvm = self._context._jvm
        assert jvm is not None
        iterator = to_seq(jvm, found).iterator()
        return _served(jvm.PythonRDD.serveIterator(iterator, "sparkdl-frames"))


def _served(address: Any) -> list[bytes]:
    stream: Any = load_from_socket(address, NoOpSerializer())
    managed = stream if hasattr(stream, "__enter__") else contextlib.nullcontext(stream)  # < 4.3
    with managed as frames:
        return list(frames)


def collect_and_forget(rdd: RDD) -> list[bytes]:
    """Return all frames of ``rdd``, and delete the shuffles behind it."""
    try:
        return collect_frames(rdd)
    finally:
        forget_shuffles(rdd)


def forget_shuffles(rdd: RDD) -> None:
    """Delete the shuffle files behind ``rdd`` now, instead of at a garbage collection."""
    with contextlib.suppress(Py4JError):
        rdd._jrdd.rdd().cleanShuffleDependencies(False)


def forget_last_shuffle(rdd: RDD, only_frames: bool = False) -> None:
    """Delete the files of the shuffle that ``rdd`` reads, but not of those behind it.

    Those may be a user's, and a job of another thread that reads one would find it empty. In local
    mode this waits: deleted later, they would be missing in a job that has made them anew. With
    ``only_frames``, only files of :func:`shuffle_frames` are deleted.
    """
    with contextlib.suppress(Py4JError):
        read = rdd._jrdd.rdd()
        cleaner = read.context().cleaner()
        while cleaner.isDefined() and read.dependencies().nonEmpty():
            dependency = read.dependencies().head()
            if dependency.getClass().getSimpleName() == "ShuffleDependency":
                if not only_frames or dependency.partitioner().equals(
                    _partitioner(rdd.ctx, read.getNumPartitions())
                ):
                    cleaner.get().doCleanupShuffle(dependency.shuffleId(), is_local(rdd.ctx))
                break
            read = dependency.rdd()


def compute_again(rdd: RDD) -> None:
    """Unpersist ``rdd`` so that it is recomputed; it is persisted again as it is computed.

    Frames that it reads from a shuffle are recomputed too, because they may refer to what is gone.

    Outside local mode, this does not wait: an executor that has just died does not answer for two
    minutes. A block that is removed too late, after it was recomputed, is computed once more. In
    local mode blocks are read without their lineage, so none may be removed too late; there the
    call blocks, and no executor can die.
    """
    rdd.unpersist(blocking=is_local(rdd.ctx))
    forget_last_shuffle(rdd, only_frames=True)
    rdd.persist(StorageLevel.MEMORY_AND_DISK)


@contextlib.contextmanager
def stage_name(context: SparkContext, name: str) -> Iterator[None]:
    """Name the stages of RDDs made, and of jobs run, inside the block for the Spark UI."""
    context.setLocalProperty("callSite.short", name)
    try:
        yield
    finally:
        context.setLocalProperty("callSite.short", None)  # type: ignore[arg-type]

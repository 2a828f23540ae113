"""What Spark holds at the moment, looked up inside the driver's JVM."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import fork_server
from pyspark import SparkContext

POOLS = re.compile(
    r".*QueryStage|block-manager-|Executor task|map-output-|shuffle-|task-result-getter|rpc-|Attach|"
    r"process reaper"
)
"""Threads of pools of Spark and Java, which come with work, up to a bound, and stay a minute."""


def shuffles(context: SparkContext) -> int:
    """Shuffles whose map output the driver still knows."""
    tracker = _field(
        context, "org.apache.spark.SparkEnv", _environment(context), "mapOutputTracker"
    )
    return tracker.shuffleStatuses().size()


def blocks(context: SparkContext, kind: str) -> list[str]:
    """Names of the blocks of one kind ("broadcast", "rdd", ...) in the driver's block manager."""
    manager = _field(context, "org.apache.spark.SparkEnv", _environment(context), "blockManager")
    infos = _field(context, "org.apache.spark.storage.BlockManager", manager, "blockInfoManager")
    names = infos.entries().mkString("\n").splitlines()
    return sorted(n.strip("()").split(",")[0] for n in names if n.startswith(f"({kind}_"))


def files(context: SparkContext, kind: str) -> list[str]:
    """Names of the files of one kind ("shuffle", ...) that the driver's block manager has on disk."""
    manager = _field(context, "org.apache.spark.SparkEnv", _environment(context), "blockManager")
    disk = _field(context, "org.apache.spark.storage.BlockManager", manager, "diskBlockManager")
    paths = disk.getAllFiles().mkString("\n").splitlines()
    return sorted(n for n in (p.rpartition("/")[2] for p in paths) if n.startswith(f"{kind}_"))


def jobs(context: SparkContext) -> int:
    """Jobs submitted so far."""
    return context._jsc.sc().dagScheduler().numTotalJobs()


def persisted(context: SparkContext) -> int:
    """RDDs marked as persisted."""
    return context._jsc.getPersistentRDDs().size()


def threads(context: SparkContext) -> list[str]:
    """Names of the JVM's threads without their numbers, apart from those of :data:`POOLS`."""
    assert context._jvm is not None
    text = context._jvm.java.lang.Thread.getAllStackTraces().keySet().toString()
    names = re.findall(r"Thread\[(?:#\d+,)?(.*?),\d+,", text)
    return sorted(re.sub(r"\d+", "N", name) for name in names if not POOLS.match(name))


def py4j_objects(context: SparkContext) -> int:
    """Objects that the JVM holds for Python."""
    return context._gateway.java_gateway_server.getGateway().getBindings().size()


def collect_garbage(context: SparkContext) -> None:
    """A full collection in the JVM, after which Spark's cleaner thread removes what is unreachable."""
    assert context._jvm is not None
    context._jvm.System.gc()


def drain_py4j(context: SparkContext) -> None:
    """Wait until the JVM was told of every object that Python let go of: Py4J does it once a second."""
    waiting = context._gateway._gateway_client.finalizer_deque
    assert eventually(lambda: not waiting)


def workers(context: SparkContext) -> list[int]:
    """Return the Python processes that the session's JVM has started, directly or not."""
    return fork_server.below(context._gateway.proc.pid)


def eventually(happens: Callable[[], Any], seconds: float = 20) -> bool:
    """Whether ``happens()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def wait_for_tasks(context: SparkContext) -> None:
    """Wait until no task runs any more: Spark leaves those of a failed job to their ends."""
    assert context._jsc is not None
    store = context._jsc.sc().statusStore()
    assert eventually(lambda: not store.executorList(True).apply(0).activeTasks())


def _environment(context: SparkContext) -> Any:
    return context._jsc.sc().env()


def _field(context: SparkContext, class_name: str, instance: Any, name: str) -> Any:
    """By reflection on the field: Py4J's own look-up loads classes that Spark ships without."""
    assert context._jvm is not None
    field = context._jvm.java.lang.Class.forName(class_name).getDeclaredField(name)
    field.setAccessible(True)
    return field.get(instance)

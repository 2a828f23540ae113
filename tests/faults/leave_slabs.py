"""Script: executors hold slabs of a fit, and its persisted partitions lie elsewhere when it ends, or
one that holds some is lost just then."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
from harness import processes
from harness.slabs import slabs_apart
from pyspark import RDD, SparkContext, StorageLevel

from sparkdl.engines.resources import FitResources
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.spark.executors import Executor, executors, task_per_executor
from sparkdl.spark.frames import map_frames, send, shuffle_frames, zip_frames

EXECUTORS = 3
CASES = ("none", "one", "both", "lost")
"""Which executors hold the persisted partitions in the end. "lost": all do, what is behind them is on
the last one, and that is killed while the slabs are removed: to compute them anew, the others would
have to make slabs."""


class WriteSlab:
    """Task that makes the root of ``slab``."""

    def __init__(self, slab: SlabConfig) -> None:
        self.slab = slab

    def __call__(self, partition: int, frames: Any) -> Iterator[bytes]:
        list(frames)
        open_root(self.slab, create=True)
        yield b""


class SendToAll(WriteSlab):
    """Likewise, with a frame for each partition of the persisted RDD."""

    def __call__(self, partition: int, frames: Any) -> Iterator[bytes]:
        list(super().__call__(partition, frames))
        for reader in range(EXECUTORS):
            yield from send(reader, b"")


def one_frame(partition: int, frames: Any) -> Iterator[bytes]:
    list(frames)
    yield b""


def first(partition: int, pairs: Any) -> Iterator[bytes]:
    for frame, _ in pairs:
        yield frame


def persisted(case: str, context: SparkContext, found: list[Executor], slab: SlabConfig) -> RDD:
    if case == "lost":
        sent = map_frames(task_per_executor(context, [found[-1]] * 2), SendToAll(slab))
        read = map_frames(shuffle_frames(sent, EXECUTORS), one_frame)
        made = map_frames(zip_frames(read, task_per_executor(context, found)), first)
        return made.persist(StorageLevel.DISK_ONLY)
    made = map_frames(task_per_executor(context, found[:1]), WriteSlab(slab))
    return made.persist(StorageLevel.DISK_ONLY_2 if case == "both" else StorageLevel.DISK_ONLY)


def lose(executor: Executor, driver: bytes) -> None:
    """It answers no more, and is killed when the others have had time to do what they were told."""
    pids = processes.executors(driver)
    name = f"--executor-id\0{executor.name}\0".encode()
    pid = next(pid for pid in pids if name in b"\0".join(processes.command(pid)) + b"\0")
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3, processes.kill, [pid]).start()


def main() -> None:
    import sys

    from launch import answer, session, spec

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    results = {}
    with session(spec()["master"], **{"spark.sparkdl.slab.dir": "slabs"}) as spark:
        context = spark.sparkContext
        context.parallelize(range(8), 8).count()
        for case in CASES:
            slab = SlabConfig.new("slabs", context.applicationId)
            with FitResources(context, slab) as resources:
                found = executors(context)
                map_frames(task_per_executor(context, found), WriteSlab(slab)).count()
                if case != "none":
                    resources._rdds.append(persisted(case, context, found, slab))
                    resources._rdds[-1].count()
                held = len(slabs_apart())
                if case == "lost":
                    lose(found[-1], processes.driver(context))
            results[case] = [held, len(slabs_apart())]
    answer(results)


if __name__ == "__main__":
    main()

"""Plain tasks, each of which trains by itself, in a session of either kind."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from sparkdl.engines.resources import FitResources
from sparkdl.gang.connect import slots_of
from sparkdl.gang.slots import cpus_of
from sparkdl.session import connected_session_of, context_of, is_connected, settings_of
from sparkdl.settings import Settings
from sparkdl.slab.pool import clean_here
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.worker import finish_task

CLEAN_SECONDS = 20.0
"""The longest time that removing the slabs of a run takes, where other queries have the slots."""


@dataclass(frozen=True)
class PlainTasks:
    """The parts of a session that a run of plain tasks needs."""

    session: Any
    context: SparkContext | None  # None in a session of Spark Connect
    settings: Settings
    slab: SlabConfig
    slots: int  # tasks at once
    threads: int  # of each task

    @staticmethod
    def of(data: DataFrame) -> PlainTasks:
        """Return those of the session of ``data``."""
        if is_connected(data):
            session = connected_session_of(data, "fit_groups")
            settings = settings_of(None, session)
            slab = SlabConfig.new(settings.slab_dir, f"connect-{session.session_id}")
            threads = int(session.conf.get("spark.task.cpus", "1") or 1)
            return PlainTasks(session, None, settings, slab, slots_of(session), threads)
        context, session = context_of(data), data.sparkSession
        settings = settings_of(context, session)
        slab = SlabConfig.new(settings.slab_dir, context.applicationId)
        slots, threads = context.defaultParallelism, cpus_of(context, None)
        return PlainTasks(session, context, settings, slab, slots, threads)

    @contextlib.contextmanager
    def running(self, description: str) -> Iterator[None]:
        """Remove the slabs of the tasks in the block afterwards; the UI shows ``description``."""
        if self.context is None:
            try:
                yield
            finally:
                clean_nodes(self.session, self.slab, self.slots)
            return
        with FitResources(self.context, self.slab, self.settings.timeout):
            self.context.setJobDescription(f"sparkdl: {description}")
            yield


@dataclass(frozen=True)
class _Clean:
    """The task that removes the slabs of a run from its node."""

    slab: SlabConfig

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        clean_here(self.slab)
        finish_task()
        yield from ()


def clean_nodes(session: Any, slab: SlabConfig, tasks: int) -> None:
    """Remove the slabs of a run in a session of Spark Connect, from the nodes that tasks get to.

    If others use the slots for :data:`CLEAN_SECONDS`, the slabs stay until their executors have ended.
    """
    if session.is_stopped:
        return
    tag = f"sparkdl-{secrets.token_hex(8)}"
    timer = threading.Timer(CLEAN_SECONDS, session.interruptTag, (tag,))
    session.addTag(tag)
    timer.start()
    try:
        with contextlib.suppress(PySparkException):
            frame = session.range(0, tasks, 1, tasks)
            frame.mapInArrow(_Clean(slab), "nothing int").toArrow()
    finally:
        timer.cancel()
        session.removeTag(tag)

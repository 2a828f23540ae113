"""Plain tasks, each of which trains by itself, in a session of either kind."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from sparkdl.engines.resources import FitResources
from sparkdl.errors import SparkdlError
from sparkdl.gang.connect import in_tasks, slots_of
from sparkdl.gang.slots import cpus_of
from sparkdl.session import SessionFacts
from sparkdl.slab.pool import clean_here
from sparkdl.slab.root import SlabConfig

CLEAN_SECONDS = 20.0
"""The longest time that removing the slabs of a run takes, where other queries have the slots."""


@dataclass(frozen=True)
class PlainTasks:
    """The parts of a session that a run of plain tasks needs."""

    facts: SessionFacts
    slab: SlabConfig
    slots: int  # tasks at once
    threads: int  # of each task

    @staticmethod
    def of(data: DataFrame) -> PlainTasks:
        """Return those of the session of ``data``."""
        facts = SessionFacts.of(data, "fit_groups")
        context, session = facts.context, facts.session
        slab = SlabConfig.new(facts.settings.slab_dir, facts.application)
        if context is None:
            threads = int(session.conf.get("spark.task.cpus", "1") or 1)
            return PlainTasks(facts, slab, slots_of(session), threads)
        return PlainTasks(facts, slab, context.defaultParallelism, cpus_of(context, None))

    @contextlib.contextmanager
    def running(self, description: str) -> Iterator[None]:
        """Remove the slabs of the tasks in the block afterwards; the UI shows ``description``."""
        context = self.facts.context
        if context is None:
            try:
                yield
            finally:
                clean_nodes(self.facts.session, self.slab, self.slots)
            return
        with FitResources(context, self.slab, self.facts.settings.timeout):
            context.setJobDescription(f"sparkdl: {description}")
            yield


def _clean(slab: SlabConfig, number: int) -> None:
    clean_here(slab)


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
        with contextlib.suppress(PySparkException, SparkdlError):
            in_tasks(session, functools.partial(_clean, slab), range(tasks))
    finally:
        timer.cancel()
        session.removeTag(tag)

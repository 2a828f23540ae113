"""A report on a Spark session: what runs on its executors, and how fast each engine trains there."""

from __future__ import annotations

import itertools
import json
import logging
import os
import statistics
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Any

import torch
from pyspark import cloudpickle
from torch import nn

from sparkdl.errors import SparkdlError, counted
from sparkdl.gang.slots import task_slots
from sparkdl.loop.triggers import max_iteration
from sparkdl.session import is_connected
from sparkdl.settings import __version__
from sparkdl.train.fit import fit
from sparkdl.train.request import FitRequest
from sparkdl.train.trainer import Trainer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ITERATIONS = 30
"""The iterations of a trial fit; the last third of them is measured."""
ROWS = 64
"""The rows of a trial fit, for each task slot."""
ENGINES = {
    "local": "in the process of the driver",
    "shuffle": "Spark jobs: a lost executor costs seconds",
    "gang": "one barrier stage: all ranks at once",
}


@dataclass(frozen=True)
class Diagnosis:
    """The result of :func:`diagnose`; ``print`` shows it as a table.

    Attributes:
        facts: Lines about the session, the driver and the executors, each with a name and a text.
        milliseconds: The median time of an iteration of a model with four weights, by engine. This is
            what an engine itself costs; a real model's computing comes on top. An engine that cannot
            train in this session is not in it.
        reasons: Why the other engines cannot, by engine.
        advice: What to change, one sentence each.
    """

    facts: list[tuple[str, str]]
    milliseconds: dict[str, float]
    reasons: dict[str, str]
    advice: list[str]

    def __str__(self) -> str:
        lines = [_line(name, text) for name, text in self.facts]
        lines += ["", _line("engine", "an iteration of a tiny model")]
        shown: dict[str, str] = {}  # the first engine of each reason
        for engine, where in ENGINES.items():
            if engine in self.milliseconds:
                text = f"{self.milliseconds[engine]:.3g} ms, {where}"
            else:
                first = shown.setdefault(self.reasons[engine], engine)
                text = "not here" + (
                    f": {self.reasons[engine]}" if first == engine else f", as {first}"
                )
            lines.append(_line(engine, text))
        if self.advice:
            lines += ["", "To change:", *(_line("-", text, 2) for text in self.advice)]
        return "\n".join(lines)


def diagnose(spark: SparkSession) -> Diagnosis:
    """Report what a session can train with, and at what speed.

    Each engine trains a tiny model for 30 iterations with all task slots of the session, which takes
    some seconds. Nothing is left behind.

    Args:
        spark: The session, classic or of Spark Connect.

    Returns:
        Facts, the engines with their times, and advice.
    """
    milliseconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    with _warnings() as records:
        tasks = None if is_connected(spark) else task_slots(spark.sparkContext)
        data = spark.range(ROWS * (tasks or 1)).selectExpr(
            "array(float(rand(1)), float(rand(2)), float(rand(3))) AS features",
            "array(float(rand(4))) AS label",
        )
        for engine in ENGINES:
            if engine == "shuffle" and is_connected(spark):
                reasons[engine] = (
                    "a Spark Connect session has no RDDs; the gang trains in its place"
                )
                continue
            try:
                milliseconds[engine] = _trial_fit(data, engine, tasks)
            except SparkdlError as error:
                sentence, _, _ = str(error).partition("Traceback (most recent call last)")
                reasons[engine] = " ".join(sentence.split())
        facts = [*_session_facts(spark, tasks), *_executor_facts(spark, tasks or 1)]
    advice = list(dict.fromkeys(record.getMessage() for record in records))
    return Diagnosis(facts, milliseconds, reasons, advice)


def _line(name: str, text: str, width: int = 12) -> str:
    blank = " " * width
    return textwrap.fill(f"{name:<{width - 1}} {text}", 110, subsequent_indent=blank)


def _trial_fit(data: DataFrame, engine: str, tasks: int | None) -> float:
    """Return the median milliseconds of an iteration."""
    trainer = Trainer(
        model=partial(nn.Linear, 3, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        engine=engine,
        batch_size=max(32, 2 * (tasks or 1)),
        replicas=tasks,
        stop=max_iteration(ITERATIONS),
    )
    trained = fit(data, FitRequest(trainer=trainer), progress="false", timeout=120.0).trained
    seconds = [row["seconds"] for row in trained.history]
    laps = [after - before for before, after in itertools.pairwise(seconds)]
    return 1000 * statistics.median(laps[-(ITERATIONS // 3) :])


def _session_facts(spark: SparkSession, tasks: int | None) -> Iterator[tuple[str, str]]:
    kind = "Spark Connect" if is_connected(spark) else f"classic, {spark.sparkContext.master}"
    runtime = os.environ.get("DATABRICKS_RUNTIME_VERSION")
    on = f" on Databricks {runtime}" if runtime else ""
    slots = "" if tasks is None else f", {counted(tasks, 'task')} at once"
    yield "session", f"Spark {spark.version}{on}, {kind}{slots}"
    python = ".".join(map(str, sys.version_info[:3]))
    yield "driver", f"Python {python}, torch {torch.__version__}, sparkdl {__version__}"


def _executor_facts(spark: SparkSession, tasks: int) -> Iterator[tuple[str, str]]:
    """Yield a line for each host that ran one of ``tasks`` tasks, or one that says why none ran."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # executors may lack the package
    try:
        rows = spark.range(0, tasks, 1, tasks).mapInArrow(_describe_node, "node string").collect()
    except Exception as error:
        yield "executors", f"no task can run: {str(error).strip().splitlines()[0]}"
        return
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    hosts: dict[str, dict[str, Any]] = {}
    for row in rows:
        node = json.loads(row.node)
        hosts.setdefault(node.pop("host"), node)
    for host, node in sorted(hosts.items()):
        text = ", ".join(f"{name} {version}" for name, version in node["versions"].items())
        shm = (
            "no /dev/shm" if node["shm"] is None else f"{node['shm'] / 1e9:.1f} GB free in /dev/shm"
        )
        yield host[:11], f"{text}; {shm}; {node['gpus'] or 'no GPU'}"


def _describe_node(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Describe, as one row of JSON, the machine and the Python on which this task runs."""
    import importlib
    import json
    import os
    import platform
    import socket

    import pyarrow

    for _ in batches:
        pass
    versions, gpus = {"Python": platform.python_version()}, ""
    for name in ("torch", "sparkdl"):
        try:
            module = importlib.import_module(name)
            versions[name] = str(getattr(module, "__version__", "of another project"))
            if name == "torch" and module.cuda.is_available():
                gpus = f"{module.cuda.device_count()} x {module.cuda.get_device_name(0)}"
        except Exception as error:
            versions[name] = f"missing ({error})"
    shm = None
    if os.path.isdir("/dev/shm"):
        stat = os.statvfs("/dev/shm")
        shm = stat.f_bavail * stat.f_frsize
    node = {"host": socket.gethostname(), "versions": versions, "gpus": gpus, "shm": shm}
    yield pyarrow.RecordBatch.from_arrays([pyarrow.array([json.dumps(node)])], ["node"])


@contextmanager
def _warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect what sparkdl warns of, in place of showing it."""
    logger, handler = logging.getLogger("sparkdl"), MemoryHandler(1 << 16, logging.CRITICAL + 1)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate

"""Train in one session again and again, each time with other faults; what came of it.

The rows are those of docs/reliability.md that a run survives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import processes
from harness.faulty import LARGE, frame, outcome, trainer
from harness.inject import Fault, at

import sparkdl

WAYS = ("references", "bytes")
STRAGGLER_SECONDS = 60.0


@dataclass(frozen=True)
class Cluster:
    """``folder``: holds all executors' local directories. ``slabs``: where their slab roots are.
    ``executors``: whether there are any, in processes of their own."""

    replicas: int
    folder: Path
    slabs: str
    executors: bool = True


@dataclass(frozen=True)
class Row:
    """``faults`` in a fit of a trainer with ``changes``. ``snapshots``: whether there may be one:
    without it there is nothing yet that a run could go on from, as in its first half minute."""

    faults: Sequence[Fault] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    snapshots: bool = True


def all_rows(cluster: Cluster) -> dict[str, Row]:
    """In the order in which they are tried. An epoch is 4 iterations of 10."""
    found = {name: Row(faults) for name, faults in _plain_rows(cluster).items()}
    if not cluster.executors:
        found = {name: row for name, row in found.items() if not _needs_executors(row)}
    found["samples deleted"] = Row(
        [
            at(job="fb", iteration=3, partition=0).delete_slabs("samples-*"),
            at(job="validation", iteration=4, partition=1).delete_slabs(),
            at(job="validation", iteration=8, partition=0).delete_slabs("samples-*"),
        ]
    )
    for name, changes in BEGINNINGS.items():
        passes = 9 * changes.get("local_steps", 1)
        lost = [at(job="fb", iteration=passes, partition=0).delete_slabs()]
        if cluster.executors:
            apart = cluster.replicas - 1  # not beside partition 0, whose task says what it did
            lost.append(at(job="fb", iteration=passes, partition=apart).kill_executor())
        found[f"begun again, {name}"] = Row(lost, changes, snapshots=False)
    return found


BEGINNINGS: dict[str, dict[str, Any]] = {
    "weights borrowed": {"sizes": LARGE},
    "module instance": {"instance": True},
    "module instance, weights borrowed": {"sizes": LARGE, "instance": True},
    "local steps": {"local_steps": 2},
}
"""What a replica may hold when a run begins again: weights that were zeroed, or trained."""


def _needs_executors(row: Row) -> bool:
    """Local mode has none to be killed, no host for a twin, and no shuffle."""
    kinds = {fault.kind for fault in row.faults}
    return bool(kinds & {"kill_executor", "kill_host", "delete_shuffle_files"}) or kinds == {
        "sleep"
    }


def _plain_rows(cluster: Cluster) -> dict[str, list[Fault]]:
    last = cluster.replicas - 1
    return {
        "none": [],
        "task raises": [
            at(job="fb", iteration=2, partition=1).raise_once(),
            at(job="sync", iteration=3, partition=0).raise_once(),
            at(job="validation", iteration=4, partition=last).raise_once(),
            at(job="fb", iteration=6, partition=last).raise_once(),
            at(job="sync", iteration=8, partition=1).raise_once(),
        ],
        "worker killed": [
            at(job="fb", iteration=1, partition=0).kill_worker(),
            at(job="sync", iteration=2, partition=1).kill_worker(),
            at(job="validation", iteration=4, partition=0).kill_worker(),
            at(job="fb", iteration=6, partition=last).kill_worker(),
            at(job="sync", iteration=8, partition=0).kill_worker(),
        ],
        "straggler": [at(job="fb", iteration=6, partition=0).sleep(STRAGGLER_SECONDS)],
        "shuffle files deleted": [
            at(job="fb", iteration=3, partition=1).sleep(1.0),  # the others have sent theirs
            at(job="fb", iteration=3, partition=1).delete_shuffle_files(cluster.folder),
        ],
        "slabs deleted": [
            at(job="fb", iteration=3, partition=1).sleep(1.0),
            at(job="fb", iteration=3, partition=1).delete_slabs("gradient-*"),
            at(job="fb", iteration=6, partition=0).delete_slabs(),
            at(job="sync", iteration=8, partition=1).delete_slabs(),
        ],
        "executor killed in fb": [at(job="fb", iteration=5, partition=1).kill_executor()],
        "executor killed in sync": [at(job="sync", iteration=6, partition=0).kill_executor()],
        "executor killed three times": [
            at(job="fb", iteration=7, partition=1).kill_executor(times=3)
        ],
        "host lost": [at(job="fb", iteration=5, partition=0).kill_host()],
    }


def tried(spark, cluster: Cluster, faults: Sequence[Fault], notes: Path, **changes) -> dict:
    """One fit, its trainer with ``changes``: its outcome or its error, what each fault notes, and the
    seconds it took."""
    armed = [fault.into(notes, cluster.slabs) for fault in faults]
    df = frame(spark, cluster.replicas)
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))
    result: dict = {}
    began = time.perf_counter()
    try:
        trained = trainer(cluster.replicas, armed, validation=validation, **changes).fit(df)
        result = outcome(trained)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    struck = [fault.told() for fault in armed]
    return {
        **result,
        "seconds": round(time.perf_counter() - began, 2),
        "struck": [len(notes) for notes in struck],
        "expected": [fault.times for fault in armed],
        "passed": [[note["attempt"] for note in fault.told("passed")] for fault in armed],
        "deleted": [
            sum(note["deleted"] for note in fault.told("deleted"))
            for fault in armed
            if "delete" in fault.kind
        ],
        "killed executors": [
            note["executor"]
            for fault, notes in zip(armed, struck, strict=True)
            if fault.kind in ("kill_executor", "kill_host")
            for note in notes
        ],
    }


def run(
    spark, replicas: int, local: str, slabs: str, notes: str, often: str, rows: Sequence[str]
) -> dict:
    """Args:
    local: The folder of all executors' local directories; in local mode "".
    slabs: Where slab roots are.
    notes: The folder of the faults' notes.
    often: The setting of snapshots.
    rows: The names of the rows that are tried.
    """
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    cluster = Cluster(replicas, Path(local), slabs, executors=bool(local))
    results: dict = {}
    spark.conf.set("spark.sparkdl.slab.dir", slabs)
    for name, row in all_rows(cluster).items():
        if name not in rows:
            continue
        lines.clear()
        spark.conf.set("spark.sparkdl.snapshot.seconds", often if row.snapshots else "off")
        stages = "shuffle" if "shuffle" in name else "auto"  # else there is none on one node
        spark.conf.set("spark.sparkdl.stages", stages)
        results[name] = tried(spark, cluster, row.faults, Path(notes) / name, **row.changes)
        results[name]["log"] = list(lines)
        print(name, results[name], flush=True)
    spark.conf.set("spark.sparkdl.stages", "auto")
    logging.getLogger("sparkdl").removeHandler(handler)
    results["executors left"] = len(processes.executors(processes.driver(spark.sparkContext)))
    return results

"""Script: train on one master again and again, each time with other faults; what came of it.

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


def rows(cluster: Cluster) -> dict[str, Row]:
    """In the order in which they are tried. An epoch is 4 iterations of 10."""
    found = {name: Row(faults) for name, faults in _plain_rows(cluster).items()}
    if not cluster.executors:
        found = {name: row for name, row in found.items() if not _needs_executors(row)}
    found["samples deleted"] = Row(
        [
            at(job="fb", iteration=3, partition=0).delete_slabs("samples-*"),
            at(job="validation", iteration=8, partition=0).delete_slabs("samples-*"),
            at(job="validation", iteration=8, partition=1).delete_slabs(),
        ]
    )
    for name, changes in BEGINNINGS.items():
        passes = 9 * changes.get("local_steps", 1)
        lost = [at(job="fb", iteration=passes, partition=0).delete_slabs()]
        if cluster.executors:
            lost.append(at(job="fb", iteration=passes, partition=1).kill_executor())
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


def main() -> None:
    from launch import answer, session, spec

    given, lines = spec(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    executors = not given["master"].startswith("local[")
    cluster = Cluster(given["replicas"], Path(given["local"]), given["slabs"], executors)
    results, often = {}, given["settings"]["spark.sparkdl.snapshot.seconds"]
    settings = {"spark.sparkdl.slab.dir": cluster.slabs, **given["settings"]}
    with session(given["master"], **settings) as spark:
        for name, row in rows(cluster).items():
            if given["rows"] and name not in given["rows"]:
                continue
            lines.clear()
            spark.conf.set("spark.sparkdl.snapshot.seconds", often if row.snapshots else "off")
            notes = Path(given["notes"]) / name
            stages = "shuffle" if "shuffle" in name else "auto"  # else there is none on one node
            spark.conf.set("spark.sparkdl.stages", stages)
            results[name] = tried(spark, cluster, row.faults, notes, **row.changes)
            results[name]["log"] = list(lines)
            print(name, results[name], flush=True)
        results["executors left"] = len(processes.executors(processes.driver(spark.sparkContext)))
    answer(results)


if __name__ == "__main__":
    main()

"""Script: train while state is lost with executors, or with their slabs; what came of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import faulty, processes
from harness.inject import Fault, at

import sparkdl

REPLICAS, ITERATIONS = 2, 8
SNAPSHOT = r"the snapshot after iteration \d+"


@dataclass(frozen=True)
class Case:
    """``snapshots``: the setting; ``point``: a pattern of where the run goes on from."""

    faults: tuple[Fault, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    snapshots: str = "0"
    point: str = SNAPSHOT
    checkpoints: bool = False


CASES = {
    # Before a new executor is there, a snapshot has one copy, which the next kill may take.
    "executors, three times": Case(
        (at(job="fb", iteration=7, partition=1).kill_executor(times=3),),
        point=f"({SNAPSHOT}|the beginning)",
    ),
    "executor, compressed": Case(
        (at(job="sync", iteration=6, partition=0).kill_executor(),),
        {"compression": sparkdl.PowerSGD(1)},
    ),
    "slabs, clipped and averaged": Case(
        (
            at(job="fb", iteration=5, partition=1).delete_slabs(),
            at(job="sync", iteration=7, partition=0).delete_slabs(),
        ),
        {"clip_norm": 0.5, "ema": 0.9},
    ),
    "executor, checkpoints only": Case(
        (at(job="sync", iteration=6, partition=0).kill_executor(),),
        snapshots="off",
        point="the checkpoint after iteration 4",
        checkpoints=True,
    ),
    "executor, nothing kept": Case(
        (at(job="fb", iteration=4, partition=1).kill_executor(),),
        snapshots="off",
        point="the beginning",
    ),
}


def fit(spark, case: Case, faults: tuple[Fault, ...] = (), **changes) -> dict:
    """What must be equal, to the bit."""
    from launch import digest

    df = faulty.frame(spark, REPLICAS)
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=ITERATIONS)
    validation = sparkdl.Validation(df, every=sparkdl.every(4), best="loss")
    values = {"schedule": schedule, "validation": validation, **case.changes, **changes}
    trained = faulty.trainer(REPLICAS, faults, ITERATIONS, **values).fit(df)
    return {**faulty.outcome(trained), "best": digest(trained.best.module)}


def wait_for_executors(context, count: int) -> None:
    """Until those that were killed are replaced: a snapshot's copies need two."""
    status = context._jsc.sc()
    processes.wait_until(
        lambda: status.getExecutorMemoryStatus().size() == count + 1, 60, "new executors"
    )  # and the driver


def main() -> None:
    from launch import answer, session, spec

    given, lines = spec(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    settings = {"spark.sparkdl.slab.dir": "slabs", "spark.task.maxFailures": "8"}
    results = {}
    with session(given["master"], **settings) as spark:
        for name, case in CASES.items():
            lines.clear()
            wait_for_executors(spark.sparkContext, 2)
            spark.sparkContext._conf.set("spark.sparkdl.snapshot.seconds", case.snapshots)
            notes = Path(given["notes"], name)
            armed = tuple(fault.into(notes) for fault in case.faults)
            folder, often = notes / "checkpoints", sparkdl.every(4)
            kept = sparkdl.Checkpoint(folder, every=often, keep=2) if case.checkpoints else None
            results[name] = {
                "outcome": fit(spark, case, armed, checkpoint=kept),
                "struck": [len(fault.told()) for fault in armed],
                "log": list(lines),
                "persisted": spark.sparkContext._jsc.getPersistentRDDs().size(),
            }
    answer(results)


if __name__ == "__main__":
    main()

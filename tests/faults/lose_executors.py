"""Train while state is lost with executors, or with their slabs; what came of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import faulty
from harness.inject import Fault, at

import sparkdl

REPLICAS, ITERATIONS = 2, 8
SNAPSHOT = r"the snapshot after iteration \d+"
BEGINNING = "the beginning"


@dataclass(frozen=True)
class Case:
    """``points``: patterns of where the run goes on from, each of them at least once."""

    faults: tuple[Fault, ...]
    points: tuple[str, ...] = (SNAPSHOT,)
    changes: dict[str, Any] = field(default_factory=dict)
    snapshots: bool = True


CASES = {
    # Before a new executor is there, a snapshot has one copy, which the next kill may take.
    "executors, one after the other": Case(
        (at(job="fb", iteration=7, partition=1).kill_executor(times=2),),
        (SNAPSHOT, f"({SNAPSHOT}|{BEGINNING})"),
    ),
    "slabs and an executor, with all that a state can hold": Case(
        (
            at(job="fb", iteration=4, partition=1).delete_slabs(),
            at(job="sync", iteration=6, partition=0).kill_executor(),
        ),
        changes={"compression": sparkdl.PowerSGD(1), "clip_norm": 0.5, "ema": 0.9},
    ),
    "no snapshots": Case(
        (
            at(job="fb", iteration=3, partition=1).kill_executor(),
            at(job="sync", iteration=6, partition=0).kill_executor(),
        ),
        (BEGINNING, "the checkpoint after iteration 4"),
        snapshots=False,
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


class Recoveries(sparkdl.Callback):
    """After how many iterations the run went on from a loss."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_recovery(self, trainer: Any, state: sparkdl.TrainState) -> None:
        self.told.append(state.iteration)


def run(spark, notes: str, names: Sequence[str]) -> dict:
    """``notes``: the folder of the faults' notes and of checkpoints."""
    from launch import wait_for_executors

    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    results = {}
    spark.conf.set("spark.sparkdl.slab.dir", "slabs")
    for name in names:
        case = CASES[name]
        lines.clear()
        wait_for_executors(spark.sparkContext, 2)  # a snapshot's copies need two
        often = "0" if case.snapshots else "off"
        spark.conf.set("spark.sparkdl.snapshot.seconds", often)
        armed = tuple(fault.into(Path(notes, name)) for fault in case.faults)
        checkpoint = sparkdl.Checkpoint(Path(notes, name, "checkpoints"), every=sparkdl.every(4))
        kept = {} if case.snapshots else {"checkpoint": checkpoint}
        recoveries = Recoveries()
        results[name] = {
            "outcome": fit(spark, case, armed, callbacks=[recoveries], **kept),
            "recoveries": recoveries.told,
            "struck": [len(fault.told()) for fault in armed],
            "log": list(lines),
            "persisted": spark.sparkContext._jsc.getPersistentRDDs().size(),
        }
    logging.getLogger("sparkdl").removeHandler(handler)
    return results

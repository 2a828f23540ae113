"""Script: train on one master again and again, each time with another fault; what came of it.

Faults are injected from here, by the model and the optimizer; the product knows nothing of them.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pyspark import TaskContext
from torch import nn

import sparkdl
from sparkdl.train import node_sums

WIDTH, CLASSES, REPLICAS, SLICES, ITERATIONS = 8, 4, 3, 2, 6


@dataclass(frozen=True)
class Fault:
    """What happens in one task of iteration ``iteration`` (from 1): once, or in every attempt.

    ``kind``: "raise" or "kill". ``folder`` notes each time that it did happen.
    """

    kind: str
    job: str
    iteration: int
    partition: int
    folder: str
    always: bool = False

    def strike(self, job: str, iteration: int) -> None:
        context = TaskContext.get()
        here = context is not None and context.partitionId() == self.partition
        if not here or (job, iteration) != (self.job, self.iteration):
            return
        note = Path(self.folder) / (f"attempt-{context.attemptNumber()}" if self.always else "once")
        try:
            os.close(os.open(note, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        raise OSError(f"injected into {self.job}")


def fail_at(job: str, iteration: int, partition: int, folder: Path, **changes) -> Fault:
    folder.mkdir(parents=True)
    return Fault(
        **{
            "kind": "raise",
            "job": job,
            "iteration": iteration,
            "partition": partition,
            "folder": str(folder),
            **changes,
        }
    )


class Model(nn.Module):
    """Batch norm and dropout; the fault strikes when the buffers have changed already."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layers(x)
        self.calls += self.training
        if self.fault:
            self.fault.strike("forward-backward", int(self.calls))
        return output


class Adam(torch.optim.Adam):
    """The fault strikes when the slice's new state has been written in place."""

    def __init__(self, params, lr: float = 1e-3, fault: Fault | None = None) -> None:
        super().__init__(params, lr=lr)
        self.fault = fault

    def step(self, closure=None):
        result = super().step(closure)
        if self.fault:
            steps = [int(state["step"]) for state in self.state.values()]
            self.fault.strike("synchronization", max(steps, default=0))
        return result


def trainer(fault: Fault | None = None, **changes) -> sparkdl.Trainer:
    values = {
        "model": partial(Model, fault),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(Adam, lr=1e-2, fault=fault),
        "batch_size": 16,
        "replicas": REPLICAS,
        "slices": SLICES,
        "stop": sparkdl.max_iteration(ITERATIONS),
        "seed": 2,
    }
    return sparkdl.Trainer(**{**values, **changes})


def frame(spark):
    generator = np.random.default_rng(1)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES))) for _ in range(60)
    ]
    records = spark.sparkContext.parallelize(rows, REPLICAS)
    return spark.createDataFrame(records, "features array<float>, label long")


FAULTS = {
    "raise in forward-backward": ("forward-backward", 3, 1, {}),
    "raise in synchronization": ("synchronization", 3, 1, {}),
    "kill in forward-backward": ("forward-backward", 4, 2, {"kind": "kill"}),
    "kill in synchronization": ("synchronization", 4, 0, {"kind": "kill"}),
}
COMPRESSED = ("forward-backward", 4, 2)
COMPRESSION = {"compression": sparkdl.PowerSGD(1)}
LASTING = {
    "lasting in forward-backward": ("forward-backward", 3, 1, {"always": True}),
    "lasting in synchronization": ("synchronization", 5, 1, {"always": True}),
    "lasting kill": ("synchronization", 2, 0, {"always": True, "kind": "kill"}),
}


def leftovers(spark) -> dict[str, object]:
    """What a fit left in Spark and on disk."""
    import innards

    context = spark.sparkContext
    context._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker follows the scheduler
    return {
        "persisted": innards.persisted(context),
        "active stages": list(context.statusTracker().getActiveStageIds()),
        "shuffles": innards.shuffles(context),
        "slabs": [
            str(p) for top in ("slabs", "spark/work") for p in Path(top).glob("**/sparkdl-*")
        ],
        "properties": [
            context.getLocalProperty(f"spark.{key}")
            for key in ("jobGroup.id", "job.description", "job.interruptOnCancel", "callSite.short")
        ],
    }


def main() -> None:
    from launch import answer, digest, session, spec

    given = spec()
    results = {}
    settings = {"spark.sparkdl.slab.dir": "slabs"}
    if given["sums"]:  # whatever the size of the model
        node_sums.BYTES_PER_SECOND = 1e-9
    with session(given["master"], **settings) as spark:
        df = frame(spark)
        spark.sparkContext.parallelize(range(4), 4).count()  # until all executors are known
        before = leftovers(spark)
        results["undisturbed"] = digest(trainer().fit(df).module)
        for name, (job, iteration, partition, changes) in FAULTS.items():
            fault = fail_at(job, iteration, partition, Path(given["notes"]) / name, **changes)
            results[name] = digest(trainer(fault).fit(df).module)
        fault = fail_at(*COMPRESSED, Path(given["notes"]) / "compressed", kind="kill")
        results["compressed"] = digest(trainer(fault, **COMPRESSION).fit(df).module)
        for name, (job, iteration, partition, changes) in LASTING.items():
            fault = fail_at(job, iteration, partition, Path(given["notes"]) / name, **changes)
            try:
                trainer(fault).fit(df)
            except Exception as error:
                results[name] = {
                    "type": type(error).__name__,
                    "message": str(error),
                    "shown alone": error.__cause__ is None and error.__suppress_context__,
                    "after": leftovers(spark),
                }
        results["undisturbed again"] = digest(trainer().fit(df).module)
        results["leftovers"] = [before, leftovers(spark)]
    answer(results)


if __name__ == "__main__":
    main()

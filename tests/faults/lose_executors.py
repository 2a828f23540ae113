"""Script: train while executors are killed, whose slab roots go with them; what came of it."""

from __future__ import annotations

import logging
import os
import shutil
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

WIDTH, CLASSES, ITERATIONS = 8, 4, 12


@dataclass(frozen=True)
class Loss:
    """What happens, once, in the task of ``partition`` when ``job`` is in iteration ``iteration``.

    "executor": its slab root is deleted and its JVM killed, as when a container ends. "slabs": the
    root alone is deleted, under a running job.
    """

    kind: str
    job: str
    iteration: int
    partition: int
    folder: str

    def strike(self, job: str, iteration: int) -> None:
        context = TaskContext.get()
        here = context is not None and context.partitionId() == self.partition
        if not here or (job, iteration) != (self.job, self.iteration):
            return
        note = Path(self.folder, f"{self.kind}-{job}-{iteration}-{self.partition}")
        try:
            os.close(os.open(note, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        for root in Path("slabs").glob("sparkdl-*"):
            shutil.rmtree(root)
        if self.kind == "executor":
            os.kill(_jvm(), signal.SIGKILL)
            time.sleep(60)


def _jvm() -> int:
    """The executor: the parent of the daemon that forked this worker."""
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(daemon.rpartition(")")[2].split()[1])


class Model(nn.Module):
    def __init__(self, losses: tuple[Loss, ...]) -> None:
        super().__init__()
        self.losses = losses
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        for loss in self.losses:
            loss.strike("forward-backward", int(self.calls))
        return self.layers(x)


class Adam(torch.optim.Adam):
    def __init__(self, params, lr: float = 1e-3, losses: tuple[Loss, ...] = ()) -> None:
        super().__init__(params, lr=lr)
        self.losses = losses

    def step(self, closure=None):
        result = super().step(closure)
        count = max((int(state["step"]) for state in self.state.values()), default=0)
        for loss in self.losses:
            loss.strike("synchronization", count)
        return result


def trainer(losses: tuple[Loss, ...] = (), **changes) -> sparkdl.Trainer:
    values = {
        "model": partial(Model, losses),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(Adam, lr=1e-2, losses=losses),
        "schedule": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=ITERATIONS),
        "batch_size": 16,
        "replicas": 2,
        "stop": sparkdl.max_iteration(ITERATIONS),
        "seed": 2,
    }
    return sparkdl.Trainer(**{**values, **changes})


def frame(spark):
    generator = np.random.default_rng(1)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES))) for _ in range(60)
    ]
    records = spark.sparkContext.parallelize(rows, 3)
    return spark.createDataFrame(records, "features array<float>, label long")


CASES = {
    "executor in forward-backward": [("executor", "forward-backward", 7, 1)],
    "executor in synchronization": [("executor", "synchronization", 6, 0)],
    "executors three times": [
        ("executor", "forward-backward", 4, 0),
        ("executor", "synchronization", 5, 1),
        ("executor", "forward-backward", 9, 1),
    ],
    "slabs": [("slabs", "forward-backward", 5, 1), ("slabs", "synchronization", 8, 0)],
}
WAYS = {
    "compressed": {"compression": sparkdl.PowerSGD(1)},
    "clip_norm": {"clip_norm": 0.5, "ema": 0.9},
}


def wait_for_executors(context, count: int) -> None:
    """Until those that were killed are replaced: a snapshot's copies need two."""
    deadline = time.monotonic() + 60
    while context._jsc.sc().getExecutorMemoryStatus().size() != count + 1:  # and the driver
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Records(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    from launch import answer, digest, session, spec

    given, log = spec(), Records()
    logging.getLogger("sparkdl").addHandler(log)
    settings = {
        "spark.sparkdl.slab.dir": "slabs",
        "spark.sparkdl.snapshot.seconds": given["snapshots"],
        "spark.task.maxFailures": "8",
    }
    results = {}
    with session(given["master"], **settings) as spark:
        df = frame(spark)
        for name in given["cases"]:
            way, _, losses = name.rpartition(": ")
            notes = Path(given["notes"], name)
            notes.mkdir(parents=True)
            log.lines.clear()
            wait_for_executors(spark.sparkContext, 2)
            struck = tuple(Loss(*loss, str(notes)) for loss in CASES[losses])
            changes = dict(WAYS.get(way, {}))
            changes["validation"] = sparkdl.Validation(df, every=sparkdl.every(4), best="loss")
            if given["checkpoints"]:
                folder = notes / "checkpoints"
                changes["checkpoint"] = sparkdl.Checkpoint(folder, every=sparkdl.every(4), keep=2)
            trained = trainer(struck, **changes).fit(df)
            results[name] = {
                "digest": digest(trained.module),
                "best": digest(trained.best.module),
                "losses": trained.history.losses,
                "validations": trained.history.validations,
                "struck": sorted(path.name for path in notes.glob("[es]*-*")),
                "log": list(log.lines),
                "persisted": spark.sparkContext._jsc.getPersistentRDDs().size(),
            }
    answer(results)


if __name__ == "__main__":
    main()

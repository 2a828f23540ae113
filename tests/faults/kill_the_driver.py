"""Script: train with checkpoints in a folder, going on from the latest; tell of each iteration.

``hold``: the iteration in whose checkpoint the driver stops, when a slice is written and the
manifest is not, until it is killed.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from launch import digest
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import sparkdl
from sparkdl.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WIDTH, CLASSES, ITERATIONS = 6, 3, 20


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


def without_norm() -> nn.Module:
    """Layers that a gang can divide."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, CLASSES)
    )


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CASES: dict[str, dict[str, Any]] = {
    "local": {"engine": "local"},
    "shuffle": {},
    "accumulate": {
        "accumulate": 2,
        "clip_norm": 0.5,
        "ema": 0.9,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
    },
    "top-k": {"compression": sparkdl.TopK(0.05), "optimizer": SGD},
    "DiLoCo": {"consistency": sparkdl.DiLoCo(inner_steps=2)},
    "local steps": {"local_steps": 2},
    "two optimizers": {
        "optimizer": {"0": SGD, "": partial(torch.optim.Adam, lr=1e-2)},
        "schedule": None,
    },
    "plateau": {
        "schedule": partial(ReduceLROnPlateau, factor=0.5, patience=0),
        "schedule_metric": "loss",
        "stop": sparkdl.max_iteration(ITERATIONS) | sparkdl.plateau("loss", 6),
        "validation": True,
    },
    "ddp": {"engine": "gang", "slices": None, "clip_norm": 0.5},
    "PowerSGD": {
        "engine": "gang",
        "slices": None,
        "compression": sparkdl.PowerSGD(1),
        "optimizer": SGD,
    },
    "zero1": {"engine": "gang", "slices": None, "strategy": "zero1", "accumulate": 2},
    "fsdp": {"engine": "gang", "slices": None, "strategy": "fsdp"},
    "tensor": {"engine": "gang", "slices": None, "strategy": "tensor", "model": without_norm},
}
"""What differs from :func:`trainer`."""


class Tell(sparkdl.Callback):
    """One line an iteration, in a file: where the run is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer, state) -> None:
        self._tell(f"start {state.iteration}")

    def on_iteration_end(self, trainer, state) -> None:
        self._tell(f"iteration {state.iteration}")

    def _tell(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")


def fit(
    data: DataFrame, case: str, folder: Path | None = None, told: Path | None = None, **how: Any
) -> dict[str, Any]:
    """Train as a case says; return the digests of the models, and the history."""
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "schedule": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=ITERATIONS),
        "batch_size": 16,
        "replicas": 2,
        "slices": 2,
        "seed": 3,
        "stop": sparkdl.max_iteration(ITERATIONS),
        "callbacks": [Tell(told)] if told else [],
        **CASES[case],
    }
    if folder is not None:
        values["checkpoint"] = sparkdl.Checkpoint(folder, every=sparkdl.every(4), keep=2)
    if "validation" in values:
        values["validation"] = sparkdl.Validation(data, every=sparkdl.every(2), best="loss")
    trained = sparkdl.Trainer(**values).fit(data, **how)
    models = [one for one in (trained, trained.ema, trained.best) if one is not None]
    return {
        "digests": [digest(one.module) for one in models],
        "losses": trained.history.losses,
        "validations": [record["metrics"] for record in trained.history.validations],
    }


def frame(spark):
    generator = np.random.default_rng(1)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES))) for _ in range(60)
    ]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


def main() -> None:
    from launch import answer, session, spec

    given = spec()
    told = Path(given["told"])
    commit = CheckpointStore.commit

    def held(self, directory, manifest, history):
        if manifest.iteration == given["hold"]:
            with told.open("a") as file:
                file.write("held\n")
            time.sleep(600)
        return commit(self, directory, manifest, history)

    if given["hold"]:
        CheckpointStore.commit = held
    with session(given["master"]) as spark:
        found = fit(frame(spark), given["case"], Path(given["checkpoints"]), told, resume="latest")
    answer(found)


if __name__ == "__main__":
    main()

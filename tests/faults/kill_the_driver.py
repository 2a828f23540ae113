"""Script: train with checkpoints in a folder, going on from the latest; tell of each iteration.

``hold``: the iteration in whose checkpoint the driver stops, when a slice is written and the
manifest is not, until it is killed.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparkdl
from sparkdl.checkpoint.store import CheckpointStore

WIDTH, CLASSES, ITERATIONS = 6, 3, 20


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


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


def trainer(folder: Path | None, engine: str, told: Path | None = None) -> sparkdl.Trainer:
    kept = None if folder is None else sparkdl.Checkpoint(folder, every=sparkdl.every(4), keep=2)
    return sparkdl.Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=ITERATIONS),
        batch_size=16,
        replicas=2,
        slices=2,
        seed=3,
        engine=engine,
        stop=sparkdl.max_iteration(ITERATIONS),
        checkpoint=kept,
        callbacks=[Tell(told)] if told else [],
    )


def frame(spark):
    generator = np.random.default_rng(1)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES))) for _ in range(60)
    ]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


def main() -> None:
    from launch import answer, digest, session, spec

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
        run = trainer(Path(given["checkpoints"]), given["engine"], told)
        trained = run.fit(frame(spark), resume="latest")
    answer({"digest": digest(trained.module), "losses": trained.history.losses})


if __name__ == "__main__":
    main()

"""Script: train a model without buffers on two hosts, in one way after another; tell of each iteration
of some, with the time."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparkdl

WIDTH, CLASSES, ITERATIONS, SEND_FROM = 64, 16, 30, 5
STRATEGIES, ROUNDING = ("ddp", "zero1", "fsdp"), ("tensor", "pipeline")


def model() -> nn.Module:
    """Its lengths are multiples of 64 bytes: the flat vector has no padding."""
    return nn.Sequential(
        nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, CLASSES)
    )


class Tell(sparkdl.Callback):
    """A line an iteration: its number, the time, and the bytes it sent."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_iteration_end(self, trainer, state) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{state.iteration} {time.time()} {state.bytes_sent}\n")


def trainer(**changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-3),
        "batch_size": 32,
        "replicas": 2,
        "stop": sparkdl.max_iteration(ITERATIONS),
        "seed": 5,
    }
    return sparkdl.Trainer(**{**values, **changes})


def frame(spark):
    generator = np.random.default_rng(7)
    rows = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES)))
        for _ in range(160)
    ]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


def main() -> None:
    from launch import answer, digest, session, spec

    given = spec()
    results = {}
    with session(given["master"], **given["settings"]) as spark:
        df = frame(spark)
        for name, how in given["runs"].items():
            told = how.pop("tell", None)
            callbacks = [] if told is None else [Tell(told)]
            trained = trainer(**how, callbacks=callbacks).fit(df)
            results[name] = {"digest": digest(trained.module), "losses": trained.history.losses}
    answer(results)


if __name__ == "__main__":
    main()

"""Script: train a model without buffers on two hosts, in one way after another; tell of each iteration
of some, with the time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import processes
from harness.hosts import DEVICE
from torch import nn

import sparkdl

WIDTH, CLASSES, ITERATIONS, SEND_FROM, HOLD_AT = 64, 16, 30, 5, 8
SOME_TIME = sparkdl.max_time(3600)
"""With it no iteration is foreseen: ranks do not compute what is not yet told."""
STRATEGIES, ROUNDING = ("ddp", "zero1", "fsdp"), ("tensor", "pipeline")


def model() -> nn.Module:
    """Its lengths are multiples of 64 bytes: the flat vector has no padding."""
    return nn.Sequential(
        nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, CLASSES)
    )


@dataclass(frozen=True)
class Tell(sparkdl.Callback):
    """A line an iteration: its number, the time, the bytes it sent, and what the cable has carried from
    this host and to it so far, with all headers.

    ``held``: training waits until the file ``PATH.go`` is there when iteration ``HOLD_AT`` is told, and
    for ``PATH.cut`` an iteration later. A cable that is cut in between is cut in the midst of that
    iteration, or just after it, however late whoever cuts it wakes up.
    """

    path: str
    held: bool = False

    def on_iteration_end(self, trainer, state) -> None:
        with Path(self.path).open("a") as file:
            told = [state.iteration, time.time(), state.bytes_sent, *carried()]
            file.write(" ".join(map(str, told)) + "\n")
        wait = {HOLD_AT: "go", HOLD_AT + 1: "cut"}.get(state.iteration)
        if self.held and wait is not None:
            processes.wait_until(Path(f"{self.path}.{wait}").exists, 120, wait)


def carried() -> tuple[int, int]:
    """Bytes that went out and came in at this host's end of the cable."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (found,) = (
        line.split(":")[1].split() for line in lines if line.strip().startswith(f"{DEVICE}:")
    )
    return int(found[8]), int(found[0])


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
            told, run = how.pop("tell", None), trainer(**how)
            if told is not None:
                run = replace(run, callbacks=[Tell(**told)], stop=run.stop | SOME_TIME)
            trained = run.fit(df)
            results[name] = {"digest": digest(trained.module), "losses": trained.history.losses}
    answer(results)


if __name__ == "__main__":
    main()

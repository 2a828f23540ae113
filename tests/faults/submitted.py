"""Script, as a user submits it: it needs sparkdl, and nothing of the tests."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sparkdl

ITERATIONS, PAUSE = 24, 12


class Steps(sparkdl.Callback):
    """A file with a line an iteration; after one of them it waits until a file "go" lies beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_iteration_end(self, trainer, state) -> None:
        with (self.folder / "steps").open("a") as file:
            file.write(f"{state.iteration}\n")
        deadline = time.monotonic() + 120
        while state.iteration == PAUSE and not (self.folder / "go").exists():
            assert time.monotonic() < deadline, "no go"
            time.sleep(0.05)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
    )


def outcome(spark, callbacks=()) -> dict:
    """What a fit gives: a digest of the weights and buffers, and the losses."""
    generator = np.random.default_rng(1)
    rows = [(generator.normal(size=8).tolist(), int(generator.integers(4))) for _ in range(96)]
    samples = spark.sparkContext.parallelize(rows, 2)
    trained = sparkdl.Trainer(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        batch_size=24,
        replicas=2,
        stop=sparkdl.max_iteration(ITERATIONS),
        seed=2,
        callbacks=list(callbacks),
    ).fit(spark.createDataFrame(samples, "features array<float>, label long"))
    values = [value.numpy().tobytes() for value in trained.module.state_dict().values()]
    digest = hashlib.sha256(b"".join(values)).hexdigest()
    return {"digest": digest, "losses": trained.history.losses}


def main() -> None:
    spark = sparkdl.session()
    context = spark.sparkContext
    files = context.runJob(context.parallelize([0], 1), lambda _: [sparkdl.__file__])
    result = outcome(spark, [Steps(Path(sys.argv[1]))])
    print("RESULT " + json.dumps({**result, "file": files[0]}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()

"""Script: train on a Parquet file on each master given; the model's digest, and how bytes went.

The model draws on everything that could depend on the place of execution: dropout's random numbers,
batch norm's running statistics, Adam's state, the order of sums.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import sparkdl
from sparkdl.engines.shuffle.engine import ShuffleEngine

WIDTH, CLASSES = 8, 4


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, CLASSES)
    )


def trainer(**changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 32,
        "replicas": 4,
        "slices": 3,
        "stop": sparkdl.max_iteration(12),
        "seed": 11,
    }
    return sparkdl.Trainer(**{**values, **changes})


def main() -> None:
    from launch import answer, digest, session, spec

    given = spec()
    roots = set()
    step = ShuffleEngine.run

    def noted(self, iteration, then=()):
        result = step(self, iteration)
        states = self._versions.newest.states
        roots.update(self._placement.replica_nodes, [state.node_id for state in states])
        return result

    ShuffleEngine.run = noted
    results = {}
    for master in given["masters"]:
        roots.clear()
        with session(master, **given["settings"]) as spark:
            trained = trainer().fit(spark.read.parquet(given["parquet"]))
        results[master] = {
            "digest": digest(trained.module),
            "losses": trained.history.losses,
            "bytes_sent": [record["bytes_sent"] for record in trained.history],
            "roots": len(roots),
        }
    answer(results)


if __name__ == "__main__":
    main()

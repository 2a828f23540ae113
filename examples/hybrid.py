"""Hybrid parallelism: four ranks, in a mesh of two by two.

With ``mesh={"data": 2, "pipe": 2}`` ranks 0 and 1 are one pipeline, ranks 2 and 3 another; each takes
half of every mini-batch, and the gradients of the two are summed. With "shard" instead of "pipe"
weights are gathered within a pair only. With ``{"shard": 2, "tensor": 2}`` a pair computes each layer
together, and the two pairs share its weights. All are compared with one process here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_breast_cancer
from torch import nn

import sparkdl


def tumours(spark: SparkSession) -> DataFrame:
    """30 measurements of each, standardised, and whether it is benign."""
    found = load_breast_cancer()
    scaled = (found.data - found.data.mean(0)) / found.data.std(0)
    rows = [(x.tolist(), int(y)) for x, y in zip(scaled, found.target, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint")


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 2),
    )


def main(spark: SparkSession, epochs: int = 4) -> dict[str, float]:
    train, test = tumours(spark).randomSplit([0.8, 0.2], seed=1)
    alone = sparkdl.Trainer(
        model=layers,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        batch_size=32,
        replicas=4,
        engine="local",
        stop=sparkdl.max_epoch(epochs),
    )
    losses = alone.fit(train).history.losses
    for mesh in ({"data": 2, "pipe": 2}, {"data": 2, "shard": 2}, {"shard": 2, "tensor": 2}):
        trained = replace(alone, engine="gang", mesh=mesh).fit(train)
        pairs = zip(losses, trained.history.losses, strict=True)
        apart = max(abs(one - other) for one, other in pairs)
        print(f"{mesh}: the losses are those of one process to {apart:.0e}")
    result = trained.evaluate(test, metrics=["accuracy"])
    print(f"test accuracy {result['accuracy']:.3f}")
    return {**result, "apart": apart}


if __name__ == "__main__":
    session = sparkdl.session("local[4]")
    try:
        main(session)
    finally:
        session.stop()

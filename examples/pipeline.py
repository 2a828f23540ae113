"""A model in two stages: the first half of the layers on one rank, the second half on another.

``strategy="pipeline"`` sends micro-batches through the ranks with torch's pipelining: while the second
rank computes with one, the first has begun with the next. sparkdl finds out where to cut the model, an
``nn.Sequential`` or any other whose forward calls modules, so that both have equal work. Everything
else is as ever.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdl


def digits_frame(spark: SparkSession) -> DataFrame:
    """64 pixels from 0 to 16, row by row, and the digit."""
    pixels, labels = load_digits(return_X_y=True)
    rows = [(x.tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint")


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def main(spark: SparkSession, epochs: int = 2) -> dict[str, float]:
    train, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=1)
    trainer = sparkdl.Trainer(
        model=convolutions,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        batch_size=64,
        replicas=2,  # the ranks of the pipeline; each reads half of the samples
        engine="gang",
        strategy=sparkdl.Pipeline(micro_batches=4),  # "pipeline" does the same
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)
    result = trained.evaluate(test, metrics=["accuracy"])
    print(f"test accuracy {result['accuracy']:.3f}, of one module: {len(trained.module)} layers")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

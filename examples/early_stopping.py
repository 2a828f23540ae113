"""Training that stops by itself, keeps the best model, and goes on after a break.

After each epoch the model is scored on held-out digits, and a checkpoint is written. The first run is
cut short, as by a crash; the second goes on from its checkpoint until two epochs in a row brought
little.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
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


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def main(spark: SparkSession, epochs: int = 12) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return run(spark, folder, epochs)


def run(spark: SparkSession, folder: str, epochs: int) -> dict[str, float]:
    train, val, test = digits_frame(spark).randomSplit([0.6, 0.2, 0.2], seed=1)

    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        batch_size=128,
        stop=sparkdl.max_epoch(epochs) | sparkdl.plateau("accuracy", patience=2, min_delta=0.01),
        validation=sparkdl.Validation(val, metrics=["accuracy"], best="accuracy"),
        checkpoint=sparkdl.Checkpoint(folder, every=sparkdl.every_epoch(), keep=2),
    )
    replace(trainer, stop=sparkdl.max_epoch(2)).fit(train)
    trained = trainer.fit(train, resume="latest")  # the same program again would do

    for record in trained.history.validations:
        print(f"epoch {record['epoch']}: accuracy {record['metrics']['accuracy']:.3f}")
    result = trained.best.evaluate(test, metrics=["accuracy"])
    print(f"stopped after {len(trained.history.epochs())} epochs of at most {epochs}; ", end="")
    print(f"the best model's accuracy on {test.count()} other digits: {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

"""A DataFrame in, a trained PyTorch model out: the base that the other examples vary.

A convolutional network learns 8x8 handwritten digits from an array column. Every iteration is an
ordinary Spark job over two replicas of the model.
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


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main(spark: SparkSession, epochs: int = 3) -> dict[str, float]:
    train, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=1)

    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        batch_size=64,
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)

    result = trained.evaluate(test, metrics=["accuracy"])
    predicted = trained.transform(test, postprocess=partial(torch.argmax, dim=1))
    predicted.select("label", "prediction").show(5)
    print(f"{len(trained.history)} iterations, test accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

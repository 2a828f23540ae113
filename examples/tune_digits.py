"""A search for a good learning rate, width and dropout: trials side by side, one Spark task each.

The digits are read once. Each trial trains a small network, is scored on held-out digits after each
epoch, and is stopped by Optuna if others were better at the same time. The best model is used like
the result of any fit.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdl
from sparkdl import tune


def digits_frame(spark: SparkSession) -> DataFrame:
    """64 pixels from 0 to 16, row by row, and the digit."""
    pixels, labels = load_digits(return_X_y=True)
    rows = [(x.tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint")


def make_model(width: int = 16, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))


def main(spark: SparkSession, trials: int = 6) -> dict[str, float]:
    train, val, test = digits_frame(spark).randomSplit([0.6, 0.2, 0.2], seed=1)
    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch_size=64,
        stop=sparkdl.max_epoch(8),
        validation=sparkdl.Validation(val, metrics=["accuracy"], best="accuracy"),
    )
    space = {
        "optimizer.lr": tune.loguniform(1e-4, 1e-1),
        "model.width": [16, 32, 64, 128],
        "model.dropout": tune.uniform(0.0, 0.5),
    }
    result = tune.search(
        trainer, train, space, metric="accuracy", trials=trials, algorithm="optuna", parallel=2
    )
    shown = ["optimizer.lr", "model.width", "model.dropout", "accuracy", "status", "epochs"]
    print(result.to_pandas()[shown].sort_values("accuracy", ascending=False).to_string())
    found = result.best_model.evaluate(test, metrics=["accuracy"])
    print(f"the best model's accuracy on {test.count()} other digits: {found['accuracy']:.3f}")
    return found


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

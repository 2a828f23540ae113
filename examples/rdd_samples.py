"""RDDs instead of DataFrames: samples are Python objects, for data that fits no column.

``fit`` takes an RDD of :class:`sparkdl.Sample` (or of ``(features, label)`` pairs), and ``predict``
gives an RDD beside an RDD, in the same order. The data: 569 breast tumours, benign or malignant.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_breast_cancer
from torch import nn

import sparkdl


def make_model() -> nn.Module:
    """30 measurements -> one logit a tumour, positive for benign."""
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


def main(spark: SparkSession, epochs: int = 4) -> dict[str, float]:
    measured, benign = load_breast_cancer(return_X_y=True)
    measured = (measured - measured.mean(axis=0)) / measured.std(axis=0)
    samples = [sparkdl.Sample(x, float(y)) for x, y in zip(measured, benign, strict=True)]
    train = spark.sparkContext.parallelize(samples[:400], 2)
    test = spark.sparkContext.parallelize(samples[400:], 2)

    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.BCEWithLogitsLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        batch_size=50,
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)

    result = trained.evaluate(test, metrics=["accuracy"])
    chances = trained.predict(test, postprocess=torch.sigmoid)
    missed = test.zip(chances).filter(lambda pair: (pair[1] > 0.5) != (pair[0].label > 0.5))
    print(f"{test.count()} held-out tumours: accuracy {result['accuracy']:.3f}")
    for sample, chance in missed.take(3):
        print(f"  taken for benign with {chance:.0%}, label {sample.label:.0f}")
    return {**result, "missed": missed.count()}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

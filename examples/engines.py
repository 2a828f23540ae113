"""The same training on each engine: one word changes.

``shuffle`` trains with Spark jobs alone and loses nothing with an executor; ``gang`` holds all replicas
at once and lets torch.distributed carry the gradients, which is faster where steps are short;
``local`` is this process, for debugging. Two replicas give the same weights on all three.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdl

ENGINES = ("local", "shuffle", "gang")


def digits_frame(spark: SparkSession) -> DataFrame:
    """64 pixels from 0 to 16, row by row, and the digit."""
    pixels, labels = load_digits(return_X_y=True)
    rows = [(x.tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def main(spark: SparkSession, epochs: int = 2) -> dict[str, float]:
    train, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=1)
    models = []
    for engine in ENGINES:
        trainer = sparkdl.Trainer(
            model=make_model,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=3e-3),
            batch_size=64,
            replicas=2,
            slices=None if engine == "gang" else 2,
            engine=engine,
            stop=sparkdl.max_epoch(epochs),
        )
        started = time.perf_counter()
        trained = trainer.fit(train)
        seconds = time.perf_counter() - started
        result = trained.evaluate(test, metrics=["accuracy"])
        print(f"{engine:8} {seconds:5.1f} s, test accuracy {result['accuracy']:.3f}")
        models.append(trained.module.state_dict())
    same = sum(all(torch.equal(models[0][key], m[key]) for key in m) for m in models) / len(models)
    print(f"with the same weights: {same:.3f} of the engines")
    return {**result, "same weights": same}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

"""A model that goes on learning from a stream: ``partial_fit`` in ``foreachBatch``.

Handwritten digits arrive in a folder as Parquet files. Structured Streaming takes them in batches, and
the model makes one pass over each; weights, optimizer state and history go on from batch to batch.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdl

SCHEMA = "features array<float>, label bigint"


def digits_frame(spark: SparkSession) -> DataFrame:
    """64 pixels from 0 to 16, row by row, and the digit."""
    pixels, labels = load_digits(return_X_y=True)
    rows = [(x.tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, SCHEMA)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main(spark: SparkSession, batches: int = 2) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return run(spark, Path(folder), batches)


def run(spark: SparkSession, folder: Path, batches: int) -> dict[str, float]:
    arriving, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=1)
    arriving.repartition(batches).write.parquet(str(folder / "arriving"))
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    stream = reader.parquet(str(folder / "arriving"))

    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        batch_size=64,
        checkpoint=sparkdl.Checkpoint(folder / "model", keep=1),  # one at the end of each batch
    )
    results: list[dict[str, float]] = []

    def learn(batch: DataFrame, number: int) -> None:
        if batch.isEmpty():
            return
        # "latest" is read in the first call: a program that starts again goes on.
        trained = trainer.partial_fit(batch, resume="latest", batch=number)
        results.append(trained.evaluate(test, metrics=["accuracy"]))
        seen = sum(epoch["samples"] for epoch in trained.history.epochs())
        print(f"batch {number}: {seen} digits seen, accuracy {results[-1]['accuracy']:.3f}")

    query = (
        stream.writeStream.foreachBatch(learn)
        .option("checkpointLocation", str(folder / "progress"))
        .trigger(availableNow=True)  # all that is there, and stop; leave it out to go on for ever
        .start()
    )
    query.awaitTermination()
    return results[-1]


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

"""The whole way in one Spark program: CSV -> SQL features -> training -> predictions as Parquet.

Regression on scikit-learn's diabetes data (442 patients, ten measurements, the disease's progress
after a year). What differs from digits.py is what surrounds ``fit``: nothing leaves Spark.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_diabetes
from torch import nn

import sparkdl

COLUMNS = ["age", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6", "bmi_bp", "is_male"]


def write_csv(folder: Path) -> str:
    """The raw table, as another system might have left it."""
    table = load_diabetes(as_frame=True, scaled=False).frame
    path = str(folder / "patients.csv")
    table.to_csv(path, index_label="id")
    return path


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(len(COLUMNS), 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


def main(spark: SparkSession, epochs: int = 5) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return run(spark, Path(folder), epochs)


def run(spark: SparkSession, folder: Path, epochs: int) -> dict[str, float]:
    raw = spark.read.csv(write_csv(folder), header=True, inferSchema=True)
    raw.createOrReplaceTempView("raw")
    spark.sql("""
        SELECT *, bmi * bp AS bmi_bp, sex - 1 AS is_male, pmod(hash(id), 5) = 0 AS held_out
        FROM raw
    """).createOrReplaceTempView("patients")

    # Standardised by mean and deviation of the training rows, so that nothing leaks from the test.
    names = [*COLUMNS, "target"]
    moments = ", ".join(f"avg({c}) AS {c}_mean, stddev({c}) AS {c}_dev" for c in names)
    *features, label = [f"({c} - {c}_mean) / {c}_dev" for c in names]
    prepared = spark.sql(f"""
        WITH moments AS (SELECT {moments} FROM patients WHERE NOT held_out)
        SELECT id, held_out, array({", ".join(features)}) AS features, {label} AS label
        FROM patients CROSS JOIN moments
    """)

    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.AdamW, lr=2e-2, weight_decay=0.1),
        batch_size=64,
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(prepared.where("NOT held_out"))

    path = str(folder / "predictions.parquet")
    trained.transform(prepared.where("held_out")).write.parquet(path)
    written = spark.read.parquet(path)
    errors = written.crossJoin(written.selectExpr("avg(label) AS mean")).selectExpr(
        "count(*) AS rows", "1 - sum(pow(label - prediction, 2)) / sum(pow(label - mean, 2)) AS r2"
    )
    result = errors.first().asDict()
    print(f"{result['rows']} held-out patients: R2 {result['r2']:.3f} (predicting the mean: 0)")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

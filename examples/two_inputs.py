"""A model with two inputs: ``features`` names two columns, and the model is called with both.

Wines from three growers. ``measurements`` is an array of floats; ``colour`` is an integer, the
decile of the colour's intensity, which stays an integer and goes into an embedding.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_wine
from torch import nn

import sparkdl


def wine_frame(spark: SparkSession) -> DataFrame:
    """measurements array<double> of 12 standardised values, colour int from 0 to 9, label int."""
    wine = load_wine(as_frame=True).frame.rename(columns={"target": "label"})
    names = [c for c in wine.columns if c not in ("color_intensity", "label")]
    wine[names] = (wine[names] - wine[names].mean()) / wine[names].std()
    wine.columns = [c.replace("/", "_") for c in wine.columns]
    measured = ", ".join(c.replace("/", "_") for c in names)
    return spark.createDataFrame(wine).selectExpr(
        f"array({measured}) AS measurements",
        "int(ntile(10) OVER (ORDER BY color_intensity)) - 1 AS colour",
        "int(label) AS label",
    )


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.colours = nn.Embedding(10, 4)
        self.scores = nn.Sequential(nn.Linear(12 + 4, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, measurements: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.cat([measurements, self.colours(colour)], dim=1))


def main(spark: SparkSession, epochs: int = 6) -> dict[str, float]:
    train, test = wine_frame(spark).randomSplit([0.7, 0.3], seed=1)

    trainer = sparkdl.Trainer(
        model=TwoInputs,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        features=["measurements", "colour"],  # the model is called with both, in this order
        batch_size=32,
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)

    result = trained.evaluate(test, metrics=["accuracy"])
    print(f"{test.count()} held-out wines: accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

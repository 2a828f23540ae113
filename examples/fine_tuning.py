"""Fine-tuning: a network trained on the digits 0 to 4 learns 5 to 9 with a new head.

The convolutions keep the first training's weights; only the head learns, from few images, and what
counts is a moving average of its weights.
"""

from __future__ import annotations

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


class Network(nn.Module):
    """One score for each of five classes; ``head`` names the layer that gives them."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.heads = nn.ModuleDict({head: nn.Linear(512, 5)})

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return next(iter(self.heads.values()))(self.body(pixels))


def main(spark: SparkSession, epochs: int = 2) -> dict[str, float]:
    digits = digits_frame(spark)
    high = digits.where("label >= 5").selectExpr("features", "label - 5 AS label")
    few, test = high.randomSplit([0.2, 0.8], seed=1)

    trainer = sparkdl.Trainer(
        model=partial(Network, "low"),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        batch_size=64,
        stop=sparkdl.max_epoch(epochs),
    )
    pretrained = trainer.fit(digits.where("label < 5"))

    tuning = replace(
        trainer,
        model=partial(Network, "high"),
        weights=pretrained.module.state_dict(),
        strict_weights=False,  # its old head is passed over, and the new one starts at random
        freeze=["body"],
        ema=0.9,
        stop=sparkdl.max_epoch(5 * epochs),
    )
    tuned = tuning.fit(few)

    result = tuned.ema.evaluate(test, metrics=["accuracy"])
    print(f"{few.count()} new digits: accuracy {result['accuracy']:.3f} on the others")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

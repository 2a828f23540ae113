"""Parts of each layer on different ranks: a transformer whose wide layers no rank has whole.

``strategy="tensor"`` lets torch cut layers over the ranks: of two linear layers that follow each other
the first computes half of its outputs on each of two ranks, the second takes these as its inputs, and
the ranks add up what comes out. sparkdl finds such pairs, in torch's transformer layers too; a plan
names others. Everything else is as ever.
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
    rows = [((x / 16).tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint")


class Rows(nn.Module):
    """A picture is a sequence of eight rows of eight pixels."""

    def __init__(self, width: int = 32, inner: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, inner, 0.0, batch_first=True) for _ in range(2))
        )
        self.out = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        rows = self.embed(pixels.view(-1, 8, 8)) + self.place
        return self.out(self.blocks(rows).mean(1))


def main(spark: SparkSession, epochs: int = 4) -> dict[str, float]:
    train, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=1)
    trainer = sparkdl.Trainer(
        model=Rows,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        batch_size=64,
        replicas=2,  # the ranks that compute each layer together
        engine="gang",
        strategy=sparkdl.Tensor(plan={"blocks.*.linear1": "column", "blocks.*.linear2": "row"}),
        stop=sparkdl.max_epoch(epochs),  # "tensor" cuts the same layers
    )
    trained = trainer.fit(train)
    result = trained.evaluate(test, metrics=["accuracy"])
    wide = trained.module.blocks[0].linear1.weight
    print(f"test accuracy {result['accuracy']:.3f}; a wide layer is whole again: {[*wide.shape]}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

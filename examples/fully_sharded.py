"""A model that is cut over the ranks: weights, gradients and optimizer state, half on each of two.

``strategy="fsdp"`` is torch's ``fully_shard`` inside a gang. The model's blocks are gathered one at a
time while they compute. Everything else is as ever: the same trainer, checkpoints, and a plain module
at the end, which predicts anywhere.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdl

WIDTH, BLOCKS = 256, 4


def digits_frame(spark: SparkSession) -> DataFrame:
    """64 pixels from 0 to 16, row by row, and the digit."""
    pixels, labels = load_digits(return_X_y=True)
    rows = [(x.tolist(), int(y)) for x, y in zip(pixels, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint")


class Block(nn.Module):
    """Normalise, widen, narrow, add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Digits(nn.Module):
    """Blocks in a row; the pixels are brought to [0, 1] first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x / 16)))


def main(spark: SparkSession, epochs: int = 2) -> dict[str, float]:
    train, test = digits_frame(spark).randomSplit([0.8, 0.2], seed=1)
    trainer = sparkdl.Trainer(
        model=Digits,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        batch_size=64,
        replicas=2,
        engine="gang",
        strategy=sparkdl.FSDP(units=["blocks.*"]),  # "fsdp" finds the same units by itself
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)
    result = trained.evaluate(test, metrics=["accuracy"])
    count = sum(p.numel() for p in trained.module.parameters())
    print(f"{count / 1e6:.1f} M parameters, half of them on each rank")
    print(f"test accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

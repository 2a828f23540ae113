"""Images: a column of encoded bytes, decoded on the executors, and moved about while training.

scikit-learn's digits as 1,797 PNG files in a binary column, which is what
``spark.read.format("binaryFile")`` gives for a folder of images.
"""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import torch
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdl


def png(pixels: np.ndarray) -> bytes:
    """8 x 8 numbers from 0 to 16 -> a grey PNG."""
    file = io.BytesIO()
    Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def digit_frame(spark: SparkSession) -> DataFrame:
    """image binary (a PNG), label int."""
    digits = load_digits()
    rows = [(png(x), int(y)) for x, y in zip(digits.images, digits.target, strict=True)]
    return spark.createDataFrame(rows, "image binary, label int")


def move(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """By up to one pixel in each direction; ``image`` is (1, H, W)."""
    down, right = rng.integers(0, 3, 2)
    height, width = image.shape[1:]
    return np.pad(image, ((0, 0), (1, 1), (1, 1)))[:, down : down + height, right : right + width]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main(spark: SparkSession, epochs: int = 7) -> dict[str, float]:
    train, test = digit_frame(spark).randomSplit([0.8, 0.2], seed=1)

    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        features="image",
        columns={"image": sparkdl.Image(mode="L", size=(8, 8))},  # -> float (1, 8, 8) in [0, 1]
        augment=move,  # each sample, anew in each epoch; never while evaluating
        batch_size=128,
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)

    result = trained.evaluate(test, metrics=["accuracy"])
    print(f"{test.count()} held-out digits: accuracy {result['accuracy']:.3f}")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()

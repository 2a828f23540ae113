"""The model and the data of the example ``conf/digits.yaml``."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import parquet
from torch import nn

from sparkdl.errors import ParameterError


class ConvNet(nn.Module):
    """A small convolutional network for 8x8 grey images.

    The input is (batch, 64) pixels from 0 to 16, row by row; the output is (batch, 10), a score for
    each digit.
    """

    def __init__(self, width: int = 32, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.scores = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * width, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        images = pixels.reshape(-1, 1, 8, 8) / 16
        return self.scores(self.features(images))


def convnet(width: int = 32, dropout: float = 0.5) -> nn.Module:
    """Return a :class:`ConvNet`."""
    return ConvNet(width, dropout)


def write(train: Path, test: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits.

    The columns are features array<float> (64 pixels from 0 to 16, row by row) and label bigint. The
    same four fifths are for training each time."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ParameterError(
            "the digits come with scikit-learn: pip install scikit-learn."
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    for path, features, label in ((train, parts[0], parts[2]), (test, parts[1], parts[3])):
        rows = {"features": list(features.astype("float32")), "label": label.astype("int64")}
        table = pa.table({name: pa.array(values) for name, values in rows.items()})
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        parquet.write_table(table, unfinished)
        unfinished.replace(path)

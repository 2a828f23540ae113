"""Models that configurations name, such as ``jobs.models:digits_convnet``.

Each is a function annotated ``-> nn.Module``, so that a saved model needs no pickle to be loaded.
"""

from __future__ import annotations

import torch
from torch import nn


class DigitsConvNet(nn.Module):
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


def digits_convnet(width: int = 32, dropout: float = 0.5) -> nn.Module:
    """Return a :class:`DigitsConvNet`."""
    return DigitsConvNet(width, dropout)

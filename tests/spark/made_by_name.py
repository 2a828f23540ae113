"""A model that is built by its name, in this process and in others."""

from __future__ import annotations

import torch
from torch import nn


class Waves(nn.Module):
    """Statistics, random features that are in no state_dict, a part that does not train."""

    def __init__(self, width: int = 6, names: dict | None = None) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(width, 4), persistent=False)
        self.frozen, self.norm, self.names = nn.Linear(4, 4), nn.BatchNorm1d(4), names
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.cos(x @ self.angles)
        return torch.sigmoid(self.head(self.norm(self.frozen(waves))))[:, 0]


def perceptron(inputs: int = 4, hidden: int = 8, outputs: int = 3) -> nn.Module:
    """Return a small classifier or regressor."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

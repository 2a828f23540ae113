"""The squared error, for a model with one number a row in whatever shape."""

from __future__ import annotations

import torch
from torch import nn


class SquaredError(nn.MSELoss):
    """The mean squared error, also of an output (rows, 1) and a label (rows,)."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the error. An output of one number a row is compared with the number itself."""
        if input.ndim == target.ndim + 1 and input.shape[-1] == 1:
            input = input.squeeze(-1)
        return super().forward(input, target)

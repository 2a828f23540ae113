"""Classes and probabilities, computed from the output of a classifier on the executors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ClassScores:
    """The ``postprocess`` of a classifier: raw prediction, probability and class, side by side.

    The result is float64 of shape (rows, 2 * classes + 1).
    """

    probability: bool = False  # the output is one number, the probability of class 1
    thresholds: tuple[float, ...] = ()  # the largest probability / threshold is predicted; (): none

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        values = output.double()
        if values.ndim == 1 or values.shape[1] == 1:
            values = values.reshape(len(values))
            if self.probability:
                raw = probabilities = torch.stack([1 - values, values], 1)
            else:
                raw = torch.stack([-values, values], 1)
                probabilities = raw.sigmoid()
        else:
            raw, probabilities = values, values.softmax(1)
        scaled = probabilities
        if self.thresholds:
            scaled = probabilities / torch.tensor(self.thresholds, dtype=torch.float64)
        return torch.cat([raw, probabilities, scaled.argmax(1, keepdim=True)], 1)

"""Layers that remember rows in buffers, each with another rule for how replicas agree on it."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from pyspark import cloudpickle
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class Seen(nn.Module):
    """What it remembers is the same however rows are divided, by the rules of its class."""

    sparkdl_buffers: ClassVar[dict[str, Any]] = {
        **{"low": "min", "high": "max", "rows": "sum", "mass": "sum", "signs": "max"}
    }

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((width,), float("inf")))
        self.register_buffer("high", torch.full((width,), float("-inf"), dtype=torch.float64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mass", torch.zeros(()))
        self.register_buffer("signs", torch.zeros(width, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            rows = x.detach()
            self.low = torch.minimum(self.low, rows.amin(0).to(self.low))
            self.high.copy_(torch.maximum(self.high, rows.amax(0).to(self.high)))
            self.rows += len(rows)
            self.mass.add_(float(len(rows)))
            self.signs.logical_or_((rows > 2.0).any(0))
        return x


def spread(values: torch.Tensor) -> torch.Tensor:
    """The median of the replicas, and a random draw, which is seeded."""
    return values.median(0).values + 0.01 * torch.rand(())


class Codes(Seen):
    """It has as well what depends on how rows are divided."""

    sparkdl_buffers: ClassVar[dict[str, Any]] = {
        **Seen.sparkdl_buffers,
        **{"codes": "first", "centre": "mean", "middle": spread},
    }

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for name in ("codes", "centre", "middle"):
            self.register_buffer(name, torch.zeros(width))
        self.register_buffer("silent", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for name in ("codes", "centre", "middle", "silent"):
                getattr(self, name).lerp_(x.detach()[-1].to(self.codes), 0.3)
        return super().forward(x) - 0.1 * (self.codes + self.centre + self.middle).to(x)

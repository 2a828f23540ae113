"""An optimizer that draws random numbers."""

from __future__ import annotations

import sys

import torch
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class Noisy(torch.optim.SGD):
    """What one element gets depends on how many are drawn for before it."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(torch.randn_like(p), alpha=0.01)

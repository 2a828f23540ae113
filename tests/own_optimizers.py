"""Optimizers as users have them that torch has not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from pyspark import cloudpickle
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): z walks, x is the mean of z, and gradients are taken
    at y between them. ``eval()`` puts x in place of y. Its count of steps is in the group."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            part = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], part)
            group["training"] = training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / group["beta"])
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp_(z, 1 / group["k"]).lerp_(z, 1 - group["beta"]))


class Rounded(torch.optim.Optimizer):
    """SGD whose momentum has 8 bits, scaled by blocks of 256, in tensors of 4,096 elements or more."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                moved = self.state[p].setdefault("moved", torch.zeros_like(p))
                moved.mul_(0.9).add_(p.grad)
                p.sub_(moved, alpha=group["lr"])
                if p.numel() >= 4096:
                    for block in moved.view(-1).split(256):
                        scale = block.abs().max() / 127
                        block.copy_((block / scale).round_().mul_(scale))


class OddSizes(nn.Module):
    """Odd sizes, a scalar, a frozen parameter, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 30, bias=False)


def by_role(kind: type[torch.optim.Optimizer], **weights: Any) -> Callable[..., Any]:
    """A function of the module that forms two groups: ``weights`` for weights, biases without."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        named = dict(module.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        others = [p for name, p in named.items() if not name.endswith("bias")]
        return kind([{"params": biases, "lr": 0.01}, {"params": others, **weights}], lr=0.1)

    return make

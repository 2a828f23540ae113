"""Models, losses and optimizers of the parity tests.

Workers of Spark do not have the tests on their path: what is defined here is pickled by value.

Activations are smooth and data are generic on purpose. With ReLU or sparse data some gradients are
exactly or nearly zero, and Adam's first steps are sign(gradient) * lr: one last bit of a sum would
then decide about a full step, in plain PyTorch as in any other order of summation.
"""

from __future__ import annotations

import sys

import torch
from pyspark import cloudpickle
from remembering import Codes
from torch import nn

WIDTH, CLASSES = 6, 3


def adamw_in_two_groups(module: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not and learn faster."""
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 2e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99))


def frozen_mlp() -> nn.Module:
    layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
    module = nn.Sequential(*layers).double()
    module[2].requires_grad_(False)
    module[0].bias.requires_grad_(False)
    return module


class Tied(nn.Module):
    """The decoder is the encoder, transposed; one weight is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        back = torch.tanh(torch.nn.functional.linear(hidden, self.first.weight.t()))
        return self.out(torch.tanh(self.second(back)))


class Alternating(nn.Module):
    """Uses another head each iteration; ``unused`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 8)
        self.heads = nn.ModuleList([nn.Linear(8, CLASSES) for _ in range(2)])
        self.unused = nn.Linear(8, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.heads[int(self.calls) // 2 % 2]
        if self.training:
            self.calls += 1
        return head(torch.tanh(self.body(x)))


class Routed(nn.Module):
    """An expert sees a few of the samples, so that most replicas have no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, CLASSES)
        self.expert = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.tanh(self.body(x))
        chosen = x[:, 0] > 1.2
        if chosen.any():
            output = output.clone()
            output[chosen] = output[chosen] + torch.tanh(self.expert(x[chosen]))
        return output


def batch_normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, 7),
        nn.BatchNorm1d(7, momentum=None),
        nn.Linear(7, CLASSES),
    )


def batch_normed_fp64() -> nn.Module:
    return batch_normed().double()


class Counting(nn.Module):
    """Buffers that are no floats, one of them replaced and not written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("rows", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(CLASSES, 5, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(5, dtype=torch.uint8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.out(x)
        if self.training:
            self.rows[1] += len(x)
            self.seen[output[0].argmax(), int(self.calls) % 5] = True
            self.calls = self.calls + 1
        return output


def remembering() -> nn.Module:
    return nn.Sequential(Codes(WIDTH), nn.Linear(WIDTH, CLASSES)).double()


class Noisy(nn.Module):
    """Its gradient shows which elements dropout kept: the same ones for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.weight).expand(len(x), 64)


def dropped_out() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.4), nn.Linear(32, CLASSES), nn.Dropout(0.1)
    )


class TwoInputs(nn.Module):
    """Numbers and a category."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Bilinear(WIDTH, 4, CLASSES)

    def forward(self, x: torch.Tensor, category: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x, self.embedding(category)))


class Low(nn.Module):
    """bf16 parameters; samples arrive in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, CLASSES, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.bfloat16()).float())
        return self.last(torch.tanh(hidden).bfloat16()).float()


def sum_of_rows(output: torch.Tensor) -> torch.Tensor:
    """The mean over the samples of the sum of a row."""
    return output.sum(dim=1).mean()


cloudpickle.register_pickle_by_value(sys.modules[__name__])

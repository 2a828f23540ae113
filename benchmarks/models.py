"""The models that are timed, each with its samples, loss, optimizer and global batches."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import nn, optim
from work import Arrays, Work


def mlp(*widths: int) -> nn.Module:
    """Perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    """LeNet-5 as BigDL has it: 22,278 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 12, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(192, 100), nn.Tanh(), nn.Linear(100, 10)),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)),
            *(nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Sequential()
        if inputs != outputs:
            self.around.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.around.append(nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def resnet() -> nn.Module:
    """ResNet-18 for images of 32x32: 11.2 M parameters."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        Residual(
            outputs if second else inputs, outputs, 2 if outputs > inputs and not second else 1
        )
        for inputs, outputs in pairwise(widths)
        for second in (False, True)
    ]
    return nn.Sequential(
        *(nn.Unflatten(1, (3, 32, 32)), nn.Conv2d(3, 64, 3, 1, 1, bias=False)),
        *(nn.BatchNorm2d(64), nn.ReLU(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)),
    )


TOKENS, LENGTH = 24_000, 128


class Encoder(nn.Module):
    """Transformer encoder, 4 layers of width 512, that classifies a text: 25 M parameters."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


USERS, ITEMS = 138_493, 26_744
"""Of MovieLens-20M."""


class NCF(nn.Module):
    """Neural collaborative filtering (He et al., 2017), sparse tables: 20 M parameters."""

    def __init__(self, product: int = 56, width: int = 64) -> None:
        super().__init__()
        self.product, size = product, product + width
        self.tables = nn.ModuleDict(
            {
                "user": nn.Embedding(USERS, size, sparse=True),
                "item": nn.Embedding(ITEMS, size, sparse=True),
            }
        )
        self.tower = nn.Sequential(mlp(2 * width, width, width // 2, width // 4), nn.ReLU())
        self.head = nn.Linear(product + width // 4, 1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        users = self.tables["user"](pairs[:, 0])
        items = self.tables["item"](pairs[:, 1])
        product = users[:, : self.product] * items[:, : self.product]
        tower = self.tower(torch.cat([users[:, self.product :], items[:, self.product :]], 1))
        return self.head(torch.cat([product, tower], 1)).squeeze(1)


def square(width: int, depth: int) -> nn.Module:
    """``depth`` square layers with tanh, no biases: 4 * depth * width**2 bytes."""
    layers = [(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(module for pair in layers for module in pair))


def draw_vectors(width: int, classes: int, draw: np.random.Generator, rows: int) -> Arrays:
    return draw.random((rows, width), dtype=np.float32), draw.integers(classes, size=rows)


def draw_texts(draw: np.random.Generator, rows: int) -> Arrays:
    return draw.integers(TOKENS, size=(rows, LENGTH)), draw.integers(2, size=rows)


def draw_pairs(draw: np.random.Generator, rows: int) -> Arrays:
    users, items = draw.integers(USERS, size=rows), draw.integers(ITEMS, size=rows)
    return np.stack([users, items], 1), draw.integers(2, size=rows).astype(np.float32)


def draw_targets(width: int, draw: np.random.Generator, rows: int) -> Arrays:
    x, y = (draw.standard_normal((rows, width), dtype=np.float32) for _ in range(2))
    return x, y


def squares(width: int, depth: int, batch: int = 64) -> Work:
    """Square layers under Adam: for the cost of so many bytes of parameters."""
    return Work(
        name=f"{depth} layers {width}x{width}",
        make=partial(square, width, depth),
        draw=partial(draw_targets, width),
        batches=(batch,),
        samples=8 * batch,
        loss=nn.MSELoss(),
        optimizer=partial(optim.Adam, lr=1e-4),
        large=4 * depth * width**2 > 5e7,
    )


def work_named(text: str) -> Work:
    """One of :data:`WORKS`, or "1000x25": 25 square layers of 1000."""
    width, _, depth = text.partition("x")
    return squares(int(width), int(depth)) if width.isdigit() else WORKS[text]


def tabular(inputs: int = 100, batch: int = 1024, samples: int = 200_000) -> Work:
    """A perceptron on rows of floats."""
    return Work(
        name=f"MLP {inputs}-256-256-10",
        make=partial(mlp, inputs, 256, 256, 10),
        draw=partial(draw_vectors, inputs, 10),
        batches=(batch,),
        samples=samples,
        optimizer=partial(optim.Adam, lr=1e-3),
    )


WORKS = {
    "mlp": Work(
        name="MLP 784-512-512-10",
        make=partial(mlp, 784, 512, 512, 10),
        draw=partial(draw_vectors, 784, 10),
        batches=(128, 256, 1024),
    ),
    "lenet": Work(
        name="LeNet-5", make=lenet, draw=partial(draw_vectors, 784, 10), batches=(256, 128, 1024)
    ),
    "resnet": Work(
        name="ResNet-18, 32x32",
        make=resnet,
        draw=partial(draw_vectors, 3072, 10),
        batches=(64,),
        samples=1024,
        optimizer=partial(optim.SGD, lr=0.01, momentum=0.9),
        large=True,
    ),
    "transformer": Work(
        name="Transformer encoder",
        make=Encoder,
        draw=draw_texts,
        batches=(16,),
        samples=1024,
        optimizer=partial(optim.AdamW, lr=1e-4),
        large=True,
    ),
    "ncf": Work(
        name="NCF",
        make=NCF,
        draw=draw_pairs,
        batches=(4096,),
        samples=262_144,
        loss=nn.BCEWithLogitsLoss(),
        optimizer={"tables": partial(optim.SparseAdam, lr=1e-3), "": partial(optim.Adam, lr=1e-3)},
    ),
}

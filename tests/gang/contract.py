"""Some models on every engine with three replicas; their losses, iteration by iteration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
REPLICAS, ROWS, SIDE, CLASSES, WORDS = 3, 90, 6, 3, 20
SCHEMA = "image array<float>, words array<long>, label long"


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(SIDE * SIDE, SIDE * SIDE),
            nn.Linear(SIDE * SIDE, SIDE * SIDE),
        )
        self.second.weight = self.first.weight
        self.out = nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Text(nn.Module):
    """A transformer's layer over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.words(x)).mean(1))


class Mean(nn.Module):
    """Over the words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def chain() -> nn.Module:
    """Likewise, layer after layer."""
    layers = [nn.TransformerEncoderLayer(8, 2, 18, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, 8), *layers, Mean(), nn.Linear(8, CLASSES))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * (SIDE - 2) ** 2, CLASSES),
    )


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, 16), nn.Dropout(0.4), nn.Tanh(), nn.Linear(16, CLASSES)
    )


SGD, ADAMW = partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)
MODELS: dict[str, dict] = {
    "mlp": {"model": mlp, "optimizer": SGD},
    "conv": {"model": conv, "optimizer": ADAMW, "clip_norm": 0.5},
    "tied": {"model": Tied, "optimizer": ADAMW, "l2": 1e-3},
    "text": {"model": Text, "optimizer": ADAMW, "features": "words"},
    "chain": {"model": chain, "optimizer": ADAMW, "features": "words"},
    "dropout": {"model": dropout, "optimizer": SGD, "accumulate": 2},
    "compressed": {"model": mlp, "optimizer": SGD, "compression": sparkdl.PowerSGD(1)},
}
UNITS = {
    "mlp": ["0"],
    "conv": ["1", "5"],
    "tied": ["out"],
    "text": ["layer"],
    "chain": ["1", "2"],
    "dropout": ["0", "3"],
}
ENGINES: dict[str, dict] = {
    "local": {"engine": "local"},
    "shuffle": {"engine": "shuffle"},
    "gang, ddp": {"engine": "gang"},
    "gang, ddp in buckets": {"engine": "gang", "strategy": sparkdl.DDP(bucket_cap_mb=1e-4)},
    "gang, zero1": {"engine": "gang", "strategy": "zero1"},
    "gang, fsdp": {"engine": "gang", "strategy": "fsdp"},
}


def all_runs() -> dict[tuple[str, str], dict]:
    """What is trained: how a trainer differs, by model and engine."""
    found = {(m, e): MODELS[m] | ENGINES[e] for m in MODELS for e in ENGINES}
    for model, units in UNITS.items():
        found[model, "gang, fsdp"]["strategy"] = sparkdl.FSDP(units=units)
    del found["compressed", "gang, fsdp"]
    for word in ("pipeline", "tensor"):
        found["chain", f"gang, {word}"] = MODELS["chain"] | {"engine": "gang", "strategy": word}
    return found


def frame(spark):
    generator = np.random.default_rng(1)
    sizes = (40, 15, 35)  # uneven
    parts = [
        [
            (
                generator.normal(size=SIDE * SIDE).tolist(),
                generator.integers(0, WORDS, size=5).tolist(),
                int(generator.integers(CLASSES)),
            )
            for _ in range(size)
        ]
        for size in sizes
    ]
    return spark.createDataFrame(
        spark.sparkContext.parallelize(parts, REPLICAS).flatMap(list), SCHEMA
    )


def run(spark: Any, runs: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
    wanted = {(model, engine) for model, engine in runs}
    wanted |= {(model, "local") for model, _ in wanted}
    df = frame(spark).cache()
    results = {}
    for (model, engine), how in all_runs().items():
        if (model, engine) not in wanted:
            continue
        values = {
            "features": "image",
            "loss": nn.CrossEntropyLoss(),
            "batch_size": 18,
            "replicas": REPLICAS,
            "stop": sparkdl.max_epoch(2),
            **how,
        }
        results[f"{model}: {engine}"] = sparkdl.Trainer(**values).fit(df).history.losses
    return results

"""A model and an optimizer that call faults in the tasks, and the training in which they are used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

import sparkdl
from harness.inject import Fault

WIDTH, CLASSES, ROWS = 8, 4, 96
LARGE = (1024, 1024)
"""Layers of a model so large that replicas compute with its weights where they lie in slabs."""


class Model(nn.Module):
    """Batch norm and dropout; a fault strikes when the buffers have changed already."""

    def __init__(self, faults: Sequence[Fault], sizes: Sequence[int] = (16,)) -> None:
        super().__init__()
        self.faults = tuple(faults)
        layers, width = list[nn.Module](), WIDTH
        for size in sizes:
            layers += [nn.Linear(width, size), nn.BatchNorm1d(size), nn.Dropout(0.3)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, CLASSES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layers(x)
        self.calls += self.training
        for fault in self.faults:
            fault.strike("fb" if self.training else "validation", int(self.calls))
        return output


def chain() -> nn.Module:
    """Likewise, for a pipeline."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


def pair() -> nn.Module:
    """Likewise, of layers that are cut."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    )


class Adam(torch.optim.Adam):
    """A fault strikes when the slice's new state has been written in place."""

    def __init__(self, params, lr: float = 1e-3, faults: Sequence[Fault] = ()) -> None:
        super().__init__(params, lr=lr)
        self.faults = tuple(faults)

    def step(self, closure=None):
        result = super().step(closure)
        steps = [int(state["step"]) for state in self.state.values()]
        for fault in self.faults:
            fault.strike("sync", max(steps, default=0))
        return result


def trainer(
    replicas: int,
    faults: Sequence[Fault] = (),
    iterations: int = 10,
    sizes: Sequence[int] = (16,),
    instance: bool = False,
    **changes,
) -> sparkdl.Trainer:
    """An epoch is 4 iterations. ``instance``: the model is a module, not what builds one."""
    model = partial(Model, faults, sizes)
    if instance:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = model()
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(Adam, lr=1e-2, faults=faults),
        "batch_size": 24,
        "replicas": replicas,
        "stop": sparkdl.max_iteration(iterations),
        "seed": 2,
    }
    return sparkdl.Trainer(**{**values, **changes})


def frame(spark, replicas: int, rows: int = ROWS):
    generator = np.random.default_rng(1)
    found = [
        (generator.normal(size=WIDTH).tolist(), int(generator.integers(CLASSES)))
        for _ in range(rows)
    ]
    records = spark.sparkContext.parallelize(found, replicas)
    return spark.createDataFrame(records, "features array<float>, label long")


def outcome(trained: sparkdl.TrainedModel) -> dict:
    """What must be equal, to the bit."""
    from launch import digest

    return {
        "digest": digest(trained.module),
        "losses": trained.history.losses,
        "validations": trained.history.validations,
    }

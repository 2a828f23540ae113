"""What the tables of mistakes are made of: a mistake, a fit that makes it, models and losses.

The tables: bad_data, bad_recipes, bad_settings, bad_uses.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import DataError, ModelError, ParameterError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WHOLE = "give a whole number of at least 1."


@dataclass(frozen=True)
class Mistake:
    """What is given, and the error that must answer it.

    ``message``: all of it. "{tmp}" in it is a folder of the test's; "…" is any text: a trace, a
    host, a number of bytes. ``jobs``: how many Spark jobs finding it may take (the data must be
    read for some). ``tasks_fail``: whether the user's own query is what fails, in a task; else no
    task may.
    """

    name: str
    make: Callable[[Fit], Any]
    error: type[Exception]
    message: str
    jobs: int = 0
    tasks_fail: bool = False


def model_error(name: str, make: Callable[[Fit], Any], message: str, jobs: int = 0) -> Mistake:
    return Mistake(name, make, ModelError, message, jobs)


def tried(name: str, make: Callable[[Fit], Any], message: str) -> Mistake:
    """A mistake that shows when the model is tried on the first rows."""
    return Mistake(name, make, ModelError, message, jobs=3)


def parameter_error(name: str, make: Callable[[Fit], Any], message: str, jobs: int = 0) -> Mistake:
    return Mistake(name, make, ParameterError, message, jobs)


def data_error(
    name: str, make: Callable[[Fit], Any], message: str, jobs: int = 0, tasks_fail: bool = False
) -> Mistake:
    return Mistake(name, make, DataError, message, jobs, tasks_fail)


def row_error(
    name: str, make: Callable[[Fit], Any], message: str, tasks_fail: bool = False
) -> Mistake:
    """A mistake that shows when the rows are read."""
    return Mistake(name, make, DataError, message, 2, tasks_fail)


@dataclass
class Fit:
    """Fits on something, and knows whether a fit got as far as training."""

    spark: Any
    tmp: Path = Path()
    engine: str = "shuffle"
    started: bool = False

    def __call__(self, data: Any, **changes: Any) -> sparkdl.TrainedModel:
        values: dict[str, Any] = {
            "model": scalar_model,
            "loss": nn.MSELoss(),
            "optimizer": partial(torch.optim.SGD, lr=0.01),
            "batch_size": 4,
            "replicas": 2,
            "engine": self.engine,
            "stop": sparkdl.max_iteration(1),
            "callbacks": [Started(self)],
            **changes,
        }
        how = {name: values.pop(name) for name in ("resume", "start") if name in values}
        return sparkdl.Trainer(**values).fit(data, **how)

    def frame(self, schema: str, *rows: Any) -> Any:
        """A DataFrame of two partitions, the first half of the rows in the first."""
        return self.spark.createDataFrame(list(rows), schema)

    def rdd(self, *records: Any) -> Any:
        return self.spark.sparkContext.parallelize(list(records), 2)

    def good(self) -> Any:
        return self.frame(
            "features array<double>, label double, n int, s string",
            *[([float(i), 1.0], float(i), i, "x") for i in range(6)],
        )

    def features(self, kind: str, *values: Any) -> Any:
        return self.frame(f"features {kind}, label double", *[(v, 1.0) for v in values])

    def labels(self, kind: str, *values: Any) -> Any:
        return self.frame(
            f"features array<double>, label {kind}", *[([1.0, 2.0], v) for v in values]
        )


@dataclass
class Started(sparkdl.Callback):
    fit: Fit

    def on_fit_start(self, trainer: Any, state: Any) -> None:
        self.fit.started = True

    def __reduce__(self) -> Any:
        raise TypeError("a callback never leaves the driver")


def scalar_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def two_classes() -> nn.Module:
    return nn.Linear(2, 2)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        return self.table(word)[:, 0]


class HoldsLock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.lock = threading.Lock()


def holding(spark: Any) -> Callable[[], nn.Module]:
    def make_model() -> nn.Module:
        spark.range(1).count()
        return scalar_model()

    return make_model


def vector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square()


class Weighing(nn.Module):
    """Learns how much the loss counts for: nobody would train it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, output, target):
        return ((output - target) ** 2).mean() * torch.exp(-self.scale) + self.scale


def detached_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.detach() - target).square().mean()


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def locked() -> sparkdl.Metric:
    """A metric that holds what does not travel."""
    lock = threading.Lock()

    def gap(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return output - target

    return sparkdl.MeanMetric("gap", gap)


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Flatten(0))


cross_entropy = {"model": two_classes, "loss": nn.CrossEntropyLoss()}


def expect(error: type[Exception], message: str, tmp: Path = Path()) -> Any:
    """``pytest.raises`` on the whole message."""
    pattern = re.escape(message.replace("{tmp}", str(tmp))).replace("…", "(.|\n)*")
    return pytest.raises(error, match=rf"\A{pattern}\Z")

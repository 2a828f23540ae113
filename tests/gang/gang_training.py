"""A small model to train with a gang, and what must be the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WIDTH, CLASSES = 6, 3


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 8,
        "replicas": 2,
        "engine": "gang",
        "stop": sparkdl.max_iteration(6),
        "seed": 4,
    }
    return sparkdl.Trainer(**{**values, **changes})


def close(one: sparkdl.TrainedModel | None, other: sparkdl.TrainedModel | None) -> None:
    """Weights and buffers, but for rounding."""
    assert one is not None
    assert other is not None
    left, right = one.module.state_dict(), other.module.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert type(right[name]) is torch.Tensor
        torch.testing.assert_close(right[name], tensor, rtol=1e-4, atol=1e-5)


def refused(
    made: Callable[[], sparkdl.Trainer], df: Any, error: type[Exception], message: str
) -> None:
    """The trainer, or its ``fit``, says so before the data are read."""
    scheduler = df.sparkSession.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.numTotalJobs()
    with pytest.raises(error) as caught:
        made().fit(df)
    assert str(caught.value) == message
    assert scheduler.numTotalJobs() == before


def same(one: sparkdl.TrainedModel, other: sparkdl.TrainedModel) -> None:
    """To the bit."""
    left, right = one.module.state_dict(), other.module.state_dict()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert one.history.losses == other.history.losses

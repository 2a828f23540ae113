"""A small model to train with a gang, and what must be the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from mistakes import message_of
from pyspark import cloudpickle
from structured import Structured
from torch import nn
from without_spark import Parts

import sparkdl

for _module in (__name__, Structured.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[_module])
WIDTH, CLASSES = 6, 3
IGNORING = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]), ignore_index=2)


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over the classes but the last, and how many they are."""
    each = nn.functional.cross_entropy(output, target, ignore_index=2, reduction="none")
    return each.sum(), (target != 2).sum()


class OwnLoss(nn.Module):
    """Computes it from its labels, of which it leaves out some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = without_norm()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layers(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits, labels, ignore_index=2), logits


CARE: dict[str, Any] = {
    "l1": 1e-3,
    "l2": {"*.weight": 1e-2},
    "accumulate": 3,
    "weight": "weight",
    "optimizer": {"0": partial(torch.optim.SGD, lr=0.1), "": partial(torch.optim.Adam, lr=0.01)},
    "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=2),
}
"""Options of a trainer that every strategy has to combine."""
OWN: dict[str, Any] = {
    "model": OwnLoss,
    "loss": sparkdl.ModelLoss(count=lambda labels: (labels != 2).sum()),
}


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def without_norm() -> nn.Module:
    """A single row is enough for it."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


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


def by_keyword(kind: str = "ModelOutput") -> dict[str, Any]:
    """What trains a model of keywords, which returns several things."""
    return {
        "model": partial(Structured, WIDTH, CLASSES, kind),
        "features": {"x": "features"},
        "output": "logits",
    }


def close(one: sparkdl.TrainedModel | None, other: sparkdl.TrainedModel | None) -> None:
    """Weights and buffers, but for rounding."""
    left, right = one.module.state_dict(), other.module.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert type(right[name]) is torch.Tensor
        torch.testing.assert_close(right[name], tensor, rtol=1e-4, atol=1e-5)


def alike(there: sparkdl.TrainedModel, here: sparkdl.TrainedModel) -> None:
    """Assert that a gang has trained as one process does, but for rounding: losses, weights, their
    average, the best ones, and what validations measured."""
    losses = pytest.approx(here.history.losses, rel=1e-5, abs=1e-5, nan_ok=True)
    assert there.history.losses == losses
    close(here, there)
    for one, other in ((here.ema, there.ema), (here.best, there.best)):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)
    for one, other in zip(there.history.validations, here.history.validations, strict=True):
        assert one.keys() == other.keys()
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-4)


def as_one_process(
    run: sparkdl.Trainer, data: Any, data_here: Any = None, **alone: Any
) -> tuple[sparkdl.TrainedModel, sparkdl.TrainedModel]:
    """Train with the gang and in this process, there with ``data_here`` or the same: both are alike."""
    there = run.fit(data)
    here = replace(run, engine="local", **alone).fit(data_here or data)
    alike(there, here)
    return there, here


def validated(df: Any, batch_size: int = 5) -> dict[str, Any]:
    """Options with which ranks have different numbers of batches to validate."""
    often = sparkdl.every(2)
    how = {"metrics": ["accuracy"], "best": "loss", "every": often, "batch_size": batch_size}
    return {"validation": sparkdl.Validation(df, **how), "histograms": often}


def refused(
    made: Callable[[], sparkdl.Trainer], parts: Parts, error: type[Exception], message: str
) -> None:
    """The trainer, or its ``fit``, says so before the data are read."""
    assert message_of(error, lambda: made().fit(parts)) == message
    assert not parts.rows


def goes_on_with_kept_state(run: sparkdl.Trainer, df: Any) -> None:
    """Of the optimizer, from fit to fit."""
    once = replace(run, stop=sparkdl.max_epoch(1))
    half = replace(once, keep_optimizer_state=True).fit(df)
    close(replace(once, engine="local").fit(df, start=half), once.fit(df, start=half))


def goes_on_in_turn(
    ways: list[dict[str, Any]], df: Any, path: Any, **alike: Any
) -> tuple[sparkdl.TrainedModel, sparkdl.TrainedModel]:
    """Train an iteration in each of some ways, each going on from the checkpoint of the one before.

    Returns:
        What comes of it, and of one process.
    """
    kept = sparkdl.Checkpoint(path)
    for number, way in enumerate(ways, start=1):
        stop = sparkdl.max_iteration(number)
        ended = trainer_of(**alike, **way, checkpoint=kept, stop=stop).fit(df, resume="latest")
    here = trainer_of(engine="local", slices=2, stop=sparkdl.max_iteration(len(ways)), **alike)
    return ended, here.fit(df)


def same(one: sparkdl.TrainedModel, other: sparkdl.TrainedModel) -> None:
    """To the bit."""
    left, right = one.module.state_dict(), other.module.state_dict()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert one.history.losses == other.history.losses

"""A small model to train with a gang, and what must be the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pyspark import cloudpickle
from structured import Structured
from torch import nn

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


def goes_on_elsewhere(
    made: Callable[..., sparkdl.Trainer], df: Any, path: Any, first: dict, then: dict, alike: dict
) -> None:
    """A checkpoint of one way to train, read by another: the training of one process."""
    checkpoint = sparkdl.Checkpoint(path, every=sparkdl.every(3))
    whole = made(engine="local", slices=2, **alike).fit(df)
    begun = made(**first, **alike, checkpoint=checkpoint, stop=sparkdl.max_iteration(3))
    begun.fit(df)
    ended = made(**then, **alike, checkpoint=checkpoint).fit(df, resume="latest")
    assert ended.history.losses == pytest.approx(whole.history.losses, rel=1e-5, abs=1e-5)
    close(whole, ended)
    close(whole.ema, ended.ema)


def goes_on_with_kept_state(run: sparkdl.Trainer, df: Any) -> None:
    """Of the optimizer, from fit to fit and from pass to pass."""
    whole = replace(run, engine="local", stop=sparkdl.max_epoch(2)).fit(df)
    half = replace(run, keep_optimizer_state=True, stop=sparkdl.max_epoch(1)).fit(df)
    once = replace(run, stop=sparkdl.max_epoch(1))
    close(replace(once, engine="local").fit(df, start=half), once.fit(df, start=half))
    run.partial_fit(df)
    close(whole, run.partial_fit(df))


def same(one: sparkdl.TrainedModel, other: sparkdl.TrainedModel) -> None:
    """To the bit."""
    left, right = one.module.state_dict(), other.module.state_dict()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert one.history.losses == other.history.losses

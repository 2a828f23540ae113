"""A model cut into stages that micro-batches flow through: the training of one process.

Sums of micro-batches round otherwise than the sums of a whole mini-batch: nothing here is equal to the
bit, everything to 1e-5.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gang_training import CLASSES, WIDTH
from gang_training import trainer_of as any_trainer
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import ModelError, ParameterError, Pipeline, TrainingError

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def model() -> nn.Module:
    """Every row by itself."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh()),
        nn.Linear(16, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16, bias=False),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Linear(8, CLASSES),
    )


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    return any_trainer(**{"model": model, "strategy": "pipeline", **changes})


def close(one: sparkdl.TrainedModel | None, other: sparkdl.TrainedModel | None) -> None:
    assert one is not None
    assert other is not None
    left, right = one.module.state_dict(), other.module.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=1e-4, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "all forward, then all backward": {"strategy": Pipeline(schedule="gpipe", micro_batches=3)},
    "one micro-batch": {"strategy": Pipeline(micro_batches=1)},
    "cut by name": {"strategy": Pipeline(split=["3"])},
    "cut inside a block": {"strategy": Pipeline(split=["0.2"])},
    "interleaved": {"strategy": Pipeline(stages_per_rank=2)},
    "interleaved, all forward": {"strategy": Pipeline(stages_per_rank=2, schedule="gpipe")},
    "copies of one stage": {"strategy": Pipeline(copies=2)},
    "clipped by norm": {"clip_norm": 0.1},
    "clipped by value": {"clip_value": 0.02},
    "regularised": {"l1": 1e-3, "l2": {"*.weight": 1e-2}},
    "average of the weights": {"ema": 0.8},
    "accumulated": {"accumulate": 3},
    "weights of samples": {"weight": "weight"},
    "weights of classes": {"class_weights": [1.0, 0.0, 2.0]},
    "a frozen layer": {"freeze": ["0.0"]},
    "a frozen stage": {"freeze": ["0"], "strategy": Pipeline(split=["1"])},
    "checkpointed activations": {"activation_checkpointing": ["0.*", "3"]},
    "two optimizers": {
        "optimizer": {"0": partial(torch.optim.SGD, lr=0.1), "": partial(torch.optim.Adam, lr=0.01)}
    },
    "whole tensors": {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)},
    "a schedule": {"schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
}


@pytest.mark.parametrize("sizes", [(20, 12), (30, 2), (0, 24)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_training_of_one_process(frames, case, sizes):
    """Also where a rank has few rows, or none."""
    df, run = frames(*sizes), trainer_of(**CASES[case])
    there, here = run.fit(df), replace(run, engine="local").fit(df)
    assert there.history.losses == pytest.approx(here.history.losses, rel=1e-5, abs=1e-5)
    close(here, there)
    if run.ema is not None:
        close(here.ema, there.ema)

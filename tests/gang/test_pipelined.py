"""Tests of pipelines alone, and of models that are cut: trials that leave nothing, tensors between
stages, what only some ranks know."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import strategy_models as models
import torch
from gang_training import CLASSES, WIDTH, as_one_process, trainer_of
from mistakes import message_of
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import Pipeline, TrainingError

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_the_passes_are_those_of_a_pipeline(parts):
    trained = trainer_of(model=models.layers, strategy="pipeline").fit(parts(20, 12))
    assert "pipeline" in trained.history.timings()
    assert "backward" not in trained.history.timings()


class Counting(nn.Module):
    """Its count is another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
        return x


def test_trying_a_stage_leaves_nothing(parts):
    """A micro-batch of another size is tried first: counted once, and drawn for once."""
    rows, layers = parts(20, 12), [*models.normed(), nn.Dropout(0.5), Counting()]
    several = partial(nn.Sequential, *layers)
    run = trainer_of(model=several, batch_size=12, strategy=Pipeline(micro_batches=2))
    one, other = run.fit(rows), run.fit(rows)
    assert one.module[3].num_batches_tracked == one.module[-1].calls == 12
    assert one.history.losses == other.history.losses
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, other.module.state_dict()[name])


def test_dropout_draws_the_same_on_all_parts(parts):
    """Tensors that no rank has a part of are the same on each; so are two runs."""
    rows, layers = parts(20, 12), [*models.layers(), nn.Dropout(0.5)]
    run = trainer_of(model=partial(nn.Sequential, *layers), strategy="tensor")
    one, other = run.fit(rows), run.fit(rows)
    assert one.history.losses == other.history.losses


class Seen(sparkdl.Callback):
    """How many weights the histograms count."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        for name, histogram in (state.histograms or {}).items():
            self.counts[name] = int(sum(histogram.counts))


@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline"])
def test_histograms_count_every_weight_once(parts, strategy):
    rows, found = parts(20, 12), []
    run = trainer_of(model=models.layers, strategy=strategy, histograms=sparkdl.every(2))
    for engine in ("gang", "local"):
        seen = Seen()
        replace(run, engine=engine, callbacks=[seen]).fit(rows)
        found.append(seen.counts)
    assert found[0] == found[1]
    assert found[0]["weights/0.weight"] == WIDTH * 16


class Pair(nn.Module):
    """Two tensors out, so that two go between stages; the second one is of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.layer(x)), (x.sum(1) > 0).long()


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.shift = nn.Linear(8, CLASSES), nn.Embedding(2, CLASSES)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, sign = pair
        return self.out(x) + self.shift(sign)


def test_several_tensors_go_from_stage_to_stage(parts):
    rows = parts(20, 12)
    made = partial(nn.Sequential, Pair(), Joined())
    run = trainer_of(model=made, strategy="pipeline", validation=sparkdl.Validation(rows))
    there, _ = as_one_process(run, rows)
    assert len(there.history.validations) == 1


class InThirdPass(nn.Module):
    """In the third pass something goes wrong, once, with all ranks or one: what comes out of it is no
    number, or the gradient of a weight is none, or an operation fails."""

    def __init__(self, what: str, rank: int | None = None) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, 8), itertools.count(1).__next__
        self.what, self.rank = what, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = self.rank is None or os.environ.get("RANK") == str(self.rank)
        if not self.training or self.passes() != 3 or not here:
            return self.layer(x)
        if self.what == "error":
            raise ValueError("an operation of the user's")
        if self.what == "gradient":
            x = x + torch.sqrt(self.layer.weight.sum() * 0.0)
        return self.layer(x) * (math.nan if self.what == "loss" else 1.0)


def going_wrong(what: str, last: bool, rank: int | None = None) -> nn.Module:
    """It is the last stage if ``last``."""
    wrong = InThirdPass(what, rank)
    before = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] if last else []
    return nn.Sequential(*before, wrong, nn.Linear(8, CLASSES))


ONE_PASS = Pipeline(micro_batches=1)


@pytest.mark.parametrize(("strategy", "rank"), [("fsdp", 1), (ONE_PASS, None)], ids=str)
def test_a_gradient_that_is_not_finite_is_told_or_left_out(parts, strategy, rank):
    made = partial(going_wrong, "gradient", False, rank)
    rows, run = parts(20, 12), trainer_of(model=made, strategy=strategy)
    told = message_of(TrainingError, run.fit, rows)
    assert 'the gradient of "0.layer.weight"' in told
    trained = replace(run, on_nan="skip").fit(rows)
    assert len(trained.history) == 6
    assert all(torch.isfinite(p).all() for p in trained.module.parameters())


def test_a_loss_that_is_not_finite_is_told_of_every_rank_whose_rows_it_is_of(parts):
    """The last stage's rank alone knows it."""
    run = trainer_of(model=partial(going_wrong, "loss", True), strategy=ONE_PASS)
    told = r"iteration \d, .*: the loss \(nan\) in replica 0; the loss \(nan\) in replica 1 \(mean"
    assert re.match(told, message_of(TrainingError, run.fit, parts(20, 12)))


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_mistake_of_the_model_in_training_is_one_error_with_the_rank(parts, strategy):
    made: Any = partial(going_wrong, "error", strategy == "pipeline", 1)
    run = trainer_of(model=made, strategy=strategy)
    assert re.match(
        r"iteration \d, epoch \d: rank 1 on here failed\. ValueError: an operation of the user's\n",
        message_of(TrainingError, run.fit, parts(12, 12)),
    )

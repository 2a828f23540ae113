"""Mistakes that show when a model is cut and tried on a few rows are told before training."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import strategy_models as models
import torch
from gang_training import CLASSES, WIDTH, as_one_process, trainer_of
from mistakes import message_of
from pyspark import cloudpickle
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import sparkdl
from sparkdl import ModelError, ParameterError, Pipeline, Tensor

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Named(nn.Module):
    """No tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.layer(x)}


class Unnamed(nn.Module):
    def forward(self, found: dict[str, torch.Tensor]) -> torch.Tensor:
        return found["hidden"]


def named() -> nn.Module:
    return nn.Sequential(Named(), Unnamed(), nn.Linear(8, CLASSES))


class Output(NamedTuple):
    scores: torch.Tensor


class Labelled(nn.Module):
    """Puts out what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, CLASSES), kind

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.layer(x)
        return {"scores": scores} if self.kind == "dict" else Output(scores)


def loss_of_labelled(output: Any, labels: torch.Tensor) -> torch.Tensor:
    scores = output["scores"] if isinstance(output, dict) else output[0]
    return nn.functional.cross_entropy(scores, labels)


CUT = (
    " Name a cut that leaves it in one, strategy=sparkdl.Pipeline(split=[...]), or use "
    'strategy="fsdp".'
)
TOLD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a parameter that is never used": (
        partial(models.Odd, "unused"),
        "fsdp",
        ModelError,
        'strategy="fsdp" needs a gradient of every parameter, and "spare.weight" gets none: freeze it '
        '(freeze=["spare.weight"]), or use strategy="zero1".',
    ),
    "a plan with which the model fails": (
        models.hidden,
        Tensor(plan={"0": "column"}),
        ModelError,
        "the model that is cut so fails. ",
    ),
    "a plan with which it is another": (
        models.twice,
        Tensor(plan={"4.down": ColwiseParallel()}),
        ModelError,
        "the model that is cut so puts out something else. ",
    ),
    "a cut that a forward does not have": (
        models.Own,
        Pipeline(split=["block.1"]),
        ModelError,
        'strategy=Pipeline: no module of the chain is called "block.1". Did you mean "blocks.1"? It '
        "has into, blocks.0, blocks.1, blocks.2, blocks.3, sign, out.",
    ),
    "a tensor in two stages of a chain": (
        models.tied,
        Pipeline(split=["1"]),
        ModelError,
        f'strategy="pipeline": "0.weight" and "1.weight" are one tensor, in two stages.{CUT}',
    ),
    "a tensor in two stages of a forward": (
        partial(models.Shares, True),
        Pipeline(split=["second"]),
        ModelError,
        'strategy="pipeline": "first.weight" and "second.weight" are one tensor, in two stages.'
        f"{CUT}",
    ),
    "a layer in two stages": (
        partial(models.Shares, False),
        Pipeline(split=["second"]),
        ModelError,
        f'strategy="pipeline": "first.weight" is in two stages.{CUT}',
    ),
    "no tensor between stages": (
        named,
        Pipeline(split=["1"]),
        ModelError,
        'strategy="pipeline" sends tensors from stage to stage, and "0" puts out a dict: cut '
        "elsewhere, strategy=sparkdl.Pipeline(split=[...]), or let it put out a tensor or a tuple of "
        "tensors.",
    ),
}


@pytest.mark.parametrize("mistake", TOLD)
def test_it_is_told_before_training(parts, mistake):
    model, strategy, error, message = TOLD[mistake]
    run = trainer_of(model=model, strategy=strategy)
    assert message in message_of(error, run.fit, parts(12, 12))


@pytest.mark.parametrize("kind", ["dict", "Output"])
def test_an_output_that_has_no_tensors_alone_is_told(parts, kind):
    made = partial(nn.Sequential, nn.Linear(WIDTH, 8), nn.Tanh(), Labelled(kind))
    run = trainer_of(model=made, loss=loss_of_labelled, strategy="pipeline")
    assert message_of(ModelError, run.fit, parts(12, 12)) == (
        'strategy="pipeline" needs a model that puts out a tensor or a plain tuple of tensors, and '
        f'Sequential puts out a {kind}: change that, or use strategy="fsdp".'
    )


def test_what_is_no_tensor_may_stay_within_a_stage(parts):
    as_one_process(trainer_of(model=named, strategy=Pipeline(split=["2"])), parts(20, 12))


def test_a_tensor_that_stays_in_one_stage_may_have_two_names(parts):
    as_one_process(trainer_of(model=models.tied, strategy=Pipeline(split=["2"])), parts(12, 12))


def test_a_micro_batch_of_one_row_is_told_where_the_model_needs_more(parts):
    run = trainer_of(model=models.normed, batch_size=6, strategy=Pipeline(micro_batches=4))
    assert "replicas=2, micro_batches=4. Choose another batch_size" in message_of(
        ModelError, run.fit, parts(6, 6)
    )
    replace(run, strategy=Pipeline(micro_batches=3)).fit(parts(6, 6))


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_rows_of_varying_length_are_told(parts, strategy):
    rows = parts(8, 8)
    for number, record in enumerate(itertools.chain(*rows.records)):
        record["features"] = record["features"][: 1 + number % WIDTH]
    varying = sparkdl.Sequence(max_length=WIDTH)
    run = trainer_of(model=models.layers, strategy=strategy, columns={"features": varying})
    assert message_of(ParameterError, run.fit, rows) == (
        f'strategy="{strategy}" needs inputs of one shape, and column "features" is padded to the '
        "longest row of each mini-batch: pad it to one length, "
        "sparkdl.Sequence(max_length=..., pad_to_max=True)."
    )
    run = replace(run, columns={"features": replace(varying, pad_to_max=True)})
    as_one_process(run, rows)

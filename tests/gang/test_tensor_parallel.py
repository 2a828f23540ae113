"""Layers cut over the ranks: the training of one process.

Sums over parts of a layer round otherwise than one multiplication: nothing here is equal to the bit,
everything to 1e-5.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from gang_training import (
    CARE,
    CLASSES,
    IGNORING,
    WIDTH,
    as_one_process,
    by_keyword,
    close,
    counted,
    goes_on_in_turn,
    goes_on_with_kept_state,
    refused,
    validated,
    without_norm,
)
from gang_training import trainer_of as any_trainer
from launch import in_turn
from pyspark import cloudpickle
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    SequenceParallel,
)

import sparkdl
from sparkdl import ModelError, ParameterError, Tensor

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def model() -> nn.Module:
    """Two layers that are cut and others; a parameter of fewer rows than ranks."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 1),
        Spread(),
    )


class Spread(nn.Module):
    """A number for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, CLASSES).view(1, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def hidden() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), Last())


class Last(nn.Module):
    """Layers that no Sequential shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Words(nn.Module):
    """A table and torch's transformer layer, without the biases of keys, which change nothing: their
    gradient would be all rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, CLASSES)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.table(words(x))).mean(1))


class Normed(nn.Module):
    """A norm that each rank computes for a part of the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.norm = nn.Embedding(10, 8), nn.Identity(), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.table(words(x))))
        return self.down(torch.relu(self.up(x))).mean(1)


def words(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 3).long().clamp(max=9)


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    return any_trainer(**{"model": model, "strategy": "tensor", **changes})


BY_HAND = Tensor(plan={"0": "column", "2": "row", "*.up": "column", "*.down": "row"})
BY_SEQUENCE = Tensor(
    plan={
        "first": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
        ),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": "row",
    }
)
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "by hand": {"model": hidden, "strategy": BY_HAND},
    "a transformer layer": {"model": Words},
    "rows of a table": {"model": Words, "strategy": Tensor(plan={"table": "row"})},
    "in styles of torch's": {"model": Normed, "strategy": BY_SEQUENCE},
    "with care": {
        **CARE,
        "clip_norm": 0.1,
        "ema": 0.8,
        "class_weights": [1.0, 0.0, 2.0],
        "activation_checkpointing": ["0", "2"],
    },
    "labels that the loss ignores and weighs": {"loss": IGNORING, "clip_value": 0.02},
    "a sum and its count": {"loss": counted, "clip_norm": 0.1, "accumulate": 2},
    "batches in which nothing counts": {"loss": IGNORING, "batch_size": 1, "model": without_norm},
    "a frozen layer that is cut": {"freeze": ["0"]},
    "inputs by keyword, an output of several fields": by_keyword(),
    "shards of one rank": {"mesh": {"shard": 1, "tensor": 2}},
    "copies of layers that are whole": {"mesh": {"data": 2, "tensor": 1}},
}


@pytest.mark.parametrize(("case", "sizes"), in_turn(CASES, [(20, 12), (30, 2), (0, 24)]), ids=str)
def test_it_is_the_training_of_one_process(frames, case, sizes):
    """Also where a rank has few rows, or none."""
    as_one_process(trainer_of(**CASES[case]), frames(*sizes))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), Last()
    )


def test_batch_norm_over_the_mini_batch_of_all_parts(frames):
    """The ranks' rows are one mini-batch, as those of a single replica are: here all the data."""
    there, _ = as_one_process(trainer_of(model=normed, batch_size=32), frames(20, 12), replicas=1)
    assert there.module[3].num_batches_tracked == 6


@pytest.mark.parametrize(
    ("made", "sizes"),
    [({"model": Words}, (0, 24)), (by_keyword(), (20, 12))],
    ids=["words", "keyword"],
)
def test_validation_is_that_of_one_process(frames, made, sizes):
    """Ranks have different numbers of batches to validate; histograms count each weight once."""
    df = frames(*sizes)
    there, _ = as_one_process(trainer_of(**made, **validated(df)), df)
    assert len(there.history.validations) == 3


def test_histograms_count_every_weight_once(frames):
    df, found = frames(20, 12), []
    for changes in ({}, {"engine": "local"}):
        seen = Seen()
        trainer_of(histograms=sparkdl.every(2), callbacks=[seen], **changes).fit(df)
        found.append(seen.counts)
    assert found[0] == found[1]
    assert found[0]["weights/0.weight"] == WIDTH * 16


class Seen(sparkdl.Callback):
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        for name, histogram in (state.histograms or {}).items():
            self.counts[name] = int(sum(histogram.counts))


@pytest.mark.parametrize(
    ("precision", "mesh"),
    [({"precision": "bf16"}, None), ({"precision": "fp16"}, {"shard": 1, "tensor": 2})],
    ids=["bf16", "fp16, shards"],
)
def test_lower_precision(frames, precision, mesh):
    """Also in validation, of different numbers of batches. SGD, as Adam would not see gradients that
    are a loss scale too large."""
    df, sgd = frames(20, 12), partial(torch.optim.SGD, lr=0.3)
    validation = sparkdl.Validation(df, every=sparkdl.every(3), batch_size=7)
    there = trainer_of(**precision, optimizer=sgd, mesh=mesh, validation=validation).fit(df)
    exact = trainer_of(engine="local", optimizer=sgd, validation=validation).fit(df)
    for one, other in zip(there.history.validations, exact.history.validations, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=2e-2)
    assert there.history.losses == pytest.approx(exact.history.losses, rel=2e-2)
    assert there.history.losses != exact.history.losses
    assert all(p.dtype == torch.float32 for p in there.module.parameters())


WAYS: list[dict[str, Any]] = [
    {"engine": "shuffle", "slices": 3},
    {"strategy": "tensor"},
    {"strategy": BY_HAND},
    {"strategy": sparkdl.FSDP(units=["0", "2"])},
    {"strategy": "fsdp"},
    {"strategy": "zero1"},
    {"strategy": sparkdl.Pipeline(stages_per_rank=2)},
    {"strategy": sparkdl.Pipeline(split=["2"])},
    {"strategy": "tensor"},
    {"strategy": "fsdp"},
    {"strategy": "pipeline"},
    {"engine": "local", "slices": 3},
]


def test_checkpoints_are_cut_anew(frames, tmp_path):
    """Every engine and strategy goes on from the checkpoint of another: the training of one process."""
    ended, whole = goes_on_in_turn(WAYS, frames(20, 12), tmp_path, model=hidden, ema=0.9)
    assert ended.history.losses == pytest.approx(whole.history.losses, rel=1e-5, abs=1e-5)
    close(whole, ended)
    close(whole.ema, ended.ema)


def test_it_goes_on_with_the_optimizer_state_it_kept(frames):
    """Of a parameter of one row, which both ranks have, too."""
    df, run = frames(16, 16), trainer_of()
    goes_on_with_kept_state(run, df)


def test_dropout_draws_the_same_on_all_parts(frames):
    """What no rank has a part of is the same on each; so are two runs."""
    df, layers = frames(20, 12), [*model(), nn.Dropout(0.5)]
    run = trainer_of(model=partial(nn.Sequential, *layers))
    one, other = run.fit(df), run.fit(df)
    assert one.history.losses == other.history.losses


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "the class": (
        {"strategy": Tensor},
        "strategy is the class Tensor: give an instance, sparkdl.Tensor().",
    ),
    "a way": (
        {"strategy": Tensor(plan={"0": "columns"})},
        'strategy=Tensor(plan={"0": \'columns\'}): use "column", "row", or a style of '
        'torch.distributed.tensor.parallel. Did you mean "column"?',
    ),
    "a list of names": (
        {"strategy": Tensor(plan=["0"])},
        "strategy=Tensor(plan=['0']): give ways by name or pattern, such as "
        '{"0": "column", "2": "row"}.',
    ),
    "a width that does not come out even": (
        {"strategy": Tensor(plan={"4": "column"})},
        'strategy="tensor" with 2 parts: "4" has 1 outputs, which 2 does not divide. Choose another '
        "width, or leave it out of the plan.",
    ),
    "compression": (
        {"compression": sparkdl.TopK(0.1)},
        'compression with strategy="tensor": torch sums the gradients itself. Use '
        'strategy="zero1", or leave compression out.',
    ),
    "batch norm over all ranks": (
        {"sync_batchnorm": True},
        'sync_batchnorm does not go with strategy="tensor": leave it out.',
    ),
    "a part of the update": (
        {"strategy": ["tensor", "zero1"], "mesh": {"data": 1, "tensor": 2}},
        "strategy=\"zero1\" divides the update among copies of the model, but mesh={'data': 1, "
        "'tensor': 2} of 2 ranks has only one copy: give \"data\" a size of at least 2, or leave "
        '"zero1" out.',
    ),
    "no sizes": (
        {"strategy": ["fsdp", "tensor"]},
        'strategy: "fsdp" and "tensor" together need sizes: give them, such as '
        'mesh={"shard": 2, "tensor": 2}.',
    ),
    "a size is missing": (
        {"mesh": {"shard": 2}},
        'mesh={\'shard\': 2} has no size of strategy="tensor": name "tensor" too.',
    ),
    "an unknown dimension": (
        {"mesh": {"tensors": 2}},
        'mesh={\'tensors\': 2}: use data, pipe, shard, tensor, not "tensors". Did you mean "tensor"?',
    ),
    "sizes that are too large": (
        {"mesh": {"data": 2, "tensor": 2}},
        "mesh={'data': 2, 'tensor': 2} has 4 ranks, and there are 2 replicas: give sizes whose product "
        "is replicas.",
    ),
}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a name that is not there": (
        {"strategy": Tensor(plan={"9": "column"})},
        'strategy=Tensor: no submodule matches "9". The model has 0, 1, 2, 3, 4, 5.',
    ),
    "no linear layer": (
        {"strategy": Tensor(plan={"3": "column"})},
        'strategy=Tensor: "3" is a LayerNorm, and "column" is a way to cut an nn.Linear or an '
        "nn.Embedding: name these, or give a style of torch.distributed.tensor.parallel.",
    ),
    "nothing to cut": (
        {"model": partial(nn.Linear, WIDTH, CLASSES)},
        'strategy="tensor" finds no two nn.Linear that follow each other, with an activation between '
        "them: name what to cut, strategy=sparkdl.Tensor("
        'plan={"name": "column", "name": "row"}).',
    ),
    "whole tensors": (
        {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)},
        'strategy="tensor" cuts tensors, and optimizer Adafactor needs whole ones: use '
        'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.',
    ),
}
MISTAKES = {name: (changes, ParameterError, said) for name, (changes, said) in WRONG.items()}
MISTAKES |= {name: (changes, ModelError, said) for name, (changes, said) in UNFIT.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_the_data_are_read(frames, mistake):
    changes, error, message = MISTAKES[mistake]
    refused(lambda: trainer_of(**changes), frames(12, 12), error, message)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"0": "column"}, "the model that is cut so fails. "),
        ({"4.down": ColwiseParallel()}, "the model that is cut so puts out something else. "),
    ],
    ids=["fails", "is another"],
)
def test_a_plan_that_changes_the_model_is_told_before_training(frames, plan, message):
    made = hidden if "0" in plan else even
    with pytest.raises(ModelError, match=message):
        trainer_of(model=made, strategy=Tensor(plan=plan)).fit(frames(12, 12))


def even() -> nn.Module:
    layers = hidden()
    layers[4].down = nn.Linear(12, 2 * CLASSES)
    return layers

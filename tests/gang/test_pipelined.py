"""A model cut into stages that micro-batches flow through: the training of one process.

Sums of micro-batches round otherwise than the sums of a whole mini-batch: nothing here is equal to the
bit, everything to 1e-5.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from gang_training import (
    CARE,
    CLASSES,
    IGNORING,
    WIDTH,
    as_one_process,
    counted,
    goes_on_with_kept_state,
    refused,
    validated,
    without_norm,
)
from gang_training import trainer_of as any_trainer
from launch import in_turn
from mistakes import message_of
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


def in_place() -> nn.Module:
    """The second stage begins with what writes to its input, which torch takes for a leaf."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Linear(8, CLASSES)
    )


class Counting(nn.Module):
    """Its count is another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class Own(nn.Module):
    """A forward of its own: a parameter and a buffer that are no layer's, whole numbers and a residual
    that go from the beginning to the end, a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.into = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.sign, self.out = nn.Embedding(2, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sign = (x.sum(1) > 0).long()
        begun = x = torch.tanh(self.into(x)) + self.shift
        for block in self.blocks:
            x = block(x) * self.scale
        return self.out(x + begun + self.sign(sign))


class Scaled(Own):
    """Two inputs."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + scale[:, None]))


class Sharp(Own):
    """A single number is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    return any_trainer(**{"model": model, "strategy": "pipeline", **changes})


CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "all forward, then all backward": {"strategy": Pipeline(schedule="gpipe", micro_batches=3)},
    "cut by name, one micro-batch": {"strategy": Pipeline(split=["3"], micro_batches=1)},
    "cut before what writes in place": {"model": in_place, "strategy": Pipeline(split=["1"])},
    "cut inside a block": {"strategy": Pipeline(split=["0.2"])},
    "interleaved": {"strategy": Pipeline(stages_per_rank=2)},
    "a forward of its own, cut by name": {"model": Own, "strategy": Pipeline(split=["blocks.3"])},
    "a forward of its own, interleaved": {
        "model": Own,
        "strategy": Pipeline(stages_per_rank=2, schedule="gpipe"),
    },
    "a forward of its own, with care": {
        "model": Own,
        "activation_checkpointing": ["blocks.*"],
        "freeze": ["blocks.0", "shift"],
        "clip_norm": 0.1,
        "ema": 0.8,
        "accumulate": 2,
    },
    "a single number": {"model": Sharp, "ema": 0.8},
    "two inputs": {"model": Scaled, "features": ["features", "weight"]},
    "copies of one stage": {"mesh": {"data": 2, "pipe": 1}},
    "with care": {
        **CARE,
        "clip_value": 0.02,
        "class_weights": [1.0, 0.0, 2.0],
        "activation_checkpointing": ["0.*", "3"],
    },
    "labels that the loss ignores and weighs": {"loss": IGNORING},
    "a sum and its count": {"loss": counted, "clip_norm": 0.1, "accumulate": 2},
    "batches in which nothing counts": {"loss": IGNORING, "batch_size": 1, "model": without_norm},
    "a frozen stage": {"freeze": ["0"], "strategy": Pipeline(split=["1"])},
    "whole tensors": {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)},
}


@pytest.mark.parametrize(("case", "sizes"), in_turn(CASES, [(20, 12), (30, 2), (0, 24)]), ids=str)
def test_it_is_the_training_of_one_process(frames, case, sizes):
    """Also where a rank has few rows, or none."""
    as_one_process(trainer_of(**CASES[case]), frames(*sizes))


def test_the_passes_are_those_of_a_pipeline(frames):
    trained = trainer_of().fit(frames(20, 12))
    assert "pipeline" in trained.history.timings()
    assert "backward" not in trained.history.timings()


def test_batch_norm_over_the_mini_batch_of_a_pipeline(frames):
    """Its ranks' rows are one mini-batch, as those of a single replica are: here all the data."""
    run = trainer_of(model=normed, batch_size=32, strategy=Pipeline(micro_batches=1))
    there, _ = as_one_process(run, frames(20, 12), replicas=1)
    assert there.module[1].num_batches_tracked == 6


def test_trying_a_stage_leaves_nothing(frames):
    """A micro-batch of another size is tried first: counted once, and drawn for once."""
    df, layers = frames(20, 12), [*normed(), nn.Dropout(0.5), Counting()]
    several = partial(nn.Sequential, *layers)
    run = trainer_of(model=several, batch_size=12, strategy=Pipeline(micro_batches=2))
    one, other = run.fit(df), run.fit(df)
    assert one.module[1].num_batches_tracked == one.module[-1].calls == 12
    assert one.history.losses == other.history.losses
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, other.module.state_dict()[name])


@pytest.mark.parametrize(
    ("made", "how", "sizes"),
    [(model, Pipeline(stages_per_rank=2), (20, 12)), (Own, Pipeline(), (0, 24))],
    ids=["interleaved", "a forward of its own"],
)
def test_validation_is_that_of_one_process(frames, made, how, sizes):
    """Ranks have different numbers of batches to validate; the best weights are kept in stages."""
    df = frames(*sizes)
    there, _ = as_one_process(trainer_of(model=made, strategy=how, **validated(df)), df)
    assert len(there.history.validations) == 3


@pytest.mark.parametrize("precision", [{"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_lower_precision(frames, precision):
    """SGD, as Adam would not see gradients that are a loss scale too large."""
    df, run = frames(20, 12), trainer_of(optimizer=partial(torch.optim.SGD, lr=0.3), **precision)
    validation = sparkdl.Validation(df)
    there = replace(run, validation=validation).fit(df)
    exact = replace(run, engine="local", precision="fp32").fit(df)
    assert there.history.losses == pytest.approx(exact.history.losses, rel=2e-2)
    assert there.history.losses != exact.history.losses
    assert all(p.dtype == torch.float32 for p in there.module.parameters())


def test_it_goes_on_with_the_optimizer_state_it_kept(frames):
    df, run = frames(16, 16), trainer_of(optimizer=partial(torch.optim.Adafactor, lr=1e-2))
    goes_on_with_kept_state(run, df)


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


def test_several_tensors_go_from_stage_to_stage(frames):
    df = frames(20, 12)
    validation = sparkdl.Validation(df)
    run = trainer_of(model=lambda: nn.Sequential(Pair(), Joined()), validation=validation)
    there, _ = as_one_process(run, df)
    assert len(there.history.validations) == 1


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


def test_what_is_no_tensor_stays_within_a_stage(frames):
    df = frames(20, 12)
    named = partial(nn.Sequential, Named(), Unnamed(), nn.Linear(8, CLASSES))
    assert message_of(
        ModelError, trainer_of(model=named, strategy=Pipeline(split=["1"])).fit, df
    ) == (
        'strategy="pipeline" sends tensors from stage to stage, and "0" puts out a dict: cut '
        "elsewhere, strategy=sparkdl.Pipeline(split=[...]), or let it put out a tensor or a tuple of "
        "tensors."
    )
    as_one_process(trainer_of(model=named, strategy=Pipeline(split=["2"])), df)


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


@pytest.mark.parametrize("kind", ["dict", "Output"])
def test_an_output_that_has_no_tensors_alone_is_told_before_training(frames, kind):
    made = partial(nn.Sequential, nn.Linear(WIDTH, 8), nn.Tanh(), Labelled(kind))
    run = trainer_of(model=made, loss=loss_of_labelled)
    assert message_of(ModelError, run.fit, frames(12, 12)) == (
        'strategy="pipeline" needs a model that puts out a tensor or a plain tuple of tensors, and '
        f'Sequential puts out a {kind}: change that, or use strategy="fsdp".'
    )


class Fails(nn.Module):
    """Raises in a pass of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = itertools.count(1).__next__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.passes() == 3 and os.environ.get("RANK") == "1":
            raise ValueError("an operation of the user's")
        return x


def test_a_mistake_of_the_model_in_training_is_told_in_the_first_line(frames):
    made = partial(nn.Sequential, nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES), Fails())
    assert re.match(
        r"iteration \d, epoch \d: rank 1 on \S+ failed\. ValueError: an operation of the user's\n",
        message_of(TrainingError, trainer_of(model=made).fit, frames(12, 12)),
    )


class Explodes(nn.Module):
    """In the third pass a gradient is not finite, and the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, 8), itertools.count(1).__next__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.passes() == 3:
            x = x + torch.sqrt(self.layer.weight.sum() * 0.0)
        return self.layer(x)


def test_a_gradient_that_is_not_finite_is_told_or_left_out(frames):
    df = frames(20, 12)
    exploding = lambda: nn.Sequential(Explodes(), nn.Linear(8, CLASSES))  # noqa: E731
    run = trainer_of(model=exploding, strategy=Pipeline(micro_batches=1))
    with pytest.raises(TrainingError, match=r'the gradient of "0\.layer\.weight"'):
        run.fit(df)
    trained = replace(run, on_nan="skip").fit(df)
    assert len(trained.history) == 6
    assert all(torch.isfinite(p).all() for p in trained.module.parameters())


class Lost(nn.Module):
    """What comes out is no number in the third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = itertools.count(1).__next__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * math.nan if self.training and self.passes() == 3 else x


def test_a_loss_that_is_not_finite_is_told_of_every_rank_whose_rows_it_is_of(frames):
    """The last stage's rank alone knows it."""
    lost = lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), Lost())  # noqa: E731
    run = trainer_of(model=lost, strategy=Pipeline(micro_batches=1))
    told = r"iteration \d, .*: the loss \(nan\) in replica 0; the loss \(nan\) in replica 1 \(mean"
    with pytest.raises(TrainingError, match=told):
        run.fit(frames(20, 12))


def tied() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
    layers[1].weight = layers[0].weight
    return nn.Sequential(*layers)


def with_a_table() -> nn.Module:
    table = nn.EmbeddingBag(4, 2, sparse=True)
    return nn.Sequential(nn.Linear(WIDTH, 2), nn.Sequential(Table(table), nn.Linear(2, CLASSES)))


class Table(nn.Module):
    def __init__(self, table: nn.EmbeddingBag) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.zeros(len(x), 1, dtype=torch.long))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "the class": (
        {"strategy": Pipeline},
        "strategy is the class Pipeline: give an instance, sparkdl.Pipeline().",
    ),
    "a word": (
        {"strategy": "pipelines"},
        'strategy="pipelines": use one of ddp, zero1, fsdp, tensor, pipeline, sparkdl.DDP(...), '
        'sparkdl.FSDP(...), sparkdl.Tensor(...) or sparkdl.Pipeline(...). Did you mean "pipeline"?',
    ),
    "split": (
        {"strategy": Pipeline(split="3")},
        'strategy=Pipeline(split=\'3\'): give a list of names of modules, such as ["3", "6"].',
    ),
    "micro_batches": (
        {"strategy": Pipeline(micro_batches=0)},
        "strategy=Pipeline(micro_batches=0): give a whole number of at least 1.",
    ),
    "schedule": (
        {"strategy": Pipeline(schedule="zb")},
        'strategy=Pipeline(schedule="zb"): use one of 1f1b, gpipe.',
    ),
    "copies that do not fit": (
        {"mesh": {"data": 3, "pipe": 2}},
        "mesh={'data': 3, 'pipe': 2} has 6 ranks, and there are 2 replicas: give sizes whose product "
        "is replicas.",
    ),
    "more stages than modules": (
        {"strategy": Pipeline(stages_per_rank=4)},
        'strategy="pipeline" with 8 stages: the model is a chain of 6 modules. Use fewer replicas, or '
        'copies of the pipeline, mesh={"data": ..., "pipe": ...}.',
    ),
    "too few cuts": (
        {"strategy": Pipeline(split=["1"], stages_per_rank=2)},
        "strategy=Pipeline(split=...) names 1 modules with which a stage begins, after the first: 4 "
        "stages need 3.",
    ),
    "cuts in disorder": (
        {"strategy": Pipeline(split=["2", "1", "3"], stages_per_rank=2)},
        "strategy=Pipeline(split=['2', '1', '3']): name them in the order of the model, and not the "
        "first module, with which the first stage begins.",
    ),
    "compression": (
        {"compression": sparkdl.TopK(0.1)},
        'compression with strategy="pipeline": torch sums the gradients itself. Use '
        'strategy="zero1", or leave compression out.',
    ),
    "compile": ({"compile": True}, 'compile does not go with strategy="pipeline": leave it out.'),
    "sync_batchnorm": (
        {"sync_batchnorm": True},
        'sync_batchnorm does not go with strategy="pipeline": leave it out.',
    ),
}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a cut that is not there": (
        {"strategy": Pipeline(split=["head"])},
        'strategy=Pipeline: no module of the chain is called "head". It has 0.0, 0.1, 0.2, 1, 2, 3.',
    ),
    "a sparse table": (
        {"model": with_a_table, "optimizer": torch.optim.SGD},
        'strategy="pipeline" does not go with the embedding "1.0.table", which has sparse=True: use '
        'strategy="ddp", or sparse=False.',
    ),
    "a block that is checkpointed": (
        {"activation_checkpointing": ["0"]},
        'strategy="pipeline" calls the members of "0" one by one: name these in '
        'activation_checkpointing, "0.*".',
    ),
    "parameters together": (
        {"optimizer": partial(torch.optim.LBFGS, max_iter=1)},
        'strategy="pipeline" updates each stage where it is, and optimizer LBFGS needs all parameters '
        'together: use strategy="ddp", or an optimizer that treats every parameter by itself.',
    ),
}
MISTAKES = {name: (changes, ParameterError, said) for name, (changes, said) in WRONG.items()}
MISTAKES |= {name: (changes, ModelError, said) for name, (changes, said) in UNFIT.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_the_data_are_read(frames, mistake):
    changes, error, message = MISTAKES[mistake]
    refused(lambda: trainer_of(**changes), frames(12, 12), error, message)


class Decides(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(-x if x.sum() > 0 else x)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


FORWARDS = {
    "it looks at values": (
        {"model": Decides},
        ModelError,
        "cannot follow that of Decides (test_pipelined.py, line ",
    ),
    "too few modules": (
        {"model": One},
        ParameterError,
        'strategy="pipeline" with 2 stages: the model is a chain of 1 modules. Use fewer replicas',
    ),
    "a cut that is not there": (
        {"model": Own, "strategy": Pipeline(split=["block.1"])},
        ModelError,
        'strategy=Pipeline: no module of the chain is called "block.1". Did you mean "blocks.1"? It '
        "has into, blocks.0, blocks.1, blocks.2, blocks.3, sign, out.",
    ),
}


@pytest.mark.parametrize("mistake", FORWARDS)
def test_a_forward_that_cannot_be_cut_is_told_before_training(frames, mistake):
    changes, error, message = FORWARDS[mistake]
    assert message in message_of(error, lambda: trainer_of(**changes).fit(frames(12, 12)))


class Shares(nn.Module):
    """A forward of its own that comes back to a tensor of its first layer, or to the layer itself."""

    def __init__(self, tensor: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.tensor = tensor
        if tensor:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.out(x if self.tensor else self.first(torch.tanh(x)))


@pytest.mark.parametrize(
    ("model", "first", "told"),
    [
        (tied, "1", '"0.weight" and "1.weight" are one tensor, in two stages.'),
        (
            partial(Shares, True),
            "second",
            '"first.weight" and "second.weight" are one tensor, in two',
        ),
        (partial(Shares, False), "second", '"first.weight" is in two stages.'),
    ],
)
def test_a_tensor_in_two_stages_is_told_before_training(frames, model, first, told):
    with pytest.raises(ModelError) as caught:
        trainer_of(model=model, strategy=Pipeline(split=[first])).fit(frames(12, 12))
    assert str(caught.value).startswith(f'strategy="pipeline": {told}')
    assert str(caught.value).endswith(
        " Name a cut that leaves it in one, strategy=sparkdl.Pipeline(split=[...]), or use "
        'strategy="fsdp".'
    )


def test_a_tensor_that_stays_in_one_stage_may_have_two_names(frames):
    trainer_of(model=tied, strategy=Pipeline(split=["2"])).fit(frames(12, 12))


def test_a_micro_batch_of_one_row_is_told_where_the_model_needs_more(frames):
    run = trainer_of(model=normed, batch_size=6, strategy=Pipeline(micro_batches=4))
    with pytest.raises(
        ModelError, match=r"replicas=2, micro_batches=4\. Choose another batch_size"
    ):
        run.fit(frames(6, 6))
    replace(run, strategy=Pipeline(micro_batches=3)).fit(frames(6, 6))

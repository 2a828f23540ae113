"""Weights, gradients and optimizer state cut over the ranks: the training of one process.

Torch scatters sums of gradients times the ranks' shares, which round otherwise than shares of the
sum: nothing here is equal to the bit, everything to 1e-5.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gang_training import (
    CARE,
    CLASSES,
    IGNORING,
    OWN,
    WIDTH,
    as_one_process,
    by_keyword,
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
from sparkdl import FSDP, ModelError, ParameterError, TrainingError

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
UNITS = FSDP(units=["0", "3"])


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    return any_trainer(**{"model": model, **changes})


def model() -> nn.Module:
    """No bias before the normalisation: its gradient is all rounding, which Adam makes large."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def plain() -> nn.Module:
    """Single rows are enough for it."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, CLASSES))


class Branch(nn.Module):
    """Which layers are used depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.training or len(x) > 3:
            return self.left(x) + self.right(x)
        return self.left(x)


CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "gathered once": {"strategy": FSDP(units=["0", "3"], reshard_after_forward=False)},
    "kept by the executor": {
        "strategy": FSDP(units=["0", "3"], cpu_offload=True),
        "clip_value": 0.02,
    },
    "with care": {
        "strategy": UNITS,
        **CARE,
        "clip_norm": 0.1,
        "ema": 0.8,
        "activation_checkpointing": ["0", "3"],
    },
    "a frozen layer": {"freeze": ["0"], "strategy": UNITS},
    "micro-batches that the loss ignores": {"loss": IGNORING, "accumulate": 4, "strategy": UNITS},
    "micro-batches without weight": {"weight": "weight", "accumulate": 4, "strategy": UNITS},
    "micro-batches, a sum and its count": {"loss": counted, "accumulate": 2, "clip_norm": 0.1},
    "its own loss": {**OWN, "strategy": "fsdp"},
    "batches in which nothing counts": {"loss": IGNORING, "batch_size": 1, "model": without_norm},
    "inputs by keyword, an output that is a dataclass": by_keyword("dataclass"),
}


@pytest.mark.parametrize(("case", "sizes"), in_turn(CASES, [(20, 12), (30, 2), (0, 24)]), ids=str)
def test_it_is_the_training_of_one_process(frames, case, sizes):
    """Also where a rank has fewer rows than micro-batches, or none."""
    single = sizes != (20, 12) or CASES[case].get("accumulate")
    run = trainer_of(strategy="fsdp", **({"model": plain} if single else {}))
    as_one_process(replace(run, **CASES[case]), frames(*sizes))


def test_a_rank_without_rows_beside_one_with_a_single_row(frames):
    """The last of three mini-batches: as few micro-batches as the other rank has rows."""
    as_one_process(trainer_of(model=plain, strategy=UNITS, accumulate=2), frames(9, 8))


def test_micro_batches_of_several_rows_for_a_batch_norm(frames):
    """A rank without rows gives it no single ones."""
    as_one_process(trainer_of(strategy=UNITS, accumulate=8, batch_size=32), frames(0, 64))


def test_validation_is_that_of_one_process(frames):
    """Ranks have different numbers of batches to validate; the best weights are kept in shards."""
    df = frames(20, 12)
    there, _ = as_one_process(trainer_of(strategy=UNITS, **validated(df, 4)), df)
    assert len(there.history.validations) == 3


@pytest.mark.parametrize(
    ("precision", "how"),
    [
        pytest.param({"precision": "bf16"}, UNITS, marks=pytest.mark.soak),
        ({"precision": "fp16"}, UNITS),
        ({"wire": "bf16"}, UNITS),
        ({"model": plain}, FSDP(units=["0", "3"], param_dtype="bf16")),
    ],
    ids=["computes in bf16", "computes in fp16", "sums in bf16", "gathers in bf16"],
)
def test_lower_precision(frames, precision, how):
    """SGD, as Adam would not see gradients that are a loss scale too large."""
    sgd = partial(torch.optim.SGD, lr=0.3)
    df, run = frames(20, 12), trainer_of(strategy=how, optimizer=sgd, **precision)
    there = run.fit(df)
    exact = trainer_of(model=run.model, optimizer=sgd, engine="local").fit(df)
    assert there.history.losses == pytest.approx(exact.history.losses, rel=2e-2)
    assert there.history.losses != exact.history.losses
    assert all(p.dtype == torch.float32 for p in there.module.parameters())


def test_a_parameter_that_some_rows_do_not_use(frames):
    """A rank that does not use it takes part in its sum with zero."""
    run = trainer_of(model=Branch, strategy=FSDP(units=["first"]), batch_size=12)
    as_one_process(run, frames(20, 4))


def test_it_goes_on_with_the_optimizer_state_it_kept(frames):
    df, run = frames(16, 16), trainer_of(strategy=UNITS)
    goes_on_with_kept_state(run, df)


class Explodes(nn.Module):
    """In the third pass of rank 1 a gradient is not finite, and the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, CLASSES), itertools.count(1).__next__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import os

        if self.training and self.passes() == 3 and os.environ.get("RANK") == "1":
            x = x + torch.sqrt(self.layer.weight.sum() * 0.0)
        return self.layer(x)


def test_a_gradient_that_is_not_finite_is_told_or_left_out(frames):
    df, run = frames(20, 12), trainer_of(model=Explodes, strategy="fsdp")
    with pytest.raises(TrainingError, match=r'the gradient of "layer\.weight"'):
        run.fit(df)
    trained = replace(run, on_nan="skip").fit(df)
    assert len(trained.history) == 6
    assert all(torch.isfinite(p).all() for p in trained.module.parameters())


class Odd(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, CLASSES)
        if what == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.0))
        elif what == "double":
            self.layers[1].double()
        elif what == "shared":
            self.layers[1].weight = self.layers[0].weight
        elif what == "unused":
            self.spare = nn.Linear(2, 2)
        elif what == "sparse":
            self.table = nn.Embedding(4, 2, sparse=True)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).float()
        return self.out(x) * getattr(self, "scale", 1.0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "the class": (
        {"strategy": FSDP},
        "strategy is the class FSDP: give an instance, sparkdl.FSDP().",
    ),
    "units": (
        {"strategy": FSDP(units="layers")},
        "strategy=FSDP(units='layers'): give a list of names or patterns, such as [\"layers.*\"].",
    ),
    "reshard_after_forward": (
        {"strategy": FSDP(reshard_after_forward=2)},
        "strategy=FSDP(reshard_after_forward=2): give True or False.",
    ),
    "cpu_offload": (
        {"strategy": FSDP(cpu_offload="yes")},
        "strategy=FSDP(cpu_offload='yes'): give True or False.",
    ),
    "cpu_offload and parts of layers": (
        {"strategy": [FSDP(cpu_offload=True), "tensor"], "mesh": {"shard": 2, "tensor": 1}},
        'strategy: "fsdp" and "tensor" together keep their weights where they compute: leave out '
        "cpu_offload=True.",
    ),
    "param_dtype": (
        {"strategy": FSDP(param_dtype="fp8")},
        'strategy=FSDP(param_dtype="fp8"): use one of fp32, bf16, fp16.',
    ),
    "copies that do not fit": (
        {"strategy": "fsdp", "mesh": {"shard": 3}},
        "mesh={'shard': 3} has 3 ranks, and there are 2 replicas: give sizes whose product is "
        "replicas.",
    ),
    "compression": (
        {"strategy": "fsdp", "compression": sparkdl.TopK(0.1)},
        'compression with strategy="fsdp": torch sums the gradients itself. Use '
        'strategy="zero1", or leave compression out.',
    ),
}
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a unit that is not there": (
        {"strategy": FSDP(units=["layer.*"]), "model": partial(Odd, "")},
        'strategy=FSDP: no submodule matches "layer.*". Did you mean "layers.1"? The model has layers, '
        "layers.0, layers.1, out.",
    ),
    "a list": (
        {"strategy": FSDP(units=["layers"]), "model": partial(Odd, "")},
        'strategy=FSDP: "layers" is a list of modules, which is never called itself: name its '
        'members, "layers.*".',
    ),
    "whole tensors": (
        {"strategy": "fsdp", "optimizer": partial(torch.optim.Adafactor, lr=1e-2)},
        'strategy="fsdp" cuts tensors, and optimizer Adafactor needs whole ones: use '
        'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.',
    ),
    "a sparse table": (
        {"strategy": "fsdp", "model": partial(Odd, "sparse"), "optimizer": torch.optim.SGD},
        'strategy="fsdp" does not go with the embedding "table", which has sparse=True: use '
        'strategy="zero1", or sparse=False.',
    ),
    "two dtypes": (
        {"strategy": "fsdp", "model": partial(Odd, "double")},
        'strategy="fsdp" needs one dtype: "layers.0.weight" is torch.float32 and "layers.1.weight" is '
        "torch.float64.",
    ),
    "a single number": (
        {"strategy": "fsdp", "model": partial(Odd, "scalar")},
        'strategy="fsdp" cuts parameters by rows, and "scale" is a single number: give it the shape '
        "[1], or make it a buffer.",
    ),
    "shared by units": (
        {"strategy": FSDP(units=["layers.*"]), "model": partial(Odd, "shared")},
        'strategy="fsdp": "layers.0.weight" is shared by several units. Name units that hold all of '
        'its places, strategy=sparkdl.FSDP(units=[...]), or use strategy="zero1".',
    ),
}
MISTAKES = {name: (changes, ParameterError, said) for name, (changes, said) in WRONG.items()}
MISTAKES |= {name: (changes, ModelError, said) for name, (changes, said) in UNFIT.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_the_data_are_read(frames, mistake):
    changes, error, message = MISTAKES[mistake]
    refused(lambda: trainer_of(**changes), frames(12, 12), error, message)


def test_a_parameter_that_is_never_used_is_told_before_training(frames):
    assert message_of(
        ModelError, trainer_of(strategy="fsdp", model=partial(Odd, "unused")).fit, frames(12, 12)
    ) == (
        'strategy="fsdp" needs a gradient of every parameter, and "spare.weight" gets none: freeze it '
        '(freeze=["spare.weight"]), or use strategy="zero1".'
    )

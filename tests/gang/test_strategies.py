"""Every strategy is the training of one process, with every option: a row each.

Torch scatters sums of gradients times the ranks' shares, adds up micro-batches, and multiplies by parts
of a layer, all of which round otherwise than one process: what is compared is so to 1e-5. What is equal
to the bit is compared in ``test_engine.py``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import strategy_models as models
import torch
from gang_training import (
    CARE,
    IGNORING,
    OWN,
    as_one_process,
    by_keyword,
    close,
    counted,
    goes_on_in_turn,
    goes_on_with_kept_state,
    validated,
    without_norm,
)
from gang_training import trainer_of as any_trainer
from launch import in_turn, soak_but
from own_optimizers import ScheduleFree
from pyspark import cloudpickle
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, SequenceParallel

import sparkdl
from sparkdl import FSDP, Pipeline, Tensor

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SIZES = [(20, 12), (30, 2), (0, 24)]
"""Rows of the ranks: also few, or none."""
ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2)
BUCKETS, UNITS = sparkdl.DDP(bucket_cap_mb=1e-4), FSDP(units=["0", "2"])
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
STRATEGIES: dict[str, Any] = {
    "ddp in buckets": BUCKETS,
    "zero1": "zero1",
    "fsdp": UNITS,
    "tensor": "tensor",
    "pipeline": "pipeline",
}
RESTING = "a norm in evaluation mode"
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "with care": {
        **CARE,
        "clip_norm": 0.1,
        "ema": 0.8,
        "class_weights": [1.0, 0.0, 2.0],
        "activation_checkpointing": ["0", "2"],
    },
    "labels that the loss ignores and weighs": {"loss": IGNORING, "clip_value": 0.02},
    "a sum and its count": {"loss": counted, "clip_norm": 0.1, "accumulate": 2},
    "nothing counts": {"loss": IGNORING, "batch_size": 1, "model": without_norm},
    "a frozen layer": {"freeze": ["0"]},
    "updates left out": {"model": models.fragile, "on_nan": "skip"},
    "buffers that follow rules": {"model": models.remembering, "accumulate": 2},
    "schedule-free": {"optimizer": partial(ScheduleFree, lr=0.3), "ema": 0.8},
    RESTING: {"model": models.resting},
}
FORWARD: dict[str, Any] = {"model": models.Own, "strategy": "pipeline"}
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"{word}, {option}": {"strategy": strategy, **OPTIONS[option]}
        for option in OPTIONS
        for word, strategy in STRATEGIES.items()
    },
    "exchanged": {"compression": sparkdl.TopK(1.0), "loss": counted},
    "zero1, its own loss": {**OWN, "strategy": "zero1"},
    "fsdp, its own loss": {**OWN, "strategy": "fsdp"},
    "fsdp, gathered once": {"strategy": FSDP(units=["0", "2"], reshard_after_forward=False)},
    "fsdp, a single number, with care": {
        **{"strategy": UNITS, "model": models.tempered, "clip_norm": 0.1, "ema": 0.8},
        **CARE,
    },
    "tensor, a single number": {"strategy": "tensor", "model": models.tempered, "clip_norm": 0.1},
    "fsdp, kept by the executor": {
        "strategy": FSDP(units=["0", "2"], cpu_offload=True),
        "clip_value": 0.02,
    },
    "fsdp, micro-batches that the loss ignores": {
        "strategy": UNITS,
        "loss": IGNORING,
        "accumulate": 4,
    },
    "fsdp, micro-batches that weigh nothing": {
        "strategy": UNITS,
        "model": models.remembering,
        "class_weights": [1.0, 0.0, 2.0],
        "accumulate": 4,
        "batch_size": 8,
    },
    "fsdp, inputs by keyword": {**by_keyword("dataclass"), "strategy": "fsdp"},
    "tensor, by hand": {"model": models.hidden, "strategy": BY_HAND},
    "tensor, what is whole between layers that are cut": {
        "model": models.Between,
        "strategy": Tensor(
            plan={"up": "column", "down": "row", "gate.up": "column", "gate.down": "row"}
        ),
        "activation_checkpointing": ["slope"],
    },
    "tensor, a transformer layer": {"model": models.Words, "strategy": "tensor"},
    "tensor, rows of a table": {"model": models.Words, "strategy": Tensor(plan={"table": "row"})},
    "tensor, in styles of torch's": {"model": models.Normed, "strategy": BY_SEQUENCE},
    "tensor, inputs by keyword": {**by_keyword(), "strategy": "tensor"},
    "tensor, shards of one rank": {"strategy": "tensor", "mesh": {"shard": 1, "tensor": 2}},
    "tensor, copies of layers that are whole": {
        "strategy": "tensor",
        "mesh": {"data": 2, "tensor": 1},
    },
    "pipeline, all forward, then all backward": {
        "strategy": Pipeline(schedule="gpipe", micro_batches=3)
    },
    "pipeline, one micro-batch": {"strategy": Pipeline(split=["3"], micro_batches=1)},
    "pipeline, cut before what writes in place": {
        "model": models.in_place,
        "strategy": Pipeline(split=["1"]),
    },
    "pipeline, cut inside a block": {"model": models.nested, "strategy": Pipeline(split=["0.2"])},
    "pipeline, interleaved": {"strategy": Pipeline(stages_per_rank=2)},
    "pipeline, a frozen stage": {"freeze": ["0"], "strategy": Pipeline(split=["1"])},
    "pipeline, copies of one stage": {"strategy": "pipeline", "mesh": {"data": 2, "pipe": 1}},
    "pipeline, whole tensors": {"strategy": "pipeline", "optimizer": ADAFACTOR},
    "pipeline, a forward of its own": {**FORWARD, "strategy": Pipeline(split=["blocks.3"])},
    "pipeline, a forward of its own, interleaved": {
        **FORWARD,
        "strategy": Pipeline(stages_per_rank=2, schedule="gpipe"),
    },
    "pipeline, a forward of its own, with care": {
        **FORWARD,
        "activation_checkpointing": ["blocks.*"],
        "freeze": ["blocks.0", "shift"],
        "clip_norm": 0.1,
        "ema": 0.8,
        "accumulate": 2,
    },
    "pipeline, a single number": {**FORWARD, "model": models.Sharp, "ema": 0.8},
    "pipeline, two inputs": {**FORWARD, "model": models.Scaled, "features": ["features", "weight"]},
}


VALIDATED = [
    *(
        f"{word}, {option}"
        for word in STRATEGIES
        for option in ("with care", "schedule-free", RESTING)
    ),
    *("tensor, a transformer layer", "tensor, inputs by keyword", "pipeline, interleaved"),
    *("pipeline, a forward of its own", "pipeline, a forward of its own, with care"),
]
"""Ranks have different numbers of batches to validate; the best weights are kept in parts."""
SPARED = [
    *(f"{word}, as it comes" for word in ("zero1", "fsdp", "tensor", "pipeline")),
    *(f"{word}, labels that the loss ignores and weighs" for word in ("zero1", "fsdp", "tensor")),
    *(f"{word}, a sum and its count" for word in ("ddp in buckets", "fsdp", "tensor")),
    *(f"{word}, nothing counts" for word in ("ddp in buckets", "zero1", "tensor")),
    *(f"{word}, a frozen layer" for word in ("ddp in buckets", "zero1", "fsdp", "pipeline")),
    *(f"{word}, updates left out" for word in ("ddp in buckets", "fsdp", "tensor")),
    *(f"{word}, schedule-free" for word in ("ddp in buckets", "zero1", "fsdp", "pipeline")),
    *(f"{word}, with care" for word in ("ddp in buckets", "tensor")),
    *(f"{word}, {RESTING}" for word in ("zero1", "tensor")),
    *("fsdp, its own loss", "fsdp, gathered once", "tensor, shards of one rank"),
    *("tensor, copies of layers that are whole", "pipeline, one micro-batch"),
    *("pipeline, all forward, then all backward", "pipeline, whole tensors"),
    *("pipeline, a forward of its own, with care", "pipeline, cut inside a block"),
    *("fsdp, micro-batches that the loss ignores", "tensor, by hand"),
]
"""They soak: another strategy has the option, or another row or test has both."""


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    return any_trainer(**{"model": models.layers, **changes})


@pytest.mark.parametrize(("row", "sizes"), in_turn(ROWS, SIZES, SPARED), ids=str)
def test_it_is_the_training_of_one_process(parts, row, sizes):
    rows, run = parts(*sizes), trainer_of(**ROWS[row])
    if row in VALIDATED:
        run = replace(run, **validated(rows))
    there, here = as_one_process(run, rows)
    assert len(there.history.validations) == (3 if row in VALIDATED else 0)
    skipped = [record["skipped"] for record in here.history]
    assert [record["skipped"] for record in there.history] == skipped
    assert (0 < sum(skipped) < len(skipped)) == (run.on_nan == "skip")


FRAGILE = {"model": models.FragileRow, "on_nan": "skip"}
FIRST = FSDP(units=["layers.0"])
WHOLE = {"batch_size": 32, "model": models.normed}
UNEVEN: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, Any]]] = {
    "a rank without rows beside one with a single row": (
        {"strategy": UNITS, "accumulate": 2},
        (9, 8),
        {},
    ),
    "micro-batches of several rows for a batch norm": (
        {**WHOLE, "strategy": UNITS, "accumulate": 8},
        (0, 64),
        {},
    ),
    "a parameter that some rows do not use": (
        {"strategy": FSDP(units=["first"]), "model": models.Branch, "batch_size": 12},
        (20, 4),
        {},
    ),
    "a single number on a rank without rows": ({**FRAGILE, "strategy": FIRST}, (0, 24), {}),
    "a single number on a pipeline without rows": (
        {**FRAGILE, "strategy": ["pipeline", FIRST], "mesh": {"pipe": 1, "shard": 2}},
        (0, 24),
        {},
    ),
    "batch norm of all parts": ({**WHOLE, "strategy": "tensor"}, (20, 12), {"replicas": 1}),
    "batch norm of all stages": (
        {**WHOLE, "strategy": Pipeline(micro_batches=1)},
        (20, 12),
        {"replicas": 1},
    ),
}
"""The trainers, the rows of the ranks, and what one process does otherwise: there the rows of all
ranks of a model that is cut are one mini-batch."""


@pytest.mark.parametrize("case", UNEVEN)
def test_rows_that_do_not_come_out_even(parts, case):
    changes, sizes, alone = UNEVEN[case]
    rows = parts(*sizes)
    here = parts(sum(sizes)) if alone else rows
    as_one_process(trainer_of(**changes), rows, here, **alone)


PRECISIONS: dict[str, dict[str, Any]] = {
    "fsdp, bf16": {"strategy": UNITS, "precision": "bf16"},
    "fsdp, fp16": {"strategy": UNITS, "precision": "fp16"},
    "fsdp, sums in bf16": {"strategy": UNITS, "wire": "bf16"},
    "fsdp, gathers in bf16": {"strategy": FSDP(units=["0", "2"], param_dtype="bf16")},
    "tensor, bf16": {"strategy": "tensor", "precision": "bf16"},
    "tensor, fp16": {"strategy": "tensor", "precision": "fp16", "mesh": {"shard": 1, "tensor": 2}},
    "pipeline, bf16": {"strategy": "pipeline", "precision": "bf16"},
    "pipeline, fp16": {"strategy": "pipeline", "precision": "fp16"},
}


QUICK = ["fsdp, sums in bf16", "fsdp, gathers in bf16", "tensor, fp16", "pipeline, fp16"]


@pytest.mark.parametrize("case", soak_but(QUICK, PRECISIONS))
def test_lower_precision(parts, case):
    """SGD, as Adam would not see gradients that are a loss scale too large."""
    rows, sgd = parts(20, 12), partial(torch.optim.SGD, lr=0.3)
    validation = sparkdl.Validation(rows, every=sparkdl.every(3), batch_size=7)
    there = trainer_of(**PRECISIONS[case], optimizer=sgd, validation=validation).fit(rows)
    exact = trainer_of(engine="local", optimizer=sgd, validation=validation).fit(rows)
    for one, other in zip(there.history.validations, exact.history.validations, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=2e-2)
    assert there.history.losses == pytest.approx(exact.history.losses, rel=2e-2)
    assert there.history.losses != exact.history.losses
    assert all(p.dtype == torch.float32 for p in there.module.parameters())


@pytest.mark.parametrize("strategy", soak_but(["fsdp", "pipeline"], ["fsdp", "tensor", "pipeline"]))
def test_it_goes_on_with_the_optimizer_state_it_kept(parts, strategy):
    """This holds for a parameter of one row, which both ranks have, too."""
    optimizer = {"optimizer": ADAFACTOR} if strategy == "pipeline" else {}
    goes_on_with_kept_state(trainer_of(strategy=strategy, **optimizer), parts(16, 16))


WAYS: list[dict[str, Any]] = [
    {"strategy": "tensor"},
    {"strategy": UNITS},
    {"strategy": "zero1"},
    {"strategy": Pipeline(stages_per_rank=2)},
    {"strategy": BY_HAND},
    {"strategy": "fsdp"},
    {"strategy": Pipeline(split=["2"])},
    {"engine": "local", "slices": 3},
]


@pytest.mark.soak
def test_checkpoints_are_cut_anew(parts, tmp_path):
    """Every strategy goes on from the checkpoint of another: the training of one process."""
    ended, whole = goes_on_in_turn(WAYS, parts(20, 12), tmp_path, model=models.hidden, ema=0.9)
    assert ended.history.losses == pytest.approx(whole.history.losses, rel=1e-5, abs=1e-5)
    close(whole, ended)
    close(whole.ema, ended.ema)

"""Training with the gang engine as a user sees it: checkpoints, ranks without rows, mistakes."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gang_training import (
    CLASSES,
    IGNORING,
    OWN,
    WIDTH,
    as_one_process,
    counted,
    goes_on_in_turn,
    refused,
    same,
    trainer_of,
    without_norm,
)
from mistakes import message_of
from pyspark import cloudpickle
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparkdl
from sparkdl import ParameterError, TrainingError
from sparkdl.settings import Settings

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.usefixtures("nothing_left")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Routed(nn.Module):
    """A branch that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Fails(nn.Module):
    """Raises in the third forward pass of rank 1."""

    def __init__(self, how: str, folder: str) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, CLASSES), itertools.count(1).__next__
        self.how, self.folder = how, folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.passes() == 3 and os.environ.get("RANK") == "1":
            if self.how == "raise":
                raise RuntimeError("an operation of the user's")
            if not os.path.exists(f"{self.folder}/struck"):
                Path(self.folder, "struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


@pytest.mark.parametrize("sizes", [(30, 2), (0, 24)], ids=str)
def test_ranks_without_rows_take_part(frames, sizes):
    """In some iterations one has none, or in all."""
    df, run = frames(*sizes), trainer_of(strategy="zero1", model=partial(nn.Linear, WIDTH, CLASSES))
    same(run.fit(df), replace(run, engine="local", slices=2).fit(df))


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("zero1", (32, 32)), (sparkdl.DDP(bucket_cap_mb=1e-4), (0, 64))],
    ids=["zero1", "buckets"],
)
def test_micro_batches_of_several_rows_for_a_batch_norm(frames, strategy, sizes):
    """A rank without rows gives it no single ones."""
    df, run = frames(*sizes), trainer_of(strategy=strategy, accumulate=8, batch_size=32)
    same(run.fit(df), replace(run, engine="local", slices=2 if strategy == "zero1" else 1).fit(df))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_rows_of_varying_length_are_told_before_training(spark, strategy):
    rows = [([0.5] * (1 + n % WIDTH), n % CLASSES) for n in range(16)]
    df = spark.createDataFrame(rows, "features array<double>, label long")
    varying = sparkdl.Sequence(max_length=WIDTH)
    run = trainer_of(model=perceptron, strategy=strategy, columns={"features": varying})
    assert message_of(ParameterError, run.fit, df) == (
        f'strategy="{strategy}" needs inputs of one shape, and column "features" is padded to the '
        "longest row of each mini-batch: pad it to one length, "
        "sparkdl.Sequence(max_length=..., pad_to_max=True)."
    )
    run = replace(run, columns={"features": replace(varying, pad_to_max=True)})
    as_one_process(run, df)


class Fragile(nn.Module):
    """Its gradient is not a number where a score is high; what it puts out is what goes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x.detach() > 0.35
        return x + torch.sqrt(torch.where(high, x - x.detach(), 1.0)) - torch.where(high, 0.0, 1.0)


def fragile() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
        Fragile(),
    )


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor", "pipeline"])
def test_the_same_updates_are_left_out_as_in_one_process(frames, strategy):
    df, run = frames(20, 12), trainer_of(model=fragile, strategy=strategy, on_nan="skip")
    there, here = as_one_process(run, df)
    skipped = [record["skipped"] for record in here.history]
    assert 0 < sum(skipped) < len(skipped)
    assert [record["skipped"] for record in there.history] == skipped


class Edge(nn.Module):
    """The gradient of its weight is not a number where a row has a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x.abs() * self.weight)


def on_the_edge() -> nn.Module:
    return nn.Sequential(Edge(), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


@pytest.mark.parametrize("strategy", [sparkdl.DDP(bucket_cap_mb=1e-4), "fsdp"], ids=str)
def test_the_rows_with_which_a_rank_keeps_company_do_no_harm(spark, strategy):
    """They are the first ones of the data, and one rank has none of its own."""
    rows = [([float(n + k) for k in range(WIDTH)], n % CLASSES) for n in range(24)]
    rdd = spark.sparkContext.parallelize([[], rows], 2).flatMap(list)
    df = spark.createDataFrame(rdd, "features array<double>, label long")
    run = trainer_of(model=on_the_edge, strategy=strategy, on_nan="skip")
    there, here = as_one_process(run, df)
    skipped = [record["skipped"] for record in here.history]
    assert 0 < skipped[-1] < len(skipped)
    assert [record["skipped"] for record in there.history] == skipped


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
    )


@pytest.mark.parametrize(
    "strategy",
    ["ddp", sparkdl.DDP(bucket_cap_mb=1e-4), "fsdp", "tensor", "pipeline"],
    ids=str,
)
def test_batches_in_which_nothing_counts_leave_statistics_as_they_were(spark, strategy):
    rows = [([float(n + k) for k in range(WIDTH)], 2) for n in range(16)]
    df = spark.createDataFrame(rows, "features array<double>, label long")
    run = trainer_of(model=normed, loss=IGNORING, strategy=strategy)
    there, here = run.fit(df), replace(run, engine="local").fit(df)
    for name, tensor in here.module.state_dict().items():
        assert torch.equal(there.module.state_dict()[name], tensor), name
    assert there.module[3].num_batches_tracked == 0


SUMS: dict[str, dict[str, Any]] = {
    "ddp in buckets": {"strategy": sparkdl.DDP(bucket_cap_mb=1e-4), "accumulate": 2},
    "zero1, clipped": {"strategy": "zero1", "clip_norm": 0.1},
    "exchanged": {"compression": sparkdl.TopK(1.0)},
    "batches in which nothing counts": {"batch_size": 1},
    "fp16": {"precision": "fp16"},
    "a model's own": {**OWN, "strategy": "zero1"},
}


@pytest.mark.parametrize("case", SUMS)
def test_sums_and_their_counts_are_those_of_one_process(frames, case):
    run = trainer_of(**{"loss": counted, "model": without_norm, **SUMS[case]})
    if case != "fp16":
        as_one_process(run, frames(23, 9))
        return
    there, here = run.fit(frames(23, 9)), replace(run, engine="local").fit(frames(23, 9))
    assert there.history.losses == pytest.approx(here.history.losses, rel=1e-2, abs=1e-2)


def test_parameters_without_a_gradient_stay(frames):
    df, run = frames(12, 12), trainer_of(model=Routed)
    trained = run.fit(df)
    same(trained, replace(run, engine="local", slices=1).fit(df))


class Checkpointed(nn.Module):
    """Computes its first layer again in backward, the old way: twice in one pass, for DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        hidden = [checkpoint(self.first, x, use_reentrant=True) for _ in range(2)]
        return self.last(torch.tanh(hidden[0] - 0.5 * hidden[1]))


DDPS = {
    "small buckets, not all used": ({"model": Routed}, sparkdl.DDP(bucket_cap_mb=0.0001)),
    "a static graph": ({"model": Routed}, sparkdl.DDP(static_graph=True)),
    "reentrant checkpoints": ({"model": Checkpointed}, sparkdl.DDP(static_graph=True)),
    "as zero1": ({}, sparkdl.DDP(shard_optimizer=True)),
}


@pytest.mark.parametrize("case", DDPS)
def test_what_torchs_ddp_is_told_changes_no_bit(frames, case):
    changes, strategy = DDPS[case]
    df, run = frames(20, 12), trainer_of(**changes, strategy=strategy)
    slices = 2 if strategy.shard_optimizer else 1
    same(run.fit(df), replace(run, engine="local", slices=slices).fit(df))


WAYS: list[dict[str, Any]] = [
    {"engine": "shuffle", "slices": 3},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"engine": "local", "slices": 3},
]


def test_engines_and_strategies_change_places_at_a_checkpoint(frames, tmp_path):
    """Also what a replica has left out of its compressed gradients so far is part of it."""
    alike = {"ema": 0.9, "compression": sparkdl.TopK(0.2)}
    ended, whole = goes_on_in_turn(WAYS, frames(20, 12), tmp_path, **alike)
    same(ended, whole)
    assert ended.ema is not None
    same(ended.ema, whole.ema)


def test_it_goes_on_from_an_earlier_result_with_its_optimizer_state(frames):
    df = frames(16, 16)
    whole = trainer_of(engine="local", slices=1, stop=sparkdl.max_epoch(2)).fit(df)
    half = trainer_of(keep_optimizer_state=True, stop=sparkdl.max_epoch(1)).fit(df)
    again = trainer_of(stop=sparkdl.max_epoch(1)).fit(df, start=half)
    assert len(whole.history) == 2 * len(again.history)
    passes = trainer_of()
    passes.partial_fit(df)
    same(passes.partial_fit(df), whole)


def test_a_mistake_of_the_model_in_training_is_one_error_with_the_rank(frames, tmp_path):
    run = trainer_of(model=partial(Fails, "raise", str(tmp_path)))
    assert re.match(
        r"iteration \d, epoch \d: rank 1 on \S+ failed\. RuntimeError: an operation of the user's\n",
        message_of(TrainingError, run.fit, frames(12, 12)),
    )


def test_in_local_mode_a_lost_rank_costs_a_new_beginning(frames, tmp_path, caplog):
    df = frames(12, 12)
    run = trainer_of(model=partial(Fails, "kill", str(tmp_path)))
    with caplog.at_level("WARNING", logger="sparkdl"):
        trained = run.fit(df)
    assert (tmp_path / "struck").exists()
    same(trained, replace(run, engine="local", slices=1).fit(df))
    (line,) = [r.getMessage() for r in caplog.records if "Continued from" in r.getMessage()]
    assert re.fullmatch(
        r"(iteration \d, epoch \d|setting up the ranks): rank 1 on \S+ went away \(the process "
        r"died or was killed, or its node is out of reach\)\. Continued from the beginning and "
        r"repeated \d iterations?: \d+\.\d s\.",
        line,
    )


class Dated(torch.optim.SGD):
    """Keeps what cannot be written."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["since"] = datetime.date(2026, 1, 1)


def test_a_snapshot_that_cannot_be_taken_stops_no_training(frames, caplog, monkeypatch):
    df = frames(12, 12)
    run = trainer_of(optimizer=partial(Dated, lr=0.1))
    expected = replace(run, engine="local", slices=1).fit(df)
    monkeypatch.setattr("sparkdl.engines.registry.is_local", lambda context: False)
    settings = Settings(progress="false", snapshot_seconds=0.0)
    monkeypatch.setattr("sparkdl.train.fit.settings_of", lambda *_: settings)
    with caplog.at_level("WARNING", logger="sparkdl"):
        trained = run.fit(df)
    same(trained, expected)
    said = [r.getMessage() for r in caplog.records if "snapshot" in r.getMessage()]
    assert len(said) == 6
    assert re.match(r"no snapshot could be taken: taking a snapshot: \w+Error: .*date", said[0])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"strategy": "fsdp3"},
        ParameterError,
        'strategy="fsdp3": use one of ddp, zero1, fsdp, tensor, pipeline, sparkdl.DDP(...), '
        'sparkdl.FSDP(...), sparkdl.Tensor(...) or sparkdl.Pipeline(...). Did you mean "fsdp"?',
    ),
    (
        {"strategy": sparkdl.DDP},
        ParameterError,
        "strategy is the class DDP: give an instance, sparkdl.DDP().",
    ),
    (
        {"strategy": sparkdl.DDP(bucket_cap_mb=0)},
        ParameterError,
        "strategy=DDP(bucket_cap_mb=0): give a number of megabytes above 0.",
    ),
    (
        {"strategy": sparkdl.DDP(static_graph="yes")},  # type: ignore[arg-type]
        ParameterError,
        "strategy=DDP(static_graph='yes'): give True or False.",
    ),
    (
        {"strategy": sparkdl.DDP(static_graph=True, find_unused_parameters=True)},
        ParameterError,
        "strategy=DDP(static_graph=True, find_unused_parameters=True): passes are alike, or they are "
        "not.",
    ),
    (
        {"accumulate": 2, "strategy": sparkdl.DDP(static_graph=True)},
        ParameterError,
        "strategy=DDP(static_graph=True) with accumulate=2: torch records the graph in a backward "
        "pass that sums gradients, and only the last part of an accumulated batch does. Leave one "
        "of the two out.",
    ),
    (
        {"local_steps": 2},
        ParameterError,
        'local_steps=2 with engine="gang": its ranks do not average optimizer state. Use '
        'engine="shuffle", or consistency=sparkdl.DiLoCo(inner_steps=...).',
    ),
    (
        {"slices": 2},
        ParameterError,
        'slices=2 with engine="gang": the strategy decides how the state is divided. Leave slices '
        "out.",
    ),
    (
        {"replicas": 3},
        ParameterError,
        "a gang of 3 ranks needs 3 task slots at once, and this session has 2: ask for at most 2 "
        "ranks, or for more executors or cores.",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), BAD, ids=[next(iter(case[0])) for case in BAD]
)
def test_mistakes_are_told_before_the_data_are_read(frames, changes, error, message):
    refused(lambda: trainer_of(**changes), frames(12, 12), error, message)


@pytest.mark.parametrize(
    "way",
    [
        {"strategy": "pipeline"},
        {"strategy": "tensor", "mesh": {"data": 1, "tensor": 2}},
        {"strategy": sparkdl.FSDP(units=["0", "2"])},
    ],
    ids=["pipeline", "tensor", "fsdp"],
)
def test_other_engines_take_no_notice(frames, way):
    """One word changes the engine."""
    df, run = frames(12, 12), trainer_of(model=perceptron, engine="local")
    assert replace(run, **way).fit(df).history.losses == run.fit(df).history.losses

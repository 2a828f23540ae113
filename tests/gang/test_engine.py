"""The gang engine as a user sees it: the bits of one process, checkpoints, a lost rank."""

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
import strategy_models as models
import torch
from gang_training import (
    CLASSES,
    IGNORING,
    WIDTH,
    as_one_process,
    goes_on_in_turn,
    same,
    trainer_of,
    without_norm,
)
from mistakes import message_of
from pyspark import cloudpickle
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparkdl
from sparkdl import ParameterError
from sparkdl.session import SessionFacts
from sparkdl.settings import Settings

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
BUCKETS = sparkdl.DDP(bucket_cap_mb=1e-4)


class Routed(nn.Module):
    """A branch that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Checkpointed(nn.Module):
    """Computes its first layer again in backward, the old way: twice in one pass, for DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        hidden = [checkpoint(self.first, x, use_reentrant=True) for _ in range(2)]
        return self.last(torch.tanh(hidden[0] - 0.5 * hidden[1]))


SAME: dict[str, tuple[dict[str, Any], tuple[int, int], int]] = {
    "a rank without rows": ({"strategy": "zero1", "model": without_norm}, (0, 24), 2),
    "micro-batches for a batch norm": (
        {"strategy": BUCKETS, "accumulate": 8, "batch_size": 32},
        (0, 64),
        1,
    ),
    "parameters without a gradient": ({"model": Routed}, (12, 12), 1),
    "small buckets, not all used": ({"model": Routed, "strategy": BUCKETS}, (20, 12), 1),
    "reentrant checkpoints": (
        {"model": Checkpointed, "strategy": sparkdl.DDP(static_graph=True)},
        (20, 12),
        1,
    ),
    "fp16": ({"strategy": "zero1", "precision": "fp16"}, (20, 12), 2),
    "as zero1": ({"strategy": sparkdl.DDP(shard_optimizer=True)}, (20, 12), 2),
}
"""The trainers, the rows of the ranks, and the slices that one process has then."""


@pytest.mark.parametrize("case", SAME)
def test_the_bits_are_those_of_one_process(parts, case):
    """A rank without rows gives a batch norm no single ones; what torch's DDP is told changes none."""
    changes, sizes, slices = SAME[case]
    rows, run = parts(*sizes), trainer_of(**changes)
    same(run.fit(rows), replace(run, engine="local", slices=slices).fit(rows))


class Edge(nn.Module):
    """The gradient of its weight is not a number where a row has a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x.abs() * self.weight)


def on_the_edge() -> nn.Module:
    return nn.Sequential(Edge(), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def numbered(records: list[dict[str, Any]], **changes: Any) -> None:
    """Let features be whole numbers from 0 on, and other values as they are given."""
    for n, record in enumerate(records):
        record.update(features=[float(n + k) for k in range(WIDTH)], **changes)


@pytest.mark.parametrize("strategy", [BUCKETS, "fsdp"], ids=str)
def test_the_rows_with_which_a_rank_keeps_company_do_no_harm(parts, strategy):
    """They are the first ones of the data, and one rank has none of its own."""
    rows = parts(0, 24)
    numbered(rows.records[1])
    run = trainer_of(model=on_the_edge, strategy=strategy, on_nan="skip")
    there, here = as_one_process(run, rows)
    skipped = [record["skipped"] for record in here.history]
    assert 0 < sum(skipped) < len(skipped)
    assert [record["skipped"] for record in there.history] == skipped


@pytest.mark.parametrize("strategy", [BUCKETS, "fsdp", "pipeline"], ids=str)
def test_batches_in_which_nothing_counts_leave_statistics_as_they_were(parts, strategy):
    rows = parts(8, 8)
    for records in rows.records:
        numbered(records, label=2)
    run = trainer_of(model=models.normed, loss=IGNORING, strategy=strategy)
    there, here = run.partial_fit(rows), replace(run, engine="local").partial_fit(rows)
    for name, tensor in here.module.state_dict().items():
        assert torch.equal(there.module.state_dict()[name], tensor), name
    assert there.module[3].num_batches_tracked == 0


class Dated(torch.optim.SGD):
    """Keeps what cannot be written."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["since"] = datetime.date(2026, 1, 1)


def test_a_snapshot_that_cannot_be_taken_stops_no_training(parts, caplog, monkeypatch):
    rows = parts(12, 12)
    run = trainer_of(optimizer=partial(Dated, lr=0.1))
    expected = replace(run, engine="local", slices=1).fit(rows)
    monkeypatch.setattr("sparkdl.engines.delivery.is_local", lambda context: False)
    settings = Settings(progress="false", snapshot_seconds=0.0)
    monkeypatch.setattr(SessionFacts, "settings", settings)
    with caplog.at_level("WARNING", logger="sparkdl"):
        trained = run.fit(rows)
    same(trained, expected)
    said = [r.getMessage() for r in caplog.records if "snapshot" in r.getMessage()]
    assert len(said) == 6
    assert re.match(r"no snapshot could be taken: taking a snapshot: \w+Error: .*date", said[0])


def test_other_engines_take_no_notice(parts):
    """One word changes the engine."""
    rows, run = parts(12, 12), trainer_of(model=without_norm, engine="local")
    way = {"strategy": "tensor", "mesh": {"data": 1, "tensor": 2}}
    assert replace(run, **way).fit(rows).history.losses == run.fit(rows).history.losses


# In a barrier stage


WAYS: list[dict[str, Any]] = [
    {"engine": "shuffle", "slices": 3},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"engine": "local", "slices": 3},
]


@pytest.mark.spark
@pytest.mark.soak
def test_engines_and_strategies_change_places_at_a_checkpoint(frames, tmp_path, nothing_left):
    """Also what a replica has left out of its compressed gradients so far is part of it."""
    alike = {"ema": 0.9, "compression": sparkdl.TopK(0.2)}
    ended, whole = goes_on_in_turn(WAYS, frames(20, 12), tmp_path, **alike)
    same(ended, whole)
    assert ended.ema is not None
    same(ended.ema, whole.ema)


@pytest.mark.spark
def test_it_goes_on_from_an_earlier_result_with_its_optimizer_state(frames, nothing_left):
    df = frames(16, 16)
    whole = trainer_of(engine="local", slices=1, stop=sparkdl.max_epoch(2)).fit(df)
    half = trainer_of(keep_optimizer_state=True, stop=sparkdl.max_epoch(1)).fit(df)
    again = trainer_of(stop=sparkdl.max_epoch(1)).fit(df, start=half)
    assert len(whole.history) == 2 * len(again.history)
    passes = trainer_of()
    passes.partial_fit(df)
    same(passes.partial_fit(df), whole)


class Killed(nn.Module):
    """In the third forward pass of rank 1 its process ends, once."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(WIDTH, CLASSES), itertools.count(1).__next__
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        struck = Path(self.folder, "struck")
        if self.passes() == 3 and os.environ.get("RANK") == "1" and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


@pytest.mark.spark
def test_in_local_mode_a_lost_rank_costs_a_new_beginning(frames, tmp_path, caplog, nothing_left):
    df = frames(12, 12)
    run = trainer_of(model=partial(Killed, str(tmp_path)))
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


@pytest.mark.spark
def test_more_ranks_than_slots_are_told_before_the_data_are_read(spark, frames, nothing_left):
    df, scheduler = frames(12, 12), spark.sparkContext._jsc.sc().dagScheduler()
    before = scheduler.numTotalJobs()
    assert message_of(ParameterError, trainer_of(replicas=3).fit, df) == (
        "a gang of 3 ranks needs 3 task slots at once, and this session has 2: ask for at most 2 "
        "ranks, or for more executors or cores."
    )
    assert scheduler.numTotalJobs() == before

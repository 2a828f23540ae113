"""Plans in a session: what is measured, what "auto" chooses, and that a resumed run keeps it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdl
from sparkdl.planner import follow, probe
from sparkdl.planner.choice import Choice
from sparkdl.train import chosen

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "ITERATIONS", 9)
    monkeypatch.setattr(follow, "FEW", 4)
    monkeypatch.setattr(follow, "MEASURED", 4)
    monkeypatch.setattr(follow.CACHE, "_rows", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def trainer(**changes: Any) -> sparkdl.Trainer:
    fields: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        "batch_size": 16,
        "stop": sparkdl.max_epoch(3),
        **changes,
    }
    return sparkdl.Trainer(**fields)


@pytest.fixture(scope="module")
def data(spark: SparkSession) -> DataFrame:
    return spark.range(64).selectExpr(
        "array(float(rand(1)), float(rand(2))) AS features", "float(rand(3)) AS label"
    )


def weights(trained: sparkdl.TrainedModel) -> list[Any]:
    return [value.tolist() for value in trained.module.state_dict().values()]


@pytest.mark.slow
def test_auto_has_the_bits_of_what_it_chooses_and_a_resumed_run_keeps_it(
    data: DataFrame,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    where = sparkdl.Checkpoint(str(tmp_path / "run"), every=sparkdl.every_epoch())
    auto = trainer(engine="auto", checkpoint=where)
    trained = auto.fit(data)
    plan = trained.history.plan
    assert plan is not None
    assert plan["seconds"] > 0
    assert plan["fields"]["replicas"] == 2
    named = replace(trainer(), **plan["fields"]).fit(data)
    assert weights(named) == weights(trained)
    assert "planned in" in caplog.text
    assert " ms an iteration, measured " in caplog.text
    other = {"shuffle": "gang", "gang": "shuffle"}[plan["fields"]["engine"]]
    monkeypatch.setattr(chosen, "ranked", lambda rows, default: pytest.fail("it plans anew"))
    longer = replace(auto, stop=sparkdl.max_epoch(5))
    resumed = longer.fit(data, resume="latest")
    assert resumed.history.plan == plan
    assert len(resumed.history) == 20
    beyond = replace(longer, engine=other, stop=sparkdl.max_epoch(6)).fit(data, resume="latest")
    assert beyond.history.plan is None  # a trainer that names an engine counts
    short = replace(auto, checkpoint=None, stop=sparkdl.max_iteration(3)).fit(data)
    assert short.history.plan is None
    assert "3 iterations are too few to measure" in caplog.text


@pytest.mark.soak
def test_a_plan_of_a_small_fit(data: DataFrame, spark: SparkSession) -> None:
    plan = sparkdl.plan(trainer(), data)
    choices = {row.choice for row in plan.rows}
    assert {Choice("shuffle", 1), Choice("shuffle", 2), Choice("gang", 2, "zero1")} <= choices
    assert {"fsdp", "tensor", "pipeline"} <= {choice.strategy for choice in choices}
    assert str(plan).startswith("64 rows, batches of 16, 12 iterations, a model of 17 parameters; ")
    assert len(plan.trainer.fit(data).history) == 12
    again = sparkdl.plan(trainer(), data, trials=True)  # what the session costs is known
    assert any(row.measured for row in again.rows)
    far = sparkdl.plan(trainer(), data, cluster=sparkdl.Cluster(nodes=4, slots=2))
    assert "Cluster(nodes=4, slots=2, gbit=10); computed, not run" in str(far)
    norm = trainer(model=lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Flatten(0)))
    assert {row.choice.replicas for row in sparkdl.plan(norm, data).rows} == {2}
    frozen = sparkdl.plan(trainer(optimizer=partial(torch.optim.LBFGS, max_iter=1)), data)
    assert 'strategy="fsdp"' in str(frozen)
    with sparkdl.PlacedSamples.of(trainer(engine="auto"), data) as samples:
        assert {row.choice.replicas for row in sparkdl.plan(trainer(), samples).rows} == {2}
        searched = trainer(engine="auto", strategy="auto", replicas="auto").fit(samples)
        assert searched.history.plan is not None
    everything = trainer(engine="auto", strategy="auto", replicas="auto")
    assert everything.partial_fit(data).history.plan is not None
    assert everything.partial_fit(data).history.settings["replicas"] in (1, 2)

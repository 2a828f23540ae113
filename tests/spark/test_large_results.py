"""Models and states larger than what Spark lets through a job, or takes in one piece."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from launch import digest, soak_but
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.checkpoint import save as checkpointing
from sparkdl.checkpoint import store
from sparkdl.errors import CheckpointError
from sparkdl.spark import broadcasts
from sparkdl.train import preflight

pytestmark = pytest.mark.spark
WIDTH = 700
"""The model has 2 MB of weights, and with Adam's moments 6."""


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    )


cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def df(spark):
    generator = np.random.default_rng(0)
    rows = [(generator.normal(size=2).tolist(), i % 2) for i in range(48)]
    records = spark.sparkContext.parallelize(rows, 2)
    return spark.createDataFrame(records, "features array<float>, label long")


@pytest.fixture
def narrow(spark, monkeypatch):
    """A job may bring the driver 1 MB, and a broadcast has 1 MB."""
    conf = spark.sparkContext._jsc.sc().conf()
    before = conf.get("spark.driver.maxResultSize", "1g")
    monkeypatch.setattr(broadcasts, "PIECE_BYTES", 1_000_000)
    conf.set("spark.driver.maxResultSize", "1m")
    yield
    conf.set("spark.driver.maxResultSize", before)


def trainer(**changes) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-3),
        "batch_size": 16,
        "replicas": 2,
        "stop": sparkdl.max_iteration(3),
    }
    return sparkdl.Trainer(**{**values, **changes})


def trained_twice(df, **changes) -> tuple[str, str, str]:
    """With averages and the optimizer's state, which the second fit begins with; the model is a module
    instance there, so that it goes out as a whole. And predictions of it."""
    first = trainer(keep_optimizer_state=True, ema=0.9, **changes).fit(df)
    second = trainer(**changes, model=model()).fit(df, start=first)
    assert first.optimizer_state is not None
    assert first.ema is not None
    predicted = np.array([row.prediction for row in second.transform(df).collect()])
    with torch.no_grad():
        features = torch.tensor([list(row.features) for row in df.collect()])
        np.testing.assert_allclose(predicted, second.module(features).numpy(), rtol=1e-4, atol=1e-5)
    return digest(first.module), digest(first.ema.module), digest(second.module)


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["shuffle", "gang"]))
def test_what_is_larger_than_a_job_s_results_comes_back(spark, df, narrow, engine):
    changes = {"strategy": "zero1"} if engine == "gang" else {}
    found = trained_twice(df, engine=engine, **changes)
    if engine == "shuffle":
        assert found == trained_twice(df, engine="local")


@pytest.mark.soak
def test_partial_fit_brings_all_of_the_state(df, narrow):
    found = []
    for engine in ("local", "shuffle"):
        run = trainer(engine=engine)
        run.partial_fit(df)
        found.append(digest(run.partial_fit(df).module))
    assert found[0] == found[1]


# What fails when all iterations are done


LAST_HOOKS = ("on_iteration_end", "on_fit_end", "on_result")


class Fails(sparkdl.Callback):
    def __init__(self, hook: str, error: Exception) -> None:
        setattr(self, hook, self._fail)
        self._error = error

    def _fail(self, trainer, told) -> None:
        if isinstance(told, sparkdl.TrainedModel) or told.iteration == 3:
            raise self._error


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Where a model is kept that has no checkpoint."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("hook", "engine"),
    soak_but(
        [("on_result", "shuffle")],
        [(hook, engine) for hook in LAST_HOOKS for engine in ("local", "shuffle", "gang")],
    ),
)
def test_a_model_is_kept_where_something_fails_after_the_last_iteration(
    df, engine, hook, kept, caplog
):
    run = trainer(engine=engine, ema=0.9)
    error = OSError("the tracking server is away")
    with pytest.raises(OSError, match="the tracking server is away") as caught:
        replace(run, callbacks=[Fails(hook, error)]).fit(df)
    (note,) = caught.value.__notes__
    assert note in caplog.text
    path = re.search(rf"kept in the checkpoint ({kept}\S+):", note)[1]
    again, loaded = run.fit(df, resume=path), sparkdl.load(path, model=model)
    expected = run.fit(df)
    assert digest(loaded.module) == digest(expected.module)
    assert digest(again.module) == digest(expected.module)
    assert digest(again.ema.module) == digest(expected.ema.module)
    assert again.history.losses == expected.history.losses


def test_nothing_is_kept_of_a_run_that_had_more_to_do(df, kept):
    run = trainer(engine="local", stop=sparkdl.max_iteration(4))
    with pytest.raises(OSError, match="early") as caught:
        replace(run, callbacks=[Fails("on_iteration_end", OSError("early"))]).fit(df)
    assert not hasattr(caught.value, "__notes__")
    assert list(kept.iterdir()) == []


def test_the_last_checkpoint_is_told_of_where_it_has_the_model(df, kept, tmp_path):
    path = tmp_path / "run"
    checkpoint = sparkdl.Checkpoint(path, every=sparkdl.every(3))
    run = trainer(engine="local", checkpoint=checkpoint)
    error = sparkdl.TrainingError("the disk is full")
    with pytest.raises(
        sparkdl.TrainingError,
        match=rf"the disk is full\nTraining had finished, after 3 iterations\..*{path}/iter",
    ):
        replace(run, callbacks=[Fails("on_fit_end", error)]).fit(df)
    assert len(list(path.iterdir())) == 1


def test_executors_that_do_not_share_the_folder_hand_their_slices_over(df, kept, monkeypatch):
    def write_slice(*args):
        raise CheckpointError("there is no such folder")

    run = trainer(engine="local", slices=2)
    failing = replace(run, callbacks=[Fails("on_fit_end", OSError("away"))])
    monkeypatch.setattr(store.WriteSlice, "__call__", write_slice)
    with pytest.raises(OSError, match="away") as caught:
        failing.fit(df)
    path = re.search(rf"({kept}\S+):", caught.value.__notes__[0])[1]
    assert digest(run.fit(df, resume=path).module) == digest(run.fit(df).module)


def test_a_model_that_cannot_be_kept_is_told_of(df, kept, monkeypatch, caplog):
    monkeypatch.setattr(checkpointing.CheckpointStore, "commit", lambda *_: _raise("no room"))
    run = trainer(engine="local", callbacks=[Fails("on_fit_end", OSError("away"))])
    with caplog.at_level(logging.ERROR, "sparkdl"), pytest.raises(OSError, match="away") as caught:
        run.fit(df)
    assert "could not be kept in a checkpoint" in caught.value.__notes__[0]
    assert "no room" in caplog.text
    assert list(kept.iterdir()) == []


def _raise(reason: str) -> None:
    raise CheckpointError(reason)


# What is known before


def test_a_model_that_cannot_come_back_is_told_of_before_training(df, num_jobs, monkeypatch):
    monkeypatch.setattr(preflight, "SMALL_BYTES", 0)
    monkeypatch.setattr(preflight, "left_to_process", lambda: 1000.0)
    before = num_jobs()
    told = r"to collect it after training, the driver's Python needs 0\.0 GB"
    with pytest.raises(sparkdl.ParameterError, match=told):
        trainer().fit(df)
    assert num_jobs() == before

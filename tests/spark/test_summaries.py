"""The summaries in real fits."""

from __future__ import annotations

import gc
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdl
import sparkdl.mlflow
from sparkdl.codec.describe import plain_parameters
from sparkdl.summaries import HistoryFile, MLflow, Report, TensorBoard

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def table(spark: SparkSession) -> DataFrame:
    return spark.range(96).selectExpr(
        "array(id / 96, 1 - id / 96) AS features", "array(id / 48) AS label"
    )


def fit(
    table: DataFrame, callback: sparkdl.Callback, resume: str | None = None, **values: Any
) -> sparkdl.TrainedModel:
    trainer = sparkdl.Trainer(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        batch_size=16,
        replicas=2,
        callbacks=[callback],
        **({"engine": "local", "stop": sparkdl.max_epoch(2)} | values),
    )
    return trainer.fit(table, resume=resume)


def scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in found.Scalars(name)}


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_tensorboard(table: DataFrame, tmp_path: Path, engine: str) -> None:
    trained = fit(table, TensorBoard(tmp_path), engine=engine)
    assert len(trained.history) == 12
    expected = dict(enumerate(trained.history.losses, start=1))
    assert scalars(tmp_path, "loss") == pytest.approx(expected)
    assert scalars(tmp_path, "learning_rate") == pytest.approx(dict.fromkeys(expected, 0.05))
    assert min(scalars(tmp_path, "samples_per_second").values()) > 0


class FailsAt(sparkdl.Trigger):
    """As anything that ends a fit before its end."""

    def __call__(self, previous: sparkdl.TrainState, current: sparkdl.TrainState) -> bool:
        if current.iteration == 3:
            raise KeyboardInterrupt
        return False


def test_tensorboard_of_a_fit_that_is_interrupted(table: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(table, TensorBoard(tmp_path), stop=FailsAt())
    gc.collect()
    assert list(scalars(tmp_path, "loss")) == [1, 2, 3]


@pytest.mark.parametrize("name", ["history.json", "history.csv"])
def test_history_file(table: DataFrame, tmp_path: Path, name: str) -> None:
    trained = fit(table, HistoryFile(tmp_path / name))
    loaded = sparkdl.History.load(tmp_path / name)
    assert list(loaded) == list(trained.history)
    assert loaded.epochs() == trained.history.epochs()


def test_report(table: DataFrame, tmp_path: Path) -> None:
    fit(table, Report(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    for text in ("12 iterations up to epoch", "why this engine", "Spark master", "float32"):
        assert text in page


@pytest.mark.parametrize("last", soak_but([11], [8, 11]))
def test_a_resumed_fit_records_the_whole_run(table: DataFrame, tmp_path: Path, last: int) -> None:
    saved = sparkdl.Checkpoint(tmp_path / "checkpoints", every=sparkdl.every(8))
    fit(table, sparkdl.Callback(), checkpoint=saved, stop=sparkdl.max_iteration(8))
    report, file = Report(tmp_path / "report.html"), HistoryFile(tmp_path / "new" / "history.json")
    for callback in (report, file):
        stop = sparkdl.max_iteration(last)
        trained = fit(table, callback, resume="latest", checkpoint=saved, stop=stop)
        assert len(trained.history) == last
        assert list(callback.history) == list(trained.history)
    assert sparkdl.History.load(tmp_path / "new" / "history.json").losses == trained.history.losses


def test_a_partial_fit_records_those_before(table: DataFrame, tmp_path: Path) -> None:
    callback = Report(tmp_path / "report.html")
    trainer = sparkdl.Trainer(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        batch_size=32,
        engine="local",
        replicas=1,
        callbacks=[callback],
    )
    for passes in (1, 2):
        trained = trainer.partial_fit(table)
        assert len(trained.history) == 3 * passes
        assert list(callback.history) == list(trained.history)


def test_mlflow(table: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    callback = MLflow(every=sparkdl.every(5))
    trained = fit(table, callback)
    callback.log_model(trained)
    client = mlflow.MlflowClient()
    run = client.get_run(callback.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["replicas"] == "2"
    losses = {m.step: m.value for m in client.get_metric_history(callback.run_id, "loss")}
    assert losses == {i: trained.history.losses[i - 1] for i in (5, 10, 12)}
    folder = mlflow.artifacts.download_artifacts(run_id=callback.run_id, artifact_path="model")
    loaded = sparkdl.load(folder)
    assert torch.equal(loaded.module.weight, trained.module.weight)
    assert list(loaded.history) == list(trained.history)


@pytest.mark.soak
def test_every_fit_is_logged_and_spark_scores_with_the_model(
    spark: SparkSession, table: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has parameters, metrics, curves and the model; its Spark UDF gives the predictions."""
    mlflow = pytest.importorskip("mlflow")
    pyfunc = pytest.importorskip("mlflow.pyfunc")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    sparkdl.mlflow.autolog()
    try:
        trained = fit(table, sparkdl.Callback())
    finally:
        sparkdl.mlflow.autolog(disable=True)
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "16"
    assert "loss" in run.data.metrics
    names = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert names == {"report.html", "history.json"}
    uri = f"models:/{run.outputs.model_outputs[0].model_id}"
    assert list(sparkdl.mlflow.load_model(uri).history) == list(trained.history)
    udf = pyfunc.spark_udf(spark, uri, result_type="array<float>", env_manager="local")
    scored = trained.transform(table).withColumn("by_mlflow", udf("features"))
    for row in scored.select("prediction", "by_mlflow").collect():
        assert row.by_mlflow == pytest.approx(row.prediction, rel=1e-6)


def test_callbacks_get_the_result(table: DataFrame) -> None:
    class Result(sparkdl.Callback):
        def on_result(self, trainer: sparkdl.Trainer, trained: sparkdl.TrainedModel) -> None:
            self.trained = trained

    result = Result()
    assert fit(table, result) is result.trained


def test_what_a_trainer_carries_is_no_parameter(table: DataFrame) -> None:
    trainer = sparkdl.Trainer(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        engine="local",
        replicas=1,
    )
    before = plain_parameters(trainer)
    trainer.partial_fit(table)
    assert plain_parameters(trainer) == before


def test_triggers_stop_a_fit(table: DataFrame) -> None:
    class Last(sparkdl.Callback):
        def on_fit_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
            self.state = state

    last = Last()
    quick = ~sparkdl.max_time(1000) & sparkdl.several_iterations(4)
    fit(table, last, stop=quick | sparkdl.max_epoch(3))
    assert last.state.iteration == 4
    trained = fit(table, last, stop=sparkdl.min_loss(0.2) | sparkdl.max_epoch(30))
    assert trained.history.losses[-1] <= 0.2 < min(trained.history.losses[:-1])
    assert 1 < len(trained.history) < 180
    assert not math.isnan(last.state.loss)

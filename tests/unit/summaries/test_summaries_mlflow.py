"""MLflow runs in a local store, read back."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import summary_runs as runs
import torch
from fork_server import run_fresh
from lazily import Lazily
from mistakes import message_of
from torch import nn
from trained import trained_model

import sparkdl
from sparkdl.codec.describe import LONGEST_PARAMETER, REDACTED, plain_parameters
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated
from sparkdl.summaries import MLflow

pytestmark = pytest.mark.usefixtures("mlflow_store")
mlflow = Lazily("mlflow")


def run_of(callback: MLflow) -> Any:
    return mlflow.MlflowClient().get_run(callback.run_id)


def values(callback: MLflow, name: str) -> dict[int, float]:
    history = mlflow.MlflowClient().get_metric_history(callback.run_id, name)
    return {metric.step: metric.value for metric in history}


def artifact(callback: MLflow, name: str) -> Path:
    return Path(mlflow.artifacts.download_artifacts(run_id=callback.run_id, artifact_path=name))


def test_a_run_of_its_own() -> None:
    callback = MLflow(run_name="small", every=sparkdl.every(3))
    runs.play([callback], runs.states())
    run = run_of(callback)
    assert mlflow.active_run() is None
    assert (run.info.status, run.info.run_name) == ("FINISHED", "small")
    history = History.load(artifact(callback, "history.json"))
    assert history.to_json_bytes() == callback.history.to_json_bytes()
    assert (len(history), len(history.validations)) == (8, 2)


def test_the_active_run_stays_open() -> None:
    with mlflow.start_run() as outer:
        callback = MLflow()
        runs.play([callback], runs.states())
        assert mlflow.active_run().info.run_id == outer.info.run_id == callback.run_id
        # A second part of the run: another length of training, which a parameter cannot take up.
        more = runs.a_trainer(stop=sparkdl.max_epoch(3))
        runs.play([MLflow()], runs.states(first=9, last=12), more)
    assert run_of(callback).info.status == "FINISHED"
    assert run_of(callback).data.params["stop"] == "MaxEpoch(epochs=10)"
    assert list(values(callback, "loss")) == [8, 10, 12]


def test_a_failed_fit_is_told_from_the_next_one() -> None:
    first, second = MLflow(), MLflow()
    runs.play([first], runs.states(), finish=False)
    runs.play([second], runs.states())
    assert first.run_id != second.run_id
    assert run_of(first).info.status == "FAILED"
    assert run_of(second).info.status == "FINISHED"
    assert mlflow.active_run() is None


PROGRAM = """
import summary_runs
from sparkdl.summaries import MLflow
callback = MLflow()
summary_runs.play([callback], summary_runs.states(), finish=False)
print(callback.run_id)
"""


@pytest.mark.soak
def test_a_program_that_ends_early_leaves_a_failed_run() -> None:
    done = run_fresh(PROGRAM, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.strip()
    assert mlflow.MlflowClient().get_run(run_id).info.status == "FAILED"


def test_names_that_mlflow_takes_for_one_are_numbered() -> None:
    trainer = replace(runs.a_trainer(), l2={"*.weight": 0.1, "?.weight": 0.2})
    callback = MLflow()
    callback.on_fit_start(trainer, TrainState())
    callback.on_fit_end(trainer, TrainState())
    found = {k: v for k, v in run_of(callback).data.params.items() if k.startswith("l2")}
    assert sorted(found.values()) == ["0.1", "0.2"]


def test_odd_names_and_values() -> None:
    metrics = {"top@5 (%)": 0.5, "nan": float("nan")}
    last = TrainState(iteration=1, samples=1, loss=float("inf"), seconds=0.0, epoch=1)
    callback, trainer = MLflow(every=sparkdl.every(1)), runs.a_trainer()
    callback.on_fit_start(trainer, TrainState())
    callback.on_iteration_end(trainer, last)
    validations = (Validated(iteration=1, epoch=1, metrics=metrics),)
    last = TrainState(iteration=1, samples=1, epoch=1, validations=validations)
    callback.on_validation_end(trainer, last)
    callback.on_fit_end(trainer, last)
    found = run_of(callback).data.metrics
    assert found["validation/top_5 ___"] == 0.5
    assert found["validation/nan"] != found["validation/nan"]
    assert found["loss"] > 1e300


def test_the_model_can_be_added_after_the_fit() -> None:
    callback, module = MLflow(), nn.Linear(3, 1)
    trained = trained_model(module, model=partial(nn.Linear, 3, 1))
    assert (
        message_of(sparkdl.ParameterError, callback.log_model, trained)
        == "MLflow.log_model: there is no run yet; call it after fit."
    )
    runs.play([callback], runs.states())
    callback.log_model(trained)
    loaded = sparkdl.load(artifact(callback, "model"))
    assert torch.equal(loaded.module.weight, module.weight)
    assert run_of(callback).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        (
            "http://me:hunter2@127.0.0.1:9",
            "MLflow cannot log to http://…@127.0.0.1:9: API request to ",
        ),
        ("nowhere://x", "MLflow cannot log to nowhere://x: "),
        ("file:///proc/x", "MLflow cannot log to file:///proc/x: [Errno 2] No such file"),
    ],
)
def test_a_store_that_cannot_be_reached_is_told_before_training(
    monkeypatch: pytest.MonkeyPatch, uri: str, told: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(sparkdl.ParameterError) as caught:
        runs.play([MLflow()], runs.states())
    message = str(caught.value)
    assert message.startswith(told.replace("…", REDACTED))
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    assert message.endswith("; for a database, install the full mlflow package.")


def a_function() -> None:
    """Has a name."""


class Quiet(sparkdl.Trigger):
    """Of a user's own, without a text of its own."""


@dataclass
class Nested:
    inner: int = 3
    password: str = "hunter2"
    data: object = field(default_factory=object)
    own: int = field(default=4, init=False)


A_PARTIAL = partial(partial(torch.optim.SGD, lr=0.5), betas=(0.9, 0.99), api_key="hunter2")


@dataclass
class Values:
    number: float = 0.001
    nothing: None = None
    flag: bool = True
    names: tuple[str, ...] = ("a", "b")
    long: str = "x" * 1000
    stop: sparkdl.Trigger = sparkdl.max_epoch(2) | sparkdl.min_loss(0.5)
    own: sparkdl.Trigger = field(default_factory=Quiet)
    function: Any = a_function
    module: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))
    schedule: Any = A_PARTIAL
    options: Any = field(default_factory=lambda: {"a": 1, "fs.s3a.secret.key": "hunter2"})
    max_tokens: int = 7
    auth_token: str = "hunter2"
    password: int = 1234
    nested: Nested = field(default_factory=Nested)
    path: str = "s3://me:hunter2@host/a?X-Signature=hunter2"
    plain: str = "why? a question"
    callbacks: Any = (sparkdl.Callback(),)
    _kept: list[Nested] = field(default_factory=lambda: [Nested()], init=False)


def test_plain_parameters() -> None:
    found = plain_parameters(Values(), (sparkdl.Trigger,))
    assert found == {
        "number": "0.001",
        "nothing": "None",
        "flag": "True",
        "names": "a, b",
        "long": "x" * (LONGEST_PARAMETER - 1) + "…",
        "stop": "Or(left=MaxEpoch(epochs=2), right=MinLoss(loss=0.5))",
        "own": "Quiet",
        "function": "a_function",
        "module": "Linear",
        "schedule": "SGD",
        "schedule.lr": "0.5",
        "schedule.betas": "0.9, 0.99",
        "options.a": "1",
        "max_tokens": "7",
        "nested.inner": "3",
        "path": "s3://(redacted)@host/a?X-Signature=(redacted)",
        "plain": "why? a question",
    }
    assert "hunter2" not in json.dumps(found)

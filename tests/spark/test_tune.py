"""Searches: trials side by side and one after another, resumed, with Optuna, and their results."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import pytest
import torch
import tune_between_nodes as script
from launch import digest, launch, soak_but
from pyspark import cloudpickle
from torch import nn

import sparkdl
import sparkdl.mlflow
import sparkdl.summaries
from sparkdl import tune
from sparkdl.loop.state import TrainState, Validated
from sparkdl.tune.algorithms import Pruning, Random
from sparkdl.tune.folder import Objective
from sparkdl.tune.search import TrialTable
from sparkdl.tune.space import domains_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tune_between_nodes"])


class Net(nn.Module):
    def __init__(self, hidden: int = 4, fail: bool = False) -> None:
        super().__init__()
        if fail:
            raise RuntimeError("this one cannot be built")
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.BatchNorm1d(hidden))
        self.head = nn.Linear(hidden, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(features))


@pytest.fixture(scope="module")
def frames(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Points in or outside a circle, to train and to validate on."""
    generator = np.random.default_rng(0)
    points = generator.uniform(-1, 1, (260, 2)).astype("float32")
    rows = [(p.tolist(), int((p**2).sum() < 0.6)) for p in points]
    schema = "features array<float>, label bigint"
    train, held = (spark.createDataFrame(some, schema) for some in (rows[:200], rows[200:]))
    return train, held


@pytest.fixture
def trainer(frames: tuple[DataFrame, DataFrame]) -> sparkdl.Trainer:
    return sparkdl.Trainer(
        model=Net,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        batch_size=50,
        stop=sparkdl.max_epoch(2) | sparkdl.max_score("accuracy", 2.0),
        validation=sparkdl.Validation(frames[1], metrics=["accuracy"]),
    )


SPACE = {
    "optimizer.lr": tune.loguniform(1e-3, 1e-1),
    "model.hidden": [2, 4],
    "batch_size": [20, 50],
}


def without_times(result: tune.SearchResult) -> list[dict[str, Any]]:
    """The rows of the table, without the seconds; NaN equals NaN."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.rows()]
    return json.loads(json.dumps(rows))


def test_trials_side_by_side_are_fits_of_the_local_engine(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame], nothing_left: Callable[[], None]
) -> None:
    """Every row, and the best model bit for bit, are those of a fit with the same values."""
    result = tune.search(trainer, frames[0], SPACE, metric="accuracy", trials=5, seed=1)
    assert [one.status for one in result.trials] == ["completed"] * 5
    assert len({one.arguments["optimizer.lr"] for one in result.trials}) == 5
    best = max(result.trials, key=lambda one: one.value)
    assert result.best.value == best.value
    own = replace(result.best_trainer, engine="local", replicas=1)
    assert own.model.keywords == {"hidden": result.best.arguments["model.hidden"]}
    assert own.batch_size == result.best.arguments["batch_size"]
    fitted = own.fit(frames[0])
    assert fitted.history.validations[-1]["metrics"] == result.best.metrics
    for name, value in fitted.module.state_dict().items():
        assert torch.equal(value, result.best_model.module.state_dict()[name]), name
    assert fitted.history.losses == result.best_model.history.losses
    assert result.best_model.evaluate(frames[1], ["accuracy"])["accuracy"] == pytest.approx(
        result.best.value
    )
    assert "prediction" in result.best_model.transform(frames[1]).columns
    again = tune.search(trainer, frames[0], SPACE, metric="accuracy", trials=5, seed=1, parallel=3)
    assert without_times(again) == without_times(result)
    nothing_left()


@pytest.mark.parametrize("parallel", soak_but([2], [1, 2]))
def test_trials_that_read_otherwise_have_samples_of_their_own(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame], parallel: int
) -> None:
    bad = frames[0].limit(60).selectExpr("array(float('nan'), 0F) AS features", "label")
    rows = frames[0].union(bad).coalesce(1)
    own = replace(trainer, engine="local", replicas=1)
    space = {"handle_invalid": ["skip", "keep"]}
    trials = tune.search(own, rows, space, algorithm="grid", parallel=parallel).trials
    fits = [replace(own, handle_invalid=how).fit(rows) for how in space["handle_invalid"]]
    scores = [fitted.history.validations[-1]["metrics"] for fitted in fits]
    assert [one.metrics for one in trials] == scores
    assert scores[0] != scores[1]


def test_a_failed_trial_is_a_row(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame]
) -> None:
    """With its reason, whether the trainer, the model or the training fails; the others go on."""
    space = {
        "model.fail": [False, True],
        "batch_size": [50, 0],
        "on_nan": ["raise"],
        "optimizer.lr": [0.01, 1e30],
    }
    result = tune.search(trainer, frames[0], space, algorithm="grid")
    assert len(result.trials) == 8
    table = result.to_pandas()
    assert list(table.columns[:5]) == [*space, "loss"]
    assert table["status"].tolist() == ["completed", *["failed"] * 7]
    reasons = table["reason"].tolist()
    assert "iteration" in reasons[1], reasons[1]
    assert all("batch_size=0" in reason for reason in (*reasons[2:4], *reasons[6:8]))
    assert all("this one cannot be built" in reason for reason in reasons[4:6])
    assert result.best.number == 0
    assert math.isnan(table["loss"][4])
    hopeless = tune.search(trainer, frames[0], {"model.fail": [True]}, algorithm="grid")
    assert hopeless.best is None
    with pytest.raises(sparkdl.ParameterError, match="this one cannot be built"):
        _ = hopeless.best_model


class Killed(Exception):
    pass


class Log(sparkdl.Callback):
    """Notes each trial that is trained in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        with self.path.open("a") as file:
            file.write(".")

    @property
    def count(self) -> int:
        return len(self.path.read_text())


@pytest.mark.parametrize("algorithm", soak_but(["optuna"], ["random", "optuna"]))
def test_a_search_goes_on_from_its_folder(
    trainer: sparkdl.Trainer,
    frames: tuple[DataFrame, DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
) -> None:
    """After its driver has ended: finished trials are not made again, and the table is the same."""
    log = Log(tmp_path / "log")
    own = replace(trainer, callbacks=[log])
    search = partial(
        tune.search, own, frames[0], SPACE, metric="accuracy", trials=6, algorithm=algorithm,
        parallel=2,
    )  # fmt: skip
    whole = search()
    assert log.count == 6
    add = tune.folder.SearchFolder.add

    def dies(self: Any, outcome: Any) -> None:
        add(self, outcome)
        if len(self.records) == 4:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(tune.folder.SearchFolder, "add", dies)
        with pytest.raises(Killed):
            search(path=tmp_path / "search")
    assert len(list((tmp_path / "search").glob("trial-*.json"))) == 4
    assert len(list((tmp_path / "search").glob("model-*.safetensors"))) == 1
    (tmp_path / "log").write_text("")
    resumed = search(path=tmp_path / "search")
    assert log.count == 2
    assert without_times(resumed) == without_times(whole)
    finished = search(path=tmp_path / "search")
    assert log.count == 2
    for result in (resumed, finished):
        for name, value in whole.best_model.module.state_dict().items():
            assert torch.equal(value, result.best_model.module.state_dict()[name]), name
        assert result.best_model.history.losses == whole.best_model.history.losses
    with pytest.raises(sparkdl.ParameterError, match="another search: seed is 3 here and 0 there"):
        search(path=tmp_path / "search", seed=3)
    fewer = replace(own.validation, data=frames[1].limit(20))
    rarely = replace(own.validation, every=sparkdl.every(3))
    for given, data, told in (
        (own, frames[1], "on other data, of 200 rows"),
        (replace(own, validation=fewer), frames[0], "on other validation data, of .* has 20"),
        (replace(own, validation=rarely), frames[0], "another search: validation is"),
        (replace(own, replicas=2), frames[0], "trainer.replicas is 2 here and None there"),
    ):
        with pytest.raises(sparkdl.ParameterError, match=told):
            tune.search(
                given, data, SPACE, metric="accuracy", trials=7, algorithm=algorithm,
                path=tmp_path / "search", parallel=2,
            )  # fmt: skip


@pytest.mark.soak
def test_distributed_trials_share_the_samples(
    trainer: sparkdl.Trainer,
    frames: tuple[DataFrame, DataFrame],
    num_jobs: Callable[[], int],
    nothing_left: Callable[[], None],
    tmp_path: Path,
) -> None:
    """``parallel=1``: each trial is a fit of the trainer's engine, resumed from its checkpoints."""
    own = replace(
        trainer,
        replicas=2,
        validation=replace(trainer.validation, best="accuracy"),
        checkpoint=sparkdl.Checkpoint(tmp_path / "checkpoints"),
        ema=0.9,
    )
    space = {"optimizer.lr": [0.01, 0.1]}
    result = tune.search(
        own, frames[0], space, metric="accuracy", algorithm="grid", parallel=1, path=tmp_path / "a"
    )
    best = result.best_trainer
    fitted = replace(best, checkpoint=None).fit(frames[0])
    assert fitted.best is not None
    for name, value in fitted.best.module.state_dict().items():
        assert torch.equal(value, result.best_model.module.state_dict()[name]), name
    assert result.best.value == max(
        one["metrics"]["accuracy"] for one in fitted.history.validations
    )
    folders = sorted(one.name for one in (tmp_path / "checkpoints").iterdir())
    assert [one[:13] for one in folders] == ["trial-000000-", "trial-000001-"]
    before = num_jobs()
    again = tune.search(
        own, frames[0], space, metric="accuracy", algorithm="grid", parallel=1, path=tmp_path / "a"
    )
    assert num_jobs() - before < 12  # the samples for the best model, and no iteration
    for name, value in result.best_model.module.state_dict().items():
        assert torch.equal(value, again.best_model.module.state_dict()[name]), name
    other = partial(
        tune.search, data=frames[0], space={"optimizer.lr": [0.3]}, metric="accuracy",
        algorithm="grid", parallel=1,
    )  # fmt: skip
    # in the folder of another search's checkpoints
    assert without_times(other(own)) == without_times(other(replace(own, checkpoint=None)))
    nothing_left()


@pytest.mark.parametrize("pruner", ["threshold", "patient"])
@pytest.mark.parametrize("resumed", [1, 2, 3, 4])
def test_a_trial_that_goes_on_is_pruned_as_before(pruner: str, resumed: int) -> None:
    """The pruner knows the validations before the break, and gives up where it would have."""
    losses, objective = [1.0, 5.0, 6.0, 7.0], Objective("loss", False, False)
    trials = [
        optuna.trial.create_trial(value=2.0, intermediate_values=dict.fromkeys((1, 2, 3, 4), 2.0))
    ]
    pruners = {
        "threshold": optuna.pruners.ThresholdPruner(upper=5.5),
        "patient": optuna.pruners.PatientPruner(None, patience=1),
    }

    def ended(first: int) -> int | None:
        """Return the validation after which a trial is pruned that goes on after ``first``."""
        callback = Pruning(pruners[pruner], trials, objective, "study")
        states = [
            TrainState(
                iteration=n,
                validations=tuple(
                    Validated(iteration=i + 1, epoch=0, metrics={"loss": losses[i]})
                    for i in range(n)
                ),
            )
            for n in range(len(losses) + 1)
        ]
        try:
            callback.on_fit_start(None, states[first])
            for state in states[first + 1 :]:
                first = state.iteration
                callback.on_validation_end(None, state)
        except sparkdl.StopTraining:
            return first
        return None

    whole = ended(0)
    assert whole is not None
    assert ended(resumed) == max(whole, resumed)


@pytest.mark.soak
def test_optuna_prunes_and_keeps_its_storage(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame], tmp_path: Path
) -> None:
    """Its pruner sees the validations, its storage has the trials, and knows them the next time."""
    url = f"sqlite:///{tmp_path}/study.db"
    options = tune.Optuna(
        sampler=partial(optuna.samplers.TPESampler, n_startup_trials=2),
        pruner=optuna.pruners.PercentilePruner(10.0, n_startup_trials=1),
        storage=url,
        study_name="circle",
    )
    search = partial(
        tune.search, replace(trainer, stop=sparkdl.max_epoch(4)), frames[0],
        {"optimizer.lr": tune.loguniform(1e-6, 1e-1), "model.hidden": tune.integers(2, 6)},
        algorithm=options, parallel=2, trials=8,
    )  # fmt: skip
    result = search()
    status = [one.status for one in result.trials]
    assert {"completed", "pruned"} <= set(status)
    assert "failed" not in status
    for one in result.trials:
        assert len(one.scores) == (4 if one.status == "completed" else one.epochs)
    assert result.best.status == "completed"
    study = optuna.load_study(storage=url, study_name="circle")
    assert len(study.trials) == 8
    assert study.best_value == min(one.value for one in result.trials)
    stored = {t.user_attrs["sparkdl:trial"]: t.params for t in study.trials}
    assert stored == {one.number: one.arguments for one in result.trials}
    more = search(trials=2)
    assert len(optuna.load_study(storage=url, study_name="circle").trials) == 10
    assert [one.arguments for one in more.trials] != [one.arguments for one in result.trials[:2]]
    with pytest.raises(sparkdl.ParameterError, match="give another study_name"):
        tune.search(trainer, frames[0], SPACE, metric="accuracy", algorithm=options)


@pytest.mark.soak
def test_a_page_of_the_trials(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame], tmp_path: Path
) -> None:
    space = {
        "optimizer.lr": tune.loguniform(1e-3, 1e-1),
        "model.hidden": tune.integers(2, 6, log=True),
        "loss": [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)],
        "batch_size": [50, 0],
    }
    result = tune.search(trainer, frames[0], space, trials=6, metric="accuracy", seed=3)
    assert {one.status for one in result.trials} == {"completed", "failed"}
    assert len({one.arguments["loss"] for one in result.trials}) == 2
    page = result.report(tmp_path / "trials.html").read_text()
    assert all(f">{name}</td>" in page for name in space)  # what mattered
    assert "batch_size=0" in page  # why trials failed
    assert "trial" in result._repr_html_()
    assert repr(result).startswith("<sparkdl.tune.SearchResult: 6 trials, best accuracy 0.")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"space": {}}, "the space is empty"),
    ({"space": {"batchsize": [1]}}, 'no such argument. Did you mean "batch_size"'),
    ({"space": {"loss.weight": [1]}}, "give a list of whole values"),
    ({"space": {"engine": ["gang"]}}, "which a search does not vary"),
    ({"space": {"batch_size": 5}}, r'space\["batch_size"\] is an int'),
    ({"space": {"seed": tune.integers(1, 3)}, "algorithm": "grid"}, r'space\["seed"\] is a range'),
    ({"metric": "acuracy"}, 'Did you mean "accuracy"'),
    ({"trials": 0}, "trials=0"),
    ({"parallel": 0.5}, "parallel=0.5"),
    ({"algorithm": "optun"}, 'Did you mean "optuna"'),
    ({"algorithm": tune.Optuna(sampler=optuna.samplers.RandomSampler())}, "is already built"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_mistake_is_told_before_any_trial(
    trainer: sparkdl.Trainer,
    frames: tuple[DataFrame, DataFrame],
    num_jobs: Callable[[], int],
    given: dict[str, Any],
    message: str,
) -> None:
    before = num_jobs()
    with pytest.raises(sparkdl.ParameterError, match=message):
        tune.search(trainer, frames[0], **{"space": SPACE, **given})
    assert num_jobs() == before


def test_trainers_for_which_a_search_has_no_use(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame], tmp_path: Path
) -> None:
    without = replace(trainer, validation=None, stop=sparkdl.max_epoch(2))
    with pytest.raises(sparkdl.ParameterError, match="the trainer has no validation"):
        tune.search(without, frames[0], SPACE)
    checkpoint = sparkdl.Checkpoint(tmp_path)
    with pytest.raises(sparkdl.ParameterError, match=r"has checkpoint, .* give parallel=1"):
        tune.search(replace(trainer, checkpoint=checkpoint), frames[0], SPACE)


FEW = {"a": [1, True, "1"], "b": tune.integers(1, 3, log=True)}
ENOUGH: list[tuple[dict[str, Any], int | None, int, str]] = [
    ({"a": [1, 2], "b": [1, 2]}, None, 4, ""),
    (FEW, 3, 3, ""),
    (FEW, 9, 9, ""),
    (FEW, 20, 9, "trials=20: the values of the space have only 9 combinations"),
    ({**FEW, "c": tune.uniform(0, 1)}, None, 16, ""),
    ({"c": tune.uniform(1.0, math.nextafter(1.0, 2.0))}, 20, 20, ""),
]


@pytest.mark.parametrize(("space", "trials", "count", "told"), ENOUGH, ids=str)
def test_a_random_search_tries_nothing_twice(
    space: dict[str, Any],
    trials: int | None,
    count: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ends when there is no other combination, and more trials begin with those of fewer."""
    algorithm = Random(domains_of(space), trials, seed=1)
    asked = [repr(algorithm.ask(number, None)) for number in range(algorithm.trials)]
    assert algorithm.trials == count
    assert len(set(asked)) == count or "c" in space
    fewer = Random(domains_of(space), 2, seed=1)
    assert [repr(fewer.ask(number, None)) for number in range(2)] == asked[:2]
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_a_grid_and_optuna_tell_that_trials_are_more_than_there_are_values(
    frames: tuple[DataFrame, DataFrame], trainer: sparkdl.Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    space = {"model.hidden": [2, 4]}
    for algorithm, count, told in (
        ("grid", 2, "trials=3: the values of the space have only 2 combinations"),
        ("optuna", 3, "Optuna makes 3 trials, and the values of the space have only 2"),
    ):
        caplog.clear()
        result = tune.search(trainer, frames[0], space, algorithm=algorithm, trials=3)
        assert len(result.trials) == count
        assert told in caplog.text


def test_a_choice_may_hold_what_equals_nothing() -> None:
    choice = tune.choice([math.nan, 1.0])
    assert [repr(choice.value(label)) for label in choice.labels] == ["nan", "1.0"]


@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), ("a", 1), (0, math.inf)])
def test_ranges_have_two_ends(bounds: tuple[Any, Any]) -> None:
    with pytest.raises(sparkdl.ParameterError, match="give two numbers"):
        tune.uniform(*bounds)
    with pytest.raises(sparkdl.ParameterError):
        tune.integers(*bounds)
    with pytest.raises(sparkdl.ParameterError, match="above 0"):
        tune.loguniform(0, 1)


@pytest.mark.soak
def test_nodes_have_copies_of_the_samples(spark: SparkSession, tmp_path: Path) -> None:
    """On a cluster: one copy a node, gone in the end, and the table of one machine."""
    found = launch(Path(script.__file__), tmp_path, master="local-cluster[2,2,1024]")
    here = script.search(spark)
    assert found["table"] == json.loads(json.dumps(script.table(here)))
    assert found["digest"] == digest(here.best_model.module)
    assert found["nodes"] == 2
    assert found["files"] == 2 * found["names"]
    assert found["left"] == []


def test_an_interrupt_ends_a_search(
    trainer: sparkdl.Trainer,
    frames: tuple[DataFrame, DataFrame],
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: Callable[[], None],
) -> None:
    """The finished trials and the best model of them are there, and nothing goes on running."""
    add = TrialTable.add

    def interrupted(self: Any, outcome: Any) -> None:
        add(self, outcome)
        if len(self.records) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrialTable, "add", interrupted)
    result = tune.search(trainer, frames[0], SPACE, trials=30, parallel=2)
    assert result.stopped == "interrupted"
    assert 2 <= len(result.trials) <= 3
    assert result.best_model is not None
    nothing_left()


class Raises(sparkdl.Callback):
    """Raises an exception in a trial with a large batch."""

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        if trainer.batch_size == 100:
            raise LookupError("no such run")


@pytest.mark.parametrize("parallel", soak_but([2], [1, 2]))
def test_an_exception_of_a_callback_ends_its_trial_only(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame], parallel: int
) -> None:
    own = replace(trainer, callbacks=[Raises()])
    space = {"batch_size": [100, 200]}
    result = tune.search(own, frames[0], space, algorithm="grid", parallel=parallel)
    assert [one.status for one in result.trials] == ["failed", "completed"]
    assert result.trials[0].reason == "LookupError: no such run"


class Dies(sparkdl.Callback):
    """Ends the process of a trial with a large batch."""

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        if trainer.batch_size == 100:
            os._exit(1)


def test_a_task_that_dies_is_a_failed_trial(
    trainer: sparkdl.Trainer, frames: tuple[DataFrame, DataFrame]
) -> None:
    own = replace(trainer, callbacks=[Dies()])
    result = tune.search(own, frames[0], {"batch_size": [50, 100, 200]}, algorithm="grid")
    assert [one.status for one in result.trials] == ["completed", "failed", "completed"]
    assert "The Python worker died" in result.trials[1].reason


@pytest.mark.parametrize("parallel", soak_but([2], [1, 2]))
def test_a_search_is_a_run_of_mlflow_with_nested_runs(
    trainer: sparkdl.Trainer,
    frames: tuple[DataFrame, DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: int,
) -> None:
    """Parameters, curves and status of each trial; the best model and the table in the outer run."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    own = replace(trainer, engine="local", replicas=1)
    space = {"optimizer.lr": [0.01, 1e30], "batch_size": [20]}
    search = partial(tune.search, data=frames[0], space=space, metric="accuracy", algorithm="grid")
    if parallel == 1:  # every fit is logged, but those of a search as parts of it
        sparkdl.mlflow.autolog()
        try:
            result = search(own, parallel=1)
        finally:
            sparkdl.mlflow.autolog(disable=True)
    else:
        callback = sparkdl.summaries.MLflow("tries", log_models=True)
        result = search(replace(own, callbacks=[callback]), parallel=2, path=tmp_path / "search")
    client = mlflow.MlflowClient()
    runs = {run.info.run_name: run for run in client.search_runs(["0"])}
    good, bad = (runs.pop(f"trial {number}") for number in (0, 1))
    (outer,) = runs.values()
    assert mlflow.active_run() is None
    assert [run.info.status for run in (outer, good, bad)] == ["FINISHED", "FINISHED", "FAILED"]
    for run in (good, bad):
        assert run.data.tags["mlflow.parentRunId"] == outer.info.run_id
        assert run.data.params["batch_size"] == "20"
    assert (good.data.params["optimizer.lr"], bad.data.params["optimizer.lr"]) == ("0.01", "1e+30")
    assert bad.data.tags["trial.reason"] == result.trials[1].reason
    assert "optimizer.lr" not in outer.data.params
    assert "0.01" in outer.data.params["space/optimizer.lr"]
    curve = client.get_metric_history(good.info.run_id, "loss")
    assert [(one.step, one.value) for one in curve] == [
        (step, result.best_model.history.losses[step - 1]) for step in (10, 20)
    ]
    curve = client.get_metric_history(good.info.run_id, "validation/accuracy")
    assert [one.value for one in curve] == [score.value for score in result.best.scores]
    assert outer.data.metrics["validation/accuracy"] == result.best.value
    names = {file.path for file in client.list_artifacts(outer.info.run_id)}
    assert names == {"trials.csv"}
    (model,) = outer.outputs.model_outputs  # logged once, and not by the trials
    loaded = sparkdl.mlflow.load_model(f"models:/{model.model_id}")
    assert list(loaded.history) == list(result.best_model.history)
    assert not good.outputs.model_outputs
    if parallel == 2:  # what was finished before belongs to the search, too
        search(replace(own, callbacks=[callback]), parallel=2, path=tmp_path / "search")
        again = [run for run in client.search_runs(["0"]) if run.info.run_name == "trial 0"]
        assert len(again) == 2
        assert again[0].data.metrics["validation/accuracy"] == result.best.value


def test_a_sweep_of_learning_rates(
    frames: tuple[DataFrame, DataFrame], trainer: sparkdl.Trainer, tmp_path: Path
) -> None:
    """The rates grow evenly by their logarithm; a loss that explodes ends the sweep."""
    plain = replace(trainer, engine="local", validation=None, stop=sparkdl.max_epoch(1))
    found = tune.find_lr(plain, frames[0], start=1e-4, end=1, iterations=30)
    assert found.rates == pytest.approx(np.geomspace(1e-4, 1, 30)[: len(found.rates)])
    assert found.rates[0] < found.suggestion < found.rates[-1]
    assert "smoothed loss" in found.report(tmp_path / "rates.html").read_text(encoding="utf-8")
    assert "<svg" in found._repr_html_()
    steep = replace(
        plain, optimizer=partial(torch.optim.SGD, lr=0.1), model=partial(nn.Linear, 2, 2)
    )
    found = tune.find_lr(steep, frames[0], start=1e-2, end=1e9, iterations=60)
    assert len(found.rates) < 60
    below = replace(plain, loss=lambda output, label: nn.CrossEntropyLoss()(output, label) - 9)
    assert tune.find_lr(below, frames[0], start=1e-4, end=1, iterations=30).suggestion > 1e-4
    with pytest.raises(sparkdl.ParameterError, match="rates above 0 that grow"):
        tune.find_lr(plain, frames[0], start=1, end=1)

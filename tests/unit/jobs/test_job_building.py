"""From a job's configuration to a trainer, and from --resume to checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from job_files import smallest
from mistakes import message_of
from py4j.protocol import Py4JError
from torch import nn

import sparkdl
from jobs import console
from jobs.building import EveryEpochs, checkpoint_of, schedule_of, search_of, trainer_of
from jobs.components import Component
from jobs.config import parse, read_config
from jobs.resuming import config_file, resume_point
from jobs.saved import _metrics
from jobs.train import summaries_of
from sparkdl import CheckpointError, ParameterError, TrainState, summaries, tune

ROOT = Path(__file__).resolve().parents[3]


EVERYTHING = """
data:
  train: a.parquet
  features: {picture: photo, words: text}
  label: digit
  weight: trust
  class_weights: {0: 2}
  columns:
    photo: {use: "sparkdl:Image", size: [8, 8]}
    text: {use: "sparkdl:Convert", function: {use: "builtins:len"}}
  augment: builtins:max
  bucketing: 100
model: {use: "torch.nn:Linear", in_features: 2, out_features: 2}
loss: {use: "torch.nn:CrossEntropyLoss", reduction: none}
optimizer:
  weight: {use: "torch.optim:SGD", lr: 1}
  "": torch.optim:Adam
training: {epochs: 3, max_iterations: 7, max_seconds: 60, min_loss: 0.1, batch_size: 32,
  replicas: 4, slices: 3, engine: local, strategy: fsdp, mesh: {data: 2, shard: 2}, precision: bf16,
  schedule_per: epoch, schedule_metric: accuracy, seed: 5}
validation:
  share: 0.25
  metrics: [accuracy, {use: "torchmetrics:F1Score", task: multiclass, num_classes: 2}]
  every_epochs: 2
  every_iterations: 10
  best: accuracy
early_stopping: {metric: accuracy, patience: 2, min_delta: 0.01, target: 1}
checkpoint: {path: there, every_iterations: 5, every_seconds: 30, keep: null}
gradients: {clip_norm: 1, clip_value: 2, accumulate: 2, local_steps: 3, l1: {"*.weight": 1e-4},
  l2: 0.5, on_nan: skip}
care: {weights: a.safetensors, strict_weights: false, freeze: [weight], unfreeze: [bias],
  activation_checkpointing: ["*"], compile: {mode: default}, ema: 0.9, output: logits,
  buffers: {"*.codes": max, "*": {use: "torch:mean", dim: 0}}}
summaries: {histograms: 50}
callbacks: [sparkdl:Callback]
"""


def everything() -> dict[str, Any]:
    # gradients.wire and .compression do not go with local_steps: see below.
    content: dict[str, Any] = yaml.safe_load(EVERYTHING.replace("1e-4", "0.0001"))
    return content


def test_the_defaults_are_those_of_the_trainer() -> None:
    trainer = trainer_of(parse(smallest()))
    for field in dataclasses.fields(sparkdl.Trainer):
        if field.default is not dataclasses.MISSING and field.name not in ("stop", "loss"):
            given = getattr(trainer, field.name)
            assert type(field.default)(given) == field.default if given else not field.default
    assert trainer.stop == sparkdl.max_epoch(10)


def test_every_field_of_the_trainer_can_be_set() -> None:
    trainer = trainer_of(parse(everything()))
    top_k = {"use": "sparkdl:TopK", "ratio": 0.1}
    other = trainer_of(parse(smallest(gradients={"wire": "bf16", "compression": top_k})))
    same = {
        field.name
        for field in dataclasses.fields(sparkdl.Trainer)
        if field.init
        and field.default is not dataclasses.MISSING
        and getattr(trainer, field.name) == field.default
    }
    # The schedule's length is set by the data; state cannot be kept for another process; what all
    # tasks are given is for spark-submit to say. A step takes the place of the loss.
    elsewhere = {"schedule", "keep_optimizer_state", "resource_profile"}
    gradients = {"wire", "compression", "consistency"}
    assert trainer.buffers["*.codes"] == "max"
    assert trainer.buffers["*"](torch.eye(2)).tolist() == [0.5, 0.5]  # type: ignore[operator]
    assert same == elsewhere | gradients | {"sync_batchnorm", "min_ranks", "step"}
    assert (other.wire, other.compression) == ("bf16", sparkdl.TopK(0.1))
    stale = {"use": "sparkdl:StaleSynchronous", "staleness": 2}
    other = trainer_of(parse(smallest(gradients={"consistency": stale})))
    assert other.consistency == sparkdl.StaleSynchronous(staleness=2)
    cut = {"use": "sparkdl:FSDP", "units": ["0"]}
    gang = {"engine": "gang", "strategy": cut, "sync_batchnorm": True, "min_ranks": 2}
    found = trainer_of(parse(smallest(training=gang)))
    assert (found.strategy, found.sync_batchnorm) == (sparkdl.FSDP(units=["0"]), True)
    assert found.min_ranks == 2


def weighted_step(module: Any, batch: Any, factor: float = 1.0) -> Any:
    return factor * module(batch["features"]).mean()


def test_a_step_takes_the_place_of_the_loss() -> None:
    weighted = {"use": f"{__name__}:weighted_step", "factor": 2.0}
    trainer = trainer_of(parse(smallest(loss=None, step=weighted)))
    assert trainer.loss is None
    batch = {"features": torch.ones(1, 1)}
    assert trainer.step is not None
    assert trainer.step(nn.Identity(), batch) == 2
    each = {"use": "sparkdl:PerReplica", "loss": weighted}
    assert isinstance(trainer_of(parse(smallest(loss=None, step=each))).step, sparkdl.PerReplica)
    with pytest.raises(ParameterError, match="loss: give module:name of a loss, or step:"):
        trainer_of(parse(smallest(loss=None)))
    with pytest.raises(ParameterError, match="loss= and step="):
        trainer_of(parse(smallest(step=weighted)))


def test_what_the_fields_are_set_to() -> None:
    config = parse(everything())
    assert parse(yaml.safe_load(yaml.safe_dump(config.content()))) == config
    trainer = trainer_of(config)
    assert trainer.columns["photo"] == sparkdl.Image(size=(8, 8))
    assert trainer.columns["text"] == sparkdl.Convert(len)
    assert trainer.feature_columns == ("photo", "text")
    assert trainer.output == "logits"
    assert isinstance(trainer.optimizer, dict)
    assert trainer.optimizer["weight"].keywords == {"lr": 1}
    assert trainer.optimizer[""] is torch.optim.Adam
    assert (trainer.class_weights, trainer.l1) == ({0: 2.0}, {"*.weight": 1e-4})
    assert trainer.stop == (
        sparkdl.max_epoch(3) | sparkdl.max_iteration(7) | sparkdl.max_time(60)
        | sparkdl.min_loss(0.1) | sparkdl.plateau("accuracy", 2, 0.01)
        | sparkdl.max_score("accuracy", 1)
    )  # fmt: skip
    assert trainer.validation is not None
    assert trainer.validation.every == EveryEpochs(2) | sparkdl.every(10)
    assert trainer.checkpoint == sparkdl.Checkpoint(
        "there", every=sparkdl.every(5) | sparkdl.every_seconds(30), keep=None
    )
    assert type(trainer.callbacks[0]) is sparkdl.Callback


def test_every_so_many_epochs() -> None:
    trigger = EveryEpochs(2)
    states = [TrainState(epoch=epoch, iteration=2 * epoch) for epoch in range(6)]
    due = [b.epoch for a, b in itertools.pairwise(states) if trigger(a, b)]
    assert due == [2, 4]
    assert not trigger(states[2], dataclasses.replace(states[2], iteration=5))


def test_without_a_path_checkpoints_are_in_the_run_folder() -> None:
    section = parse(smallest(checkpoint={})).checkpoint
    assert section is not None
    made = checkpoint_of(section, Path("runs/a"))
    assert made == sparkdl.Checkpoint(Path("runs/a/checkpoints"))
    assert parse(smallest(checkpoint=None)).checkpoint is None


def test_the_length_of_a_schedule() -> None:
    component = Component("torch.optim.lr_scheduler:OneCycleLR", {"total_steps": "iterations"})
    assert schedule_of(component, 12).keywords == {"total_steps": 12}


def test_weights_of_a_run_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.json").write_text("{}")
    trainer = trainer_of(parse(smallest(care={"weights": str(tmp_path)})))
    assert trainer.weights == str(model / "model.safetensors")


SHARE = {"share": 0.5, "metrics": ["accuracy"]}
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "validation": (
        {"validation": {}, "checkpoint": {"every_epochs": 0}},
        [
            "validation: give either data, a path, or share, a part of the training data.",
            "checkpoint: every_epochs=0: give a whole number of at least 1.",
        ],
    ),
    "never": (
        {"early_stopping": {"metric": "accuracy"}, "validation": SHARE},
        ["early_stopping never stops: give patience, target or both."],
    ),
    "best": (
        {"validation": {**SHARE, "best": "accurcy"}},
        ['validation: Validation(best="accurcy") is not one of its metrics: loss, accuracy.'],
    ),
    "column": (
        {"data": {"train": "a", "columns": {"photo": {"use": "sparkdl:Image", "size": 3}}}},
        ["data.columns.photo: Image: size=3: give (height, width) in pixels, or None."],
    ),
}


@pytest.mark.parametrize("row", MISTAKES)
def test_mistakes(row: str) -> None:
    changes, problems = MISTAKES[row]
    lines = message_of(ParameterError, lambda: trainer_of(parse(smallest(**changes)))).splitlines()
    assert [line.removeprefix("  - ") for line in lines[-len(problems) :]] == problems


def run_folder(path: Path, checkpoint: bool = True, config: str = "name: a\n") -> Path:
    (path / "checkpoints/iteration-1").mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    if checkpoint:
        (path / "checkpoints/iteration-1/manifest.json").write_text("{}")
    return path


def test_the_latest_run(tmp_path: Path) -> None:
    config = parse(smallest(runs=str(tmp_path), name="a"))
    assert resume_point("latest", config) is None
    run_folder(tmp_path / "a-20260101-000000")
    newest = run_folder(tmp_path / "a-20260101-000000-10")
    run_folder(tmp_path / "a-20260101-000000-9")
    run_folder(tmp_path / "a-20260102-000000", checkpoint=False)
    run_folder(tmp_path / "a-b-20260103-000000")
    assert resume_point("latest", config) == str(newest / "checkpoints")
    own = parse(smallest(checkpoint={"path": "there"}))
    assert resume_point("latest", own) == "latest"


def test_a_run_folder_or_any_checkpoint(tmp_path: Path) -> None:
    config = parse(smallest())
    folder = run_folder(tmp_path / "a")
    assert resume_point(str(folder), config) == str(folder / "checkpoints")
    one = folder / "checkpoints/iteration-1"
    assert resume_point(str(one), config) == str(one)
    told = run_folder(tmp_path / "b", checkpoint=False, config="checkpoint: {path: s3://a/b}\n")
    assert resume_point(str(told), config) == "s3://a/b"
    hidden = "checkpoint: {path: 's3://(redacted)@a/b'}\n"
    redacted = str(run_folder(tmp_path / "d", checkpoint=False, config=hidden))
    anew = parse(smallest(checkpoint={"path": "s3://key:secret@a/b"}))
    assert resume_point(redacted, anew) == "s3://key:secret@a/b"
    with pytest.raises(ParameterError, match="give it again, with --set"):
        resume_point(redacted, config)


def test_whose_configuration(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    assert config_file(None, str(folder)) == folder / "config.yaml"
    assert config_file("b.yaml", str(folder)) == Path("b.yaml")
    for resume in (None, "latest", str(folder / "checkpoints")):
        with pytest.raises(ParameterError, match="give --config FILE"):
            config_file(None, resume)


def test_the_example_makes_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    trainer = trainer_of(read_config(ROOT / "conf/digits.yaml"))
    assert isinstance(trainer.model(), nn.Module)
    assert trainer.validation is not None
    assert trainer.validation.best == "accuracy"
    assert trainer.checkpoint is not None
    assert trainer.checkpoint.every == EveryEpochs(5)


def test_a_search() -> None:
    """Keys of the file are names of the trainer; components and lists are domains."""
    found = search_of(read_config(ROOT / "conf/digits.yaml"))
    assert found["space"]["schedule.max_lr"] == tune.loguniform(1e-3, 3e-2)
    assert found["space"]["model.dropout"] == [0.2, 0.5]
    assert (found["metric"], found["trials"], found["parallel"]) == ("accuracy", 8, None)
    algorithm = {"use": "sparkdl.tune:Optuna", "study_name": "a"}
    space = {"training.batch_size": [8], "gradients.clip_norm": [None, 1.0], "model.width": [1]}
    found = search_of(parse(smallest(tune={"space": space, "algorithm": algorithm})))
    assert list(found["space"]) == ["batch_size", "clip_norm", "model.width"]
    assert found["algorithm"] == tune.Optuna(study_name="a")
    wrong = {"lr": {"use": "sparkdl.tune:loguniform", "low": 0, "high": 1}}
    with pytest.raises(ParameterError, match=r"tune.space.lr: tune.loguniform\(0, 1\): give two"):
        search_of(parse(smallest(tune={"space": wrong})))
    with pytest.raises(ParameterError, match="name what varies"):
        search_of(parse(smallest()))


def test_summaries(tmp_path: Path) -> None:
    every = {"csv": True, "tensorboard": True, "mlflow": True}
    found = summaries_of(parse(smallest(summaries=every)), tmp_path)
    kinds = [summaries.HistoryFile, summaries.TensorBoard, summaries.MLflow]
    assert [type(callback) for callback in found] == kinds
    assert summaries_of(parse(smallest()), tmp_path) == []


def test_metrics_of_a_run_folder_that_are_code_need_trust() -> None:
    content = {"metrics": ["accuracy", {"use": "torchmetrics:F1Score", "task": "binary"}]}
    assert _metrics(content, trust=False) == ["accuracy"]
    name, made = _metrics(content, trust=True)
    assert name == "accuracy"
    assert type(made).__name__ == "BinaryF1Score"


def test_a_damaged_checkpoint_ends_a_job_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def job() -> None:
        raise CheckpointError("there is no checkpoint")

    with pytest.raises(SystemExit) as caught:
        console.run(job)
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: there is no checkpoint\n")


def test_an_interrupt_is_one_whatever_py4j_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job() -> None:
        console._quietly(lambda: None)()  # the signal comes
        raise Py4JError("Gateway must be connected to send cancel cmd.")

    monkeypatch.setattr(console, "_interrupted", threading.Event())
    try:
        with pytest.raises(SystemExit) as caught:
            console.run(job)
    finally:
        logging.disable(logging.NOTSET)
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "error: interrupted.\n")

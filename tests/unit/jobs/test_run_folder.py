"""The trainer of a file, what a run folder is written with and resumed from, and its secrets."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fork_server import run_fresh
from job_files import parse, smallest
from launch import ROOT
from torch import nn
from trained import trained_model

import sparkdl
from sparkdl import ParameterError, summaries, tune
from sparkdl.codec.describe import REDACTED
from sparkdl.jobs.building import (
    bound,
    checkpoint_of,
    find,
    is_torch_loss,
    schedule_of,
    search_of,
    trainer_of,
)
from sparkdl.jobs.commands import Job
from sparkdl.jobs.config import defaults_of
from sparkdl.jobs.run_folder import RunFolder, load_saved, redacted, resume_point

EVERYTHING: dict[str, Any] = {
    "data": {
        "train": "a.parquet",
        "features": {"picture": "photo", "words": "text"},
        "label": "digit",
        "weight": "trust",
        "class_weights": {0: 2.0},
        "columns": {
            "photo": {"class_path": "sparkdl.Image", "init_args": {"size": [8, 8]}},
            "text": {
                "class_path": "sparkdl.Convert",
                "init_args": {"function": {"class_path": "builtins.len"}},
            },
        },
        "augment": "builtins.max",
        "bucketing": 100,
        "sampling": {"class_path": "sparkdl.Balanced", "init_args": {"column": "digit"}},
        "handle_invalid": "skip",
        "key": "number",
    },
    "optimizer": {
        "weight": {"class_path": "torch.optim:SGD", "init_args": {"lr": 1}},
        "": "torch.optim.Adam",
    },
    "trainer": {
        **{"epochs": 3, "max_iterations": 7, "max_seconds": 60, "min_loss": 0.1, "batch_size": 32},
        **{"replicas": 4, "slices": 3, "engine": "local", "strategy": "fsdp", "seed": 5},
        **{"mesh": {"data": 2, "shard": 2}, "precision": "bf16", "schedule_per": "epoch"},
        **{"schedule_metric": "accuracy", "clip_norm": 1, "clip_value": 2, "accumulate": 2},
        **{"local_steps": 3, "l1": {"*.weight": 1e-4}, "l2": 0.5, "on_nan": "skip"},
        **{"weights": "a.safetensors", "strict_weights": False, "freeze": ["weight"]},
        **{"unfreeze": ["bias"], "activation_checkpointing": ["*"], "ema": 0.9},
        **{"compile": {"mode": "default"}, "output": "logits", "histograms": 50},
        "buffers": {"*.codes": "max", "*": {"class_path": "torch.mean", "init_args": {"dim": 0}}},
    },
    "validation": {
        "share": 0.25,
        "metrics": [
            "accuracy",
            {
                "class_path": "torchmetrics.F1Score",
                "init_args": {"task": "multiclass", "num_classes": 2},
            },
        ],
        **{"every_epochs": 2, "every_iterations": 10, "best": "accuracy"},
    },
    "early_stopping": {"metric": "accuracy", "patience": 2, "min_delta": 0.01, "target": 1},
    "checkpoint": {"path": "there", "every_iterations": 5, "every_seconds": 30, "keep": None},
    "callbacks": ["sparkdl.Callback"],
}


def component(path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


def test_the_defaults_are_those_of_the_trainer() -> None:
    trainer = trainer_of(parse(smallest()))
    for field in dataclasses.fields(sparkdl.Trainer):
        if field.default is not dataclasses.MISSING and field.name not in ("stop", "loss"):
            given = getattr(trainer, field.name)
            assert type(field.default)(given) == field.default if given else not field.default
    assert trainer.stop == sparkdl.max_epoch(10)


def test_every_field_of_the_trainer_can_be_set() -> None:
    trainer = trainer_of(parse(smallest(**EVERYTHING)))
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
    others = {"wire", "compression", "consistency", "sync_batchnorm", "min_ranks", "step"}
    assert same == elsewhere | others
    top_k = component("sparkdl.TopK", ratio=0.1)
    other = trainer_of(parse(smallest(trainer={"wire": "bf16", "compression": top_k})))
    assert (other.wire, other.compression) == ("bf16", sparkdl.TopK(0.1))
    stale = component("sparkdl.StaleSynchronous", staleness=2)
    other = trainer_of(parse(smallest(trainer={"consistency": stale})))
    assert other.consistency == sparkdl.StaleSynchronous(staleness=2)
    cut = component("sparkdl.FSDP", units=["0"])
    gang = {"engine": "gang", "strategy": cut, "sync_batchnorm": True, "min_ranks": 2}
    other = trainer_of(parse(smallest(trainer=gang)))
    assert (other.strategy, other.sync_batchnorm) == (sparkdl.FSDP(units=["0"]), True)
    assert other.min_ranks == 2


def test_what_the_fields_are_set_to() -> None:
    trainer = trainer_of(parse(smallest(**EVERYTHING)))
    assert trainer.columns["photo"] == sparkdl.Image(size=(8, 8))
    assert trainer.columns["text"] == sparkdl.Convert(len)
    assert trainer.feature_columns == ("photo", "text")
    assert trainer.output == "logits"
    assert trainer.sampling == sparkdl.Balanced("digit")
    assert trainer.buffers["*.codes"] == "max"
    assert trainer.buffers["*"](torch.eye(2)).tolist() == [0.5, 0.5]  # type: ignore[operator]
    assert isinstance(trainer.optimizer, dict)
    assert trainer.optimizer["weight"].keywords == {"lr": 1}
    assert trainer.optimizer[""] is torch.optim.Adam
    assert (trainer.class_weights, trainer.l1) == ({0: 2.0}, {"*.weight": 1e-4})
    assert trainer.stop == (
        sparkdl.max_epoch(3) | sparkdl.max_iteration(7) | sparkdl.max_time(60)
        | sparkdl.min_loss(0.1)
        | (sparkdl.plateau("accuracy", 2, 0.01) | sparkdl.max_score("accuracy", 1))
    )  # fmt: skip
    assert trainer.validation is not None
    assert trainer.validation.every == sparkdl.every_epoch(2) | sparkdl.every(10)
    assert trainer.checkpoint == sparkdl.Checkpoint(
        "there", every=sparkdl.every(5) | sparkdl.every_seconds(30), keep=None
    )
    assert type(trainer.callbacks[0]) is sparkdl.Callback
    assert trainer.histograms == sparkdl.every(50)


def weighted_step(module: Any, batch: Any, factor: float = 1.0) -> Any:
    return factor * module(batch["features"]).mean()


def test_a_step_takes_the_place_of_the_loss() -> None:
    weighted = component(f"{__name__}.weighted_step", factor=2.0)
    trainer = trainer_of(parse(smallest(loss=None, step=weighted)))
    assert trainer.loss is None
    assert trainer.step is not None
    assert trainer.step(nn.Identity(), {"features": torch.ones(1, 1)}) == 2
    each = component("sparkdl.PerReplica", loss=weighted)
    assert isinstance(trainer_of(parse(smallest(loss=None, step=each))).step, sparkdl.PerReplica)
    with pytest.raises(ParameterError, match="neither loss= nor step= is given:"):
        trainer_of(parse(smallest(loss=None)))
    with pytest.raises(ParameterError, match="loss= and step="):
        trainer_of(parse(smallest(step=weighted)))


def test_the_example_names_every_key_and_makes_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    named = yaml.safe_load((ROOT / "conf/digits.yaml").read_text())
    config = parse(ROOT / "conf/digits.yaml")
    known = defaults_of("train")
    assert list(named) == list(known)
    for section, content in known.items():
        if isinstance(content, dict) and named[section] is not None:
            assert named[section].keys() == content.keys()
    trainer = trainer_of(config)
    assert isinstance(trainer.model(), nn.Module)
    assert trainer.checkpoint is not None
    assert trainer.checkpoint.every == sparkdl.every_epoch(5)
    search = search_of(config)
    assert search["space"]["schedule.max_lr"] == tune.loguniform(1e-3, 3e-2)
    assert search["space"]["model.dropout"] == [0.2, 0.5]
    assert (search["metric"], search["trials"], search["parallel"]) == ("accuracy", 8, None)


def test_a_search() -> None:
    """Keys of the file are names of the trainer."""
    algorithm = component("sparkdl.tune.Optuna", study_name="a")
    space = {"trainer.batch_size": [8], "trainer": {"clip_norm": [None, 1.0]}, "model.width": [1]}
    search = search_of(parse(smallest(tune={"space": space, "algorithm": algorithm})))
    assert search["space"].keys() == {"batch_size", "clip_norm", "model.width"}
    assert search["algorithm"] == tune.Optuna(study_name="a")


def test_without_a_path_checkpoints_are_in_the_run_folder() -> None:
    section = parse(smallest(checkpoint={}))["checkpoint"]
    assert checkpoint_of(section, Path("runs/a")) == sparkdl.Checkpoint(Path("runs/a/checkpoints"))
    assert parse(smallest(checkpoint=None))["checkpoint"] is None


def test_the_length_of_a_schedule() -> None:
    spec = component("torch.optim.lr_scheduler.OneCycleLR", max_lr=1.0, total_steps="iterations")
    assert schedule_of(spec, 12).keywords == {"max_lr": 1.0, "total_steps": 12}


def test_weights_of_a_run_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.json").write_text("{}")
    trainer = trainer_of(parse(smallest(trainer={"weights": str(tmp_path)})))
    assert trainer.weights == str(model / "model.safetensors")


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
    newest = run_folder(tmp_path / "a-20260101-000001")
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


def test_summaries_and_checkpoints_are_in_the_run_folder(tmp_path: Path) -> None:
    every = {"csv": True, "tensorboard": True, "mlflow": True}
    for given in ({"summaries": every, "checkpoint": {"keep": 2}}, {}):
        config = parse(smallest(**given))
        with RunFolder(str(tmp_path), "a", config) as folder:
            none: Any = None
            trainer = Job(config, trainer_of(config), none, none, none, 1, 1).fit_in(folder)
        kinds = [summaries.HistoryFile, summaries.TensorBoard, summaries.MLflow] if given else []
        assert [type(callback) for callback in trainer.callbacks] == [RunFolder, *kinds]
        checkpoint = sparkdl.Checkpoint(folder.path / "checkpoints", keep=2) if given else None
        assert trainer.checkpoint == checkpoint


TRIPLET = "torch.nn:TripletMarginWithDistanceLoss"


@pytest.mark.parametrize(
    ("loss", "safe"),
    [
        ("torch.nn.CrossEntropyLoss", True),
        ("torch.nn.functional:mse_loss", True),
        (component("torch.nn.MSELoss", reduction="sum"), True),
        (component(TRIPLET, distance_function="os.system"), True),
        (component(TRIPLET, distance_function=component("os.system")), False),
        ("torch.nn.functional:dropout", True),
        ("torch.nn:Parameter", False),
        ("torch.hub:load", False),
        ("os:system", False),
        ("sparkdl.jobs.digits.convnet", False),
    ],
)
def test_a_loss_of_a_run_folder_that_names_code_needs_trust(loss: Any, safe: bool) -> None:
    assert is_torch_loss(loss) is safe


def test_a_file_is_importable_again_from_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nets_of_test"
    folder.mkdir()
    (folder / "small.py").write_text("from torch import nn\ndef net(): return nn.Linear(1, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert find("nets_of_test/small.py:net").__module__ == "nets_of_test.small"


def test_a_model_of_a_file_travels_without_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import cloudpickle

    (tmp_path / "travels.py").write_text(
        "from torch import nn\ndef net(): return nn.Linear(4, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    data = cloudpickle.dumps(bound("travels.py:net"))
    (tmp_path / "travels.py").unlink()
    (tmp_path / "model.pkl").write_bytes(data)
    code = (
        "import pickle; "
        "print(sum(p.numel() for p in pickle.load(open('model.pkl', 'rb'))().parameters()))"
    )
    done = run_fresh(code, cwd=tmp_path)
    assert done.stdout == "15\n", done.stderr


def test_secrets_are_redacted() -> None:
    no_secrets = {
        "token_embedding": {"class_path": "torch.optim.SGD", "lr": 0.1},
        "data": {"columns": {"tokens": {"class_path": "sparkdl.Sequence", "mode": "L"}}},
        "max_tokens": 512,
        "keep": [1, "monkey"],
        "null_password": None,
        "spark.authenticate": True,
    }
    secrets = {
        "spark.hadoop.fs.s3a.access.key": "AKIA",
        "spark.hadoop.fs.azure.account.key.me.blob.net": "k",
        "storageKey": "k",
        "api_token": "t",
    }
    urls = {
        "options": {"user": "me", "password": 1234, "url": "jdbc:x://me:pw@host/db?sig=pw&a=1"},
        "train": ["abfss://container@account/a", "https://tok@host/a?X-Amz-Signature=pw"],
        "connection": "Server=h;Password=pw;Encrypt=true",
    }
    url = f"jdbc:x://{REDACTED}@host/db?sig={REDACTED}&a=1"
    signed = f"https://{REDACTED}@host/a?X-Amz-Signature={REDACTED}"
    assert redacted({**no_secrets, **secrets, **urls}) == {
        **no_secrets,
        **dict.fromkeys(secrets, REDACTED),
        "options": {"user": "me", "password": REDACTED, "url": url},
        "train": ["abfss://container@account/a", signed],
        "connection": f"Server=h;Password={REDACTED};Encrypt=true",
    }


def test_a_run_folder_is_never_written_twice(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path), "a", {}) as first, RunFolder(str(tmp_path), "a", {}) as second:
        assert first.path != second.path
    with pytest.raises(ParameterError, match="cannot be part of a folder name"):
        RunFolder(str(tmp_path), "../a", {})
    with pytest.raises(ParameterError, match='"s3://bucket/runs" is a URI, which only checkpoints'):
        RunFolder("s3://bucket/runs", "a", {})


def test_what_of_a_saved_run_is_code_needs_trust(tmp_path: Path) -> None:
    trained_model(nn.Linear(1, 1), model=partial(nn.Linear, 1, 1)).save(tmp_path / "run/model")
    config = {"metrics": ["accuracy", component("torchmetrics.F1Score", task="binary")]}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({**config, "loss": "os.system"}))
    for path in ("run", "run/model"):
        saved = load_saved(str(tmp_path / path), trust=False)
        assert (saved.metrics, saved.folder) == (["accuracy"], tmp_path / "run")
    trusted = load_saved(str(tmp_path / "run"), trust=True)
    assert [type(metric).__name__ for metric in trusted.metrics] == ["str", "BinaryF1Score"]
    with pytest.raises(
        sparkdl.TrustError, match=r"names a loss that is not of torch\.nn, os\.system"
    ):
        load_saved(str(tmp_path / "run"), trust=False, evaluates=True)
    assert load_saved(str(tmp_path / "run"), False, "torch.nn.MSELoss", True).trained.loss

"""What a user says about checkpoints, and what a manifest tells of a trainer."""

from __future__ import annotations

import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import message_of
from torch import nn

import sparkdl
from sparkdl.codec.describe import describe, describe_trainer, redact, without_credentials


def make_model(hidden: int = 8, api_key: str = "") -> nn.Module:
    return nn.Linear(hidden, 1)


def test_defaults() -> None:
    settings = sparkdl.Checkpoint("run")
    assert settings.keep == 3
    assert settings.every == sparkdl.every_epoch()
    sparkdl.Checkpoint(Path("run"), every=sparkdl.every(100), keep=None)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"path": 3}, "path=3"),
        ({"path": " "}, "path=' '"),
        ({"every": 100}, "every=100: give a trigger"),
        ({"keep": 0}, "keep=0"),
        ({"keep": True}, "keep=True"),
        ({"keep": 1.5}, "keep=1.5"),
    ],
)
def test_mistakes_are_told(values: dict, says: str) -> None:
    with pytest.raises(sparkdl.ParameterError, match=says):
        sparkdl.Checkpoint(**{"path": "run", **values})


def test_all_mistakes_are_told_at_once() -> None:
    assert message_of(sparkdl.ParameterError, sparkdl.Checkpoint, " ", keep=0) == (
        "2 problems:\n"
        "  - Checkpoint path=' ': give a folder, such as \"/shared/run-1\" or "
        '"s3://bucket/run-1".\n'
        "  - Checkpoint keep=0: give a whole number of at least 1, or None for all."
    )


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("batch_size", 64, "64"),
        ("API_TOKEN", "hunter2", "(redacted)"),
        ("db.password", "hunter2", "(redacted)"),
        ("fs.s3a.access.key", "hunter2", "(redacted)"),
        ("clientSecret", "hunter2", "(redacted)"),
        ("path", "s3://me:hunter2@bucket/a", "s3://(redacted)@bucket/a"),
        (
            "path",
            "https://h/a?sig=hunter2&access_token=hunter2&x=1",
            "https://h/a?sig=(redacted)&access_token=(redacted)&x=1",
        ),
        ("command", "run(password='hunter2', lr=1)", "run(password='(redacted)', lr=1)"),
        ("command", "run(password='hunter 2, 3', lr=1)", "run(password='(redacted)', lr=1)"),
        ("command", "--set=a.password=hunter2", "--set=a.password=(redacted)"),
        ("path", "https://hunter2@h/a", "https://(redacted)@h/a"),
        ("path", "s3://me:hunter@2@bucket/a", "s3://(redacted)@bucket/a"),
        ("path", "abfss://container@account/a", "abfss://container@account/a"),
        ("storageKey", "hunter2", "(redacted)"),
        ("passphrase", "hunter2", "(redacted)"),
        ("smtp_pass", "hunter2", "(redacted)"),
        ("bypass", "left", "left"),
        ("path", "//h/a?pass=hunter2&db.pass=hunter2", "//h/a?pass=(redacted)&db.pass=(redacted)"),
        ("command", "--bypass=left", "--bypass=left"),
        ("mail", "me@example.org", "me@example.org"),
        ("max_tokens", 512, "512"),
        ("num_tokens", "512", "512"),
        ("auth_token", 512, "(redacted)"),
        ("password", "1234", "(redacted)"),
        ("use_auth_token", None, "None"),
        ("tokenizer", "words", "words"),
        ("pad_token", "[PAD]", "[PAD]"),
        ("hf_token", "hunter2", "(redacted)"),
        ("keywords", "red", "red"),
        (
            "model",
            "make(max_tokens=512, token='hunter2')",
            "make(max_tokens=512, token='(redacted)')",
        ),
    ],
)
def test_secrets_are_hidden(key: str, value: Any, text: str) -> None:
    assert redact({key: value}) == {key: text}


@pytest.mark.parametrize("word", ["a", "a.", "QUJD", "a://b", "password=", "token"])
def test_a_long_text_takes_no_longer_for_each_letter(word: str) -> None:
    started = time.perf_counter()
    without_credentials(word * (40_000 // len(word)))
    assert time.perf_counter() - started < 5


def test_a_trainer_is_described() -> None:
    trainer = sparkdl.Trainer(
        model=partial(make_model, 4, api_key="hunter2"),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=0.02),
        features=["a", "b"],
        stop=sparkdl.max_epoch(3) | sparkdl.max_iteration(7),
        callbacks=[sparkdl.Callback()],
    )
    found = describe_trainer(trainer)
    name = f"{__name__}:make_model"
    assert found["model"] == f"{name}(4, api_key=(redacted))"
    assert found["loss"] == "torch.nn.modules.loss:MSELoss (a module)"
    assert found["optimizer"] == "torch.optim.adam:Adam(lr=0.02)"
    assert found["features"] == "['a', 'b']"
    assert found["label"] == "'label'"
    assert found["batch_size"] == "256"
    assert found["replicas"] == "None"
    assert found["stop"] == "Or(left=MaxEpoch(epochs=3), right=MaxIteration(iterations=7))"
    assert found["callbacks"] == "[sparkdl.loop.callbacks:Callback]"
    assert all(type(value) is str for value in found.values())
    assert set(found) == {field.name for field in fields(trainer) if field.init}


def test_long_values_are_shortened() -> None:
    trainer = sparkdl.Trainer(
        model=partial(make_model, bytes(range(256)) * 100),
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        class_weights=[0.5] * 10_000,
    )
    found = describe_trainer(trainer)
    assert found["model"] == f"{__name__}:make_model(builtins:bytes)"
    assert len(found["class_weights"]) < 2_100
    assert found["class_weights"].endswith("... (50,000 characters)")


def test_anything_can_be_described() -> None:
    settings = sparkdl.Checkpoint("s3://me:hunter2@bucket/a", keep=None)
    assert "hunter2" not in redact({"checkpoint": describe(settings)})["checkpoint"]
    assert describe({"user": "me", "token": "hunter2"}) == "{user: 'me', token: (redacted)}"
    assert "path='run/a'" in describe(sparkdl.Checkpoint(Path("run/a")))
    assert describe(torch.zeros(3)) == "torch:Tensor"
    assert describe(lambda: 1).startswith(f"{__name__}:test_anything")

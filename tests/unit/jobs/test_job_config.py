"""The jobs' configuration: YAML, --set, mistakes, components by name, redaction."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fork_server import run_fresh
from job_files import SMALLEST, smallest
from mistakes import message_of

from jobs.components import Component, find
from jobs.config import apply_change, parse, read_config, read_yaml
from jobs.run_folder import RunFolder, find_model, redacted
from jobs.sections import Config, TrainingSection
from sparkdl import ParameterError, UserError
from sparkdl.codec.describe import REDACTED

NAMES = ("model", "loss", "optimizer", "schedule")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(SMALLEST))
    return path


def test_defaults_and_round_trip() -> None:
    config = parse(smallest())
    assert (config.name, config.training.epochs, config.training.replicas) == ("run", 10, None)
    assert config.optimizer == Component("torch.optim:SGD", {"lr": 0.1})
    assert parse(config.content()) == config


def test_the_example_names_every_key() -> None:
    text = (ROOT / "conf/digits.yaml").read_text()
    given = yaml.safe_load(text)
    content = read_config(ROOT / "conf/digits.yaml").content()
    assert given.keys() == content.keys()
    assert given["early_stopping"] is None
    for section, value in content.items():
        if section not in NAMES and isinstance(value, dict):
            assert given[section].keys() == value.keys()
    line = re.search(r"^early_stopping: null +# or (.*)$", text, re.MULTILINE)
    assert line
    one = parse(smallest(early_stopping=yaml.safe_load(line[1]))).content()["early_stopping"]
    assert yaml.safe_load(line[1]).keys() == one.keys()


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("training.epochs=3", ("training", "epochs"), 3),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
        ("optimizer.lr=.5", ("optimizer", "lr"), 0.5),
        ("optimizer.nesterov=true", ("optimizer", "nesterov"), True),
        (
            "loss.reduction=mean",
            ("loss",),
            {"use": "torch.nn:CrossEntropyLoss", "reduction": "mean"},
        ),
        ("data.features=[a, b]", ("data", "features"), ["a", "b"]),
        ("schedule=null", ("schedule",), None),
        ("validation.share=0.1", ("validation",), {"share": 0.1}),
        ("gradients.l1.*.weight=1e-4", ("gradients", "l1"), {"*.weight": 1e-4}),
        ("name=a=b", ("name",), "a=b"),
        (
            "spark.settings.spark.executor.memory=2g",
            ("spark", "settings"),
            {"spark.executor.memory": "2g"},
        ),
    ],
)
def test_set(change: str, key: tuple[str, ...], value: object) -> None:
    content = yaml.safe_load(yaml.safe_dump(SMALLEST))
    apply_change(content, change)
    for part in key:
        content = content[part]
    assert content == value


def test_every_mistake_is_told_at_once(file: Path) -> None:
    changes = [
        "batchsize=3", "training.epoch=3", "training.seed=x", "name=5", "data.label=1",
        "model=5",
    ]  # fmt: skip
    told = message_of(ParameterError, read_config, file, changes)
    top = ", ".join(f.name for f in dataclasses.fields(Config))
    training = ", ".join(f.name for f in dataclasses.fields(TrainingSection))
    assert told.splitlines() == [
        f"{file}: 6 problems:",
        f'  - unknown key "batchsize". Did you mean "training.batch_size"? Known here: {top}.',
        "  - name: give text, not a whole number (quote it: '5').",
        "  - data.label: give text or a list of texts or null, not a whole number (quote it: '1').",
        "  - model: give module:name, or a mapping with it under use.",
        '  - unknown key "training.epoch". Did you mean "training.epochs"? '
        f"Known here: {training}.",
        "  - training.seed: give a whole number, not text.",
    ]


@pytest.mark.parametrize("change", ["name.a=1", "name=[1"])
def test_bad_changes(file: Path, change: str) -> None:
    with pytest.raises(ParameterError):
        read_config(file, [change])


def test_yaml_mistakes_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("name: a\ndata: {train: 2026-13-01}\n")
    assert message_of(ParameterError, read_config, path) == (
        f'{path}, line 2: "2026-13-01" cannot be read (month must be in 1..12): quote it.'
    )
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ParameterError, match="this is not UTF-8"):
        read_config(path)


def test_a_mapping_may_be_merged_into_others(tmp_path: Path) -> None:
    """At any depth; its keys may be given anew there, but none twice beside each other."""
    path = tmp_path / "b.yaml"
    path.write_text(
        "model: {use: torch.nn:Identity, more: &more {<<: &base {lr: 1e-2, a: 1}, lr: 1e-3}}\n"
        "optimizer: {<<: [*more, *base], use: torch.optim:SGD}\n"
    )
    assert read_yaml(path)["optimizer"] == {"use": "torch.optim:SGD", "lr": 1e-3, "a": 1}
    path.write_text("data: &data {train: a}\nmore:\n  <<: *data\n  b: 1\n  b: 2\n")
    with pytest.raises(ParameterError, match='line 5: the key "b" is given twice'):
        read_yaml(path)


def test_keys_and_values_that_are_no_text() -> None:
    assert message_of(
        ParameterError,
        parse,
        smallest(
            data={"train": "a", "options": {1: "a"}, "features": ["x", 2020]},
            model={"use": "torch.nn:Identity", True: 1},
            gradients={"l1": {"*.weight": "much"}},
            spark={"settings": {"spark": {"executor.memory": "2g"}}},
        ),
    ).splitlines() == [
        "5 problems:",
        "  - data.options: the key 1 is not text: quote it.",
        "  - data.features: 2020 in the list: give text (quote it: '2020').",
        "  - model: the argument True is not text: quote it.",
        '  - gradients.l1: "*.weight": give a number, not text.',
        '  - spark.settings: "spark": give a single value, not a mapping.',
    ]


def test_a_loss_class_becomes_an_instance() -> None:
    loss = Component("torch.nn:CrossEntropyLoss", {"label_smoothing": 0.1}).resolve_instance()
    assert loss.label_smoothing == 0.1  # type: ignore[attr-defined]
    function = Component("torch.nn.functional:mse_loss").resolve_instance()
    assert function.__name__ == "mse_loss"


TRIPLET = "torch.nn:TripletMarginWithDistanceLoss"


@pytest.mark.parametrize(
    ("loss", "safe"),
    [
        ("torch.nn:CrossEntropyLoss", True),
        ("torch.nn.functional:mse_loss", True),
        ({"use": "torch.nn:MSELoss", "reduction": "sum"}, True),
        ({"use": TRIPLET, "distance_function": "os:system"}, True),
        ({"use": TRIPLET, "distance_function": {"use": "os:system"}}, False),
        ("torch.nn.functional:importlib", False),
        ("torch.nn:Parameter", False),
        ("torch.hub:load", False),
        ("os:system", False),
        ("jobs.models:digits_convnet", False),
    ],
)
def test_a_loss_of_a_run_folder_that_names_code_needs_trust(loss: Any, safe: bool) -> None:
    assert Component.of(loss).is_torch_loss() is safe


def test_a_file_is_importable_again_from_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nets_of_test"
    folder.mkdir()
    (folder / "small.py").write_text("from torch import nn\ndef net(): return nn.Linear(1, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find("nets_of_test/small.py:net").__module__ == "nets_of_test.small"


def test_a_job_model_travels_without_its_module(tmp_path: Path) -> None:
    from pyspark import cloudpickle

    data = cloudpickle.dumps(Component("jobs.models:digits_convnet", {"width": 4}).resolve())
    (tmp_path / "model.pkl").write_bytes(data)
    code = (
        "import pickle, sys; sys.modules['jobs'] = None; "  # import jobs fails
        "print(sum(p.numel() for p in pickle.load(open('model.pkl', 'rb'))().parameters()))"
    )
    done = run_fresh(code, cwd=tmp_path)
    assert done.stdout == "814\n", done.stderr


def test_secrets_are_redacted() -> None:
    no_secrets = {
        "token_embedding": {"use": "torch.optim:SGD", "lr": 0.1},
        "data": {"columns": {"tokens": {"use": "sparkdl:Sequence", "mode": "L"}}},
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


def test_the_command_is_written_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [
        "--set=a.password=pw",
        "--set",
        "b.storage_key=pw",
        "c.uri=s3://me:pw@bucket/x?sig=pw",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "a.yaml", *secrets, "--set", "e=2"])
    RunFolder(tmp_path).write_config(parse(smallest()))
    text = (tmp_path / "config.yaml").read_text()
    assert "pw" not in text.splitlines()[0]
    assert "--config a.yaml" in text
    assert "--set e=2" in text


def test_a_command_of_several_lines_stays_a_comment(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--set", "name=a\nb: [c"])
    RunFolder(tmp_path).write_config(parse(smallest()))
    assert parse(yaml.safe_load((tmp_path / "config.yaml").read_text())) == parse(smallest())


def test_a_redacted_value_must_be_given_anew() -> None:
    content = smallest(spark={"settings": {"a.password": f"before {REDACTED}"}})
    key = "spark.settings.a.password"
    assert message_of(ParameterError, parse, content) == (
        f"{key} was redacted when it was written: give it again, with --set {key}=..."
    )


def test_a_run_folder_is_never_written_twice(tmp_path: Path) -> None:
    with RunFolder.create(str(tmp_path), "a") as first, RunFolder.create(str(tmp_path), "a") as two:
        assert first.path != two.path
    with pytest.raises(ParameterError, match="cannot be part of a folder name"):
        RunFolder.create(str(tmp_path), "../a").__enter__()


def test_a_mistake_leaves_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError), RunFolder.create(str(tmp_path), "a"):
        raise ParameterError("no")
    with pytest.raises(RuntimeError), RunFolder.create(str(tmp_path), "b"):
        raise RuntimeError("a fault: the folder stays")
    assert [p.name[:1] for p in tmp_path.iterdir()] == ["b"]


def test_find_model(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "model.json").write_text("{}")
    assert find_model(model) == (model, None)
    (tmp_path / "run" / "config.yaml").write_text("")
    assert find_model(model) == find_model(tmp_path / "run") == (model, tmp_path / "run")
    (model / "model.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"the run .*/run has no model: it has not ended"):
        find_model(tmp_path / "run")

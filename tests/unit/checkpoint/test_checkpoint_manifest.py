"""The manifest: JSON and back, what is refused, and what differs from a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.checkpoint.manifest import (
    Best,
    DataIdentity,
    FieldIdentity,
    Manifest,
    ModelIdentity,
    SliceFile,
    StoredFile,
    consistency_text,
)
from sparkdl.codec.describe import describe
from sparkdl.codec.files import checksum
from sparkdl.errors import CheckpointError, DamagedCheckpoint
from sparkdl.loop.state import Validated
from sparkdl.model.flat import layout_of


def model(width: int = 10, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, width, **options))


def identity(module: nn.Module) -> ModelIdentity:
    return ModelIdentity.of(layout_of(module))


DATA = DataIdentity(
    rows=(719, 718),
    checksums=(2**64 - 1, 5),
    fields=(
        FieldIdentity(name="features", dtype="float32", shape=(4,)),
        FieldIdentity(name="label", dtype="int64", shape=()),
    ),
)

FILE = SliceFile(name="slice-0.safetensors", nbytes=3, checksum="ab", index=0, start=0, stop=64)

MANIFEST = Manifest(
    iteration=120,
    epoch=2,
    position=20,
    samples=12345,
    seconds=1 / 3,
    replicas=2,
    slices=1,
    batch_size=64,
    seed=2**63 - 1,
    local_steps=4,
    layout=identity(model()),
    data=DATA,
    optimizers=("Adam",),
    files=(FILE,),
    loss_scale=2.0**16,
    skipped=1,
    validations=(
        Validated(iteration=60, epoch=1, metrics={"loss": math.inf, "accuracy": 0.1}),
        Validated(iteration=120, epoch=2, metrics={"loss": 1e-300, "accuracy": -0.0}),
    ),
    best=Best(iteration=60, epoch=1, metric="accuracy", value=0.1, files=(FILE,)),
    config={"batch_size": "64", "api_token": "hunter2", "path": "s3://me:hunter2@bucket/x"},
    extra={"schedule": {"best": math.inf, "rates": (0.1, 0.2), 3: [None, True]}},
    history=StoredFile(name="history.safetensors", nbytes=1, checksum="cd"),
)


def test_what_is_written_is_read() -> None:
    data = MANIFEST.to_json()
    hidden = {"batch_size": "64", "api_token": "(redacted)", "path": "s3://(redacted)@bucket/x"}
    assert Manifest.from_json(data) == replace(MANIFEST, config=hidden)
    assert b"hunter2" not in data
    content = json.loads(data, parse_constant=pytest.fail)  # no NaN or Infinity: JSON proper
    assert content["format"] == "sparkdl-checkpoint"
    assert content["sparkdl"] == sparkdl.__version__


def test_nan_metrics_come_back() -> None:
    validation = Validated(iteration=1, epoch=1, metrics={"loss": math.nan})
    found = Manifest.from_json(replace(MANIFEST, validations=(validation,)).to_json())
    assert math.isnan(found.validations[0].metrics["loss"])


def test_every_flipped_bit_is_noticed() -> None:
    """Unless it only turns white space into other white space."""
    data = MANIFEST.to_json()
    whole = Manifest.from_json(data)
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 1 << (place % 8)
        try:
            assert Manifest.from_json(bytes(broken)) == whole
        except DamagedCheckpoint:
            continue
        assert chr(data[place]).isspace() or chr(broken[place]).isspace()


def altered(**changes: Any) -> bytes:
    """A manifest with other content and a right checksum: the work of another program."""
    content = {**json.loads(MANIFEST.to_json()), **changes}
    content = {k: v for k, v in content.items() if v != "absent" and k != "checksum"}
    plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**content, "checksum": checksum(plain)}).encode()


@pytest.mark.parametrize(
    ("written", "model"),
    [
        ("Synchronous()", sparkdl.Synchronous()),
        ("Synchronous(drop_stragglers=None)", sparkdl.Synchronous()),
        ("Asynchronous(quorum=1, staleness=None, groups=2)", sparkdl.Asynchronous(groups=2)),
    ],
)
def test_options_that_a_consistency_model_got_later_are_no_difference(
    written: str, model: sparkdl.Synchronous | sparkdl.Asynchronous
) -> None:
    ours = consistency_text(describe(model)).replace(", scale='auto'", "")
    stored = Manifest.from_json(altered(consistency=written))
    assert not stored.differences(MANIFEST.layout, DATA, {"consistency": ours})
    assert consistency_text(describe(sparkdl.Synchronous())) == Manifest.consistency


def test_another_order_and_unknown_keys_are_read() -> None:
    assert Manifest.from_json(altered(unheard_of=1)).iteration == 120


PATH = {**json.loads(MANIFEST.to_json())["files"][0], "name": "../../etc/passwd"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (MANIFEST.to_json()[:-40], "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "format None"),
        (b'{"format": "sparkdl-model"}', "format 'sparkdl-model'"),
        (altered(version=2), "version 2 of the format, and this sparkdl reads version 1"),
        (MANIFEST.to_json().replace(b'"iteration": 120', b'"iteration": 121'), "checksum"),
        (altered(iteration="absent"), "incomplete: .*iteration"),
        (altered(iteration="120"), "iteration is a str"),
        (altered(iteration=True), "iteration is a bool"),
        (altered(files={}), "files is a dict"),
        (altered(files=[PATH]), "not a plain file name"),
        (altered(best={**json.loads(MANIFEST.to_json())["best"], "files": [PATH]}), "plain file"),
        (altered(history={"name": "/tmp/x", "nbytes": 1, "checksum": ""}), "not a plain file name"),
        (altered(extra={"a": {"code": 1}}), "unknown mark"),
        (altered(iteration=-1), "iteration is -1"),
        (altered(iteration=2**63), "iteration is 9223372036854775808"),
        (altered(batch_size=0), "batch_size is 0"),
        (altered(seconds="inf"), "seconds is inf"),
        (altered(replicas=3), "rows and the checksum of some partition"),
        (altered(files=[{**PATH, "name": "a", "nbytes": -1}]), "a has -1 bytes"),
        (altered(files=[{**PATH, "name": "a", "start": 65}]), "a holds elements 65 to 64"),
        (MANIFEST.to_json().replace(b"{", b'{"format": 1,', 1), "'format' is given twice"),
        (
            MANIFEST.to_json().replace(b'"iteration": 120', b'"iteration": NaN'),
            "NaN is not an allowed",
        ),
        (
            MANIFEST.to_json().replace(b'"iteration": 120', b'"iteration": 1e999'),
            "1e999 is not an allowed",
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=says):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iteration": 1.5}, "iteration is a float"),
        ({"extra": {"a": {1, 2}}}, r"extra\['a'\] is a set"),
        ({"config": {"a": 1}}, r"config\['a'\] is an int"),
    ],
)
def test_what_json_cannot_hold_is_named(changes: dict, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        replace(MANIFEST, **changes).to_json()


# Differences


def test_the_same_run_has_no_differences() -> None:
    constants = {"replicas": 2, "batch_size": 64, "local_steps": 4, "seed": 2**63 - 1}
    assert MANIFEST.differences(identity(model()), DATA, constants) == []


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            model(12),
            [
                'parameter "2.weight" is [12, 8] here and [10, 8] in the checkpoint',
                'parameter "2.bias" is [12] here and [10] in the checkpoint',
            ],
        ),
        (model(bias=False), ['parameter "2.bias" of the checkpoint is not in this model']),
        (
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 10), nn.Linear(10, 10)),
            [
                'parameter "3.weight" is not in the checkpoint',
                'parameter "3.bias" is not in the checkpoint',
            ],
        ),
        (
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 10).double()),
            [
                'parameter "2.weight" is float64 here and float32 in the checkpoint',
                'parameter "2.bias" is float64 here and float32 in the checkpoint',
                "the model trains in float64 here and in float32 in the checkpoint",
            ],
        ),
    ],
)
def test_another_model_is_told_tensor_by_tensor(module: nn.Module, says: list[str]) -> None:
    assert MANIFEST.differences(identity(module), DATA) == says


def test_only_the_first_few_differences_are_told() -> None:
    other = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
    found = MANIFEST.differences(identity(other), DATA)
    assert len(found) == 6
    assert found[-1].startswith("and ")
    assert found[-1].endswith(" more")


def test_tensors_in_another_order_are_told() -> None:
    class Net(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.zeros(3)))

    stored = replace(MANIFEST, layout=identity(Net("ab")))
    assert stored.differences(identity(Net("ba")), DATA) == [
        'tensor 0 is parameter "b" here and parameter "a" in the checkpoint: the order differs'
    ]


IMAGE = FieldIdentity(name="features", dtype="uint8", shape=(3, 8, 8))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": (900, 897)}, ["the data has 1,797 rows here and 1,437 in the checkpoint"]),
        (
            {"rows": (718, 719)},
            [
                "the number of rows is that of the checkpoint, but they are divided differently "
                "(an RDD with as many partitions as replicas keeps its partitions: divide it as "
                "before)",
                "partition 0 has 718 rows here and 719 in the checkpoint",
                "partition 1 has 719 rows here and 718 in the checkpoint",
            ],
        ),
        (
            {"checksums": (2**64 - 1, 6)},
            ["partition 1 holds other rows than in the checkpoint (the checksums differ)"],
        ),
        (
            {"rows": (400, 400, 637), "checksums": (1, 2, 3)},
            ["the data is in 3 partitions here and in 2 in the checkpoint"],
        ),
        (
            {"fields": (IMAGE, DATA.fields[1])},
            ['the field "features" is uint8[3, 8, 8] here and float32[4] in the checkpoint'],
        ),
        ({"fields": DATA.fields[:1]}, ['the field "label" of the checkpoint is not in this data']),
        (
            {"fields": DATA.fields[::-1]},
            ['the fields are "label", "features" here and "features", "label" in the checkpoint'],
        ),
    ],
)
def test_other_data_is_told(changes: dict, says: list[str]) -> None:
    assert MANIFEST.differences(identity(model()), replace(DATA, **changes)) == says


def test_other_constants_are_told() -> None:
    found = MANIFEST.differences(identity(model()), DATA, {"batch_size": 128, "replicas": 2})
    assert found == ["batch_size is 128 here and 64 in the checkpoint"]


def test_the_identity_of_data_comes_from_its_partitions() -> None:
    from sparkdl.data.partition_writer import Field, SampleHandle

    fields = (Field("x", "float32", (2,)), Field("y", "int64", ()))
    handles = [SampleHandle("t", (), "", 0, 0, ()), SampleHandle("t", (), "", 3, 77, fields)]
    found = DataIdentity.of(handles)
    assert (found.rows, found.checksums) == ((0, 3), (0, 77))
    assert [str(f) for f in found.fields] == ["float32[2]", "int64"]

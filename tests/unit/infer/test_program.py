"""Programs of operations: what a model without its code predicts, and what a forged one cannot do."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from mistakes import message_of
from torch import nn
from trained import trained_model

from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding
from sparkdl.errors import ModelError
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.program import Program
from sparkdl.model.recipe import Signature

Pair = namedtuple("Pair", ["low", "high"])
IDS = Field("ids", "int64", (), Padding(lengths=True))
SERIES = Field("x", "float32", (2,), Padding())
NUMBERS, IMAGES = Field("x", "float32", (3,)), Field("x", "float32", (3, 8, 8))


class Layers(nn.Module):
    """Running statistics, in place, a constant, dropout, and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 2)
        )
        self.scale = torch.tensor([1.0, 2.0])

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = self.body(x)
        y = y * self.scale + torch.arange(2, device=x.device)
        return {"y": y, "pair": Pair(y.amin(1), y.amax(1)), "rows": (x.shape[0], "rows", object())}


class Shared(nn.Module):
    """Layers that share weights, and a buffer that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
        self.other = self.one
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = torch.relu(self.conv(x)).mean((2, 3)) * self.scale
        return self.other(self.one(means))


class Attention(nn.Module):
    """Positions, a mask, and lengths by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(9, 8), nn.Parameter(torch.randn(32, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids: torch.Tensor, ids_lengths: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(ids.shape[1]) >= ids_lengths[:, None]
        hidden = self.table(ids) + self.places[: ids.shape[1]]
        return self.layer(hidden, src_key_padding_mask=padding).mean(1)


class Bag(nn.EmbeddingBag):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids) / lengths[:, None]


class Function(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(2, 1), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer, x)


def locked(module: nn.Module, *fields: Field, **changes: Any) -> TrainedModel:
    """Return a trained model that a folder holds as a pickle."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return trained_model(
        module,
        model=lambda: module,
        features=tuple(field.name for field in fields),
        fields=fields,
        num_features=len(fields),
        **changes,
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sparkdl"]


MODELS: dict[str, Callable[[], TrainedModel]] = {
    "layers": lambda: locked(Layers(), NUMBERS),
    "shared": lambda: locked(Shared(), IMAGES),
    "by keyword": lambda: locked(Attention(), IDS, signature=Signature(("ids", "ids_lengths"))),
    "bag": lambda: locked(Bag(9, 4, padding_idx=0), IDS),
    "half": lambda: locked(nn.Linear(3, 2).to(torch.bfloat16), NUMBERS),
    "recurrent": lambda: locked(nn.LSTM(8, 4, batch_first=True), Field("x", "float32", (5, 8))),
}


def inputs(trained: TrainedModel, rows: int, length: int) -> list[torch.Tensor]:
    (field,) = trained.fields
    if field.dtype == "int64":
        return [
            torch.arange(rows * length).reshape(rows, length) % 8 + 1,
            torch.full((rows,), length),
        ]
    dtype = next((p.dtype for p in trained.module.parameters()), torch.float32)
    return [torch.randn(rows, *field.shape).to(dtype)]


@pytest.mark.parametrize("row", soak_but(["layers", "bag"], MODELS))
def test_a_model_without_its_code_predicts_the_same_bits(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For any number of rows and any length; and its folder, saved again, needs no pickle at all."""
    trained = MODELS[row]()
    folder = trained.save(tmp_path / "model")
    assert not said(caplog)
    program = load(folder)
    again = load(program.save(tmp_path / "again"))
    assert not (tmp_path / "again" / "recipe.pkl").exists()
    for rows, length in ((1, 1), (2, 9), (64, 17)):
        batch = inputs(trained, rows, length)
        expected = trained.module(*batch)
        if row == "layers":
            expected = {"y": expected["y"], "pair": expected["pair"]._asdict()}
        for one in (program, again):
            assert isinstance(one.module, Program)
            found = one.module(*batch)
            if row == "layers":
                assert found.pop("rows") == (rows, "rows", None)
            exact = {} if row == "by keyword" else {"rtol": 0, "atol": 0}  # it has a fast path
            torch.testing.assert_close(found, expected, **exact)
    with pytest.raises(ModelError, match="predicts and does not train"):
        program.module.train()


ALONE: dict[str, tuple[Callable[..., Any], str]] = {
    "by values": (lambda layer, x: layer(x) if x.sum() > 0 else -layer(x), "data-dependent"),
    "by odd lengths": (
        lambda layer, x: layer(x[:, 1:] if x.shape[1] % 2 else x).mean(1),
        "another way by sizes",
    ),
    "of so many rows": (
        lambda layer, x: layer(x).reshape(5, -1),
        "a constant of the number of rows",
    ),
    "memory that nobody wrote": (
        lambda layer, x: layer(x).mean(1) + torch.empty(3).sum() * 0,
        "may not call 'empty.memory_format'",
    ),
}


@pytest.mark.parametrize("row", soak_but(["by values"], ALONE))
def test_where_there_is_no_program_a_sentence_says_so(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    function, why = ALONE[row]
    locked(Function(function), SERIES).save(tmp_path / "model")
    (told,) = said(caplog)
    assert "opens only with trust=True, or with model=make_model: it is a lambda." in told
    assert "A program for predictions without its code cannot be stored beside it: " in told
    assert why in told


def test_rows_that_a_program_is_not_for(tmp_path: Path) -> None:
    program = load(MODELS["by keyword"]().save(tmp_path / "model")).module
    told = message_of(
        ModelError, program, torch.ones(2, 33, dtype=torch.int64), ids_lengths=torch.tensor([3, 33])
    )
    assert told.startswith(
        'the Program of Attention takes "inputs_0" of shape [0 to any, 0 to 32],'
    )


FORGED = {
    "a function of torch": ["os.system", ["touch {mark}"]],
    "by a dotted name": ["torch.os.system", ["touch {mark}"]],
    "a file": ["from_file.default", ["{mark}", True, 4]],
    "a method": ["linear.__class__", []],
    "a private operator": ["_sparse_coo_tensor_unsafe.default", []],
    "another namespace": ["prim::Print", ["x"]],
    "not there": ["no_such.default", []],
}


@pytest.mark.parametrize("row", FORGED)
def test_a_forged_program_calls_nothing(row: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    MODELS["half"]().save(folder)
    content = json.loads((folder / "model.json").read_text())
    del content["checksum"]
    recipe = content["recipe"]["program"]
    program = json.loads(recipe["args"][0])
    name, args = FORGED[row]
    args = [one.format(mark=mark) if isinstance(one, str) else one for one in args]
    program["operations"].insert(0, ["forged", name, args, {"dict": []}, []])
    recipe["args"] = [json.dumps(program)]
    (folder / "model.json").write_text(json.dumps(content))
    assert "a program may not call" in message_of(ModelError, load, folder)
    assert not mark.exists()

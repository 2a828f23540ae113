"""Programs of operations: what a model without its code predicts, and what a forged one cannot do."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


class Named(nn.Module):
    """Tensors with the names of attributes, a table of positions made when first needed, no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.constant_0 = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self._buffers["forward"], self.places = torch.ones(3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.places is None or self.places.shape[0] < x.shape[0]:
            self.places = torch.arange(x.shape[0]).float()[:, None]
        places = self.places[: x.shape[0]]
        y = self.text(x) * self.constant_0 + places + torch.tensor([1.0, 2.0, 3.0])
        return y.to(x.dtype) + self._buffers["forward"]


class Windows(nn.Module):
    """Windows of two elements, so that a result may have the size 1, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.transpose(1, 2))
        keep = (y > -1) & (y < 1)
        return (y * keep.to(device=x.device, dtype=x.dtype)).amax(2)


MODELS: dict[str, Callable[[], TrainedModel]] = {
    "layers": lambda: locked(Layers(), NUMBERS),
    "shared": lambda: locked(Shared(), IMAGES),
    "by keyword": lambda: locked(Attention(), IDS, signature=Signature(("ids", "ids_lengths"))),
    "bag": lambda: locked(Bag(9, 4, padding_idx=0), IDS),
    "half": lambda: locked(nn.Linear(3, 2).to(torch.bfloat16), NUMBERS),
    "windows": lambda: locked(Windows(), SERIES),
    "named": lambda: locked(Named(), NUMBERS),
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
    lengths = [max(2, length)] * len(field.rules)
    return [torch.randn(rows, *lengths, *field.shape).to(dtype)]


@pytest.mark.parametrize("row", soak_but(["layers", "bag"], MODELS))
def test_a_model_without_its_code_predicts_the_same_bits(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For any number of rows and any length; and its folder, saved again, needs no pickle at all."""
    trained = MODELS[row]()
    folder = trained.save(tmp_path / "model")
    told = ["rows that have no elements" in one for one in said(caplog)]
    assert told == [True] * (row == "by keyword"), "it has a fast path, where all may be masked"
    places = getattr(trained.module, "places", None)
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
    if row == "named":
        assert places is None, "no trial has reached the model"
    with pytest.raises(ModelError, match="predicts and does not train"):
        program.module.train()


class Places:
    """A table that grows, and has the length of the longest rows so far."""

    def __init__(self) -> None:
        self.table = torch.ones(50, 1)

    def __call__(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.ones(x.shape[1], 1)
        return layer(x).mul(self.table[: x.shape[1]]).mean(1)


ALONE: dict[str, tuple[Callable[..., Any], str]] = {
    "by values": (lambda layer, x: layer(x) if x.sum() > 0 else -layer(x), "data-dependent"),
    "by odd lengths": (
        lambda layer, x: layer(x[:, 1:] if x.shape[1] % 2 else x).mean(1),
        "do not return what the module does",
    ),
    "by one length": (
        lambda layer, x: layer(x).mean(1) * (2 if x.shape[1] == 9 else 1),
        "for 2 rows of length 9",
    ),
    "for one row": (
        lambda layer, x: layer(x).mean(1) * (2 if x.shape[0] == 1 else 1),
        "for 1 rows of length 7, its operations alone do not return what the module does",
    ),
    "of so many rows": (
        lambda layer, x: layer(x).reshape(5, -1),
        "a constant of the number or the length of rows",
    ),
    "draws of NumPy": (
        lambda layer, x: layer(x).mean(1) + np.random.random(),
        "do not return what the module does",
    ),
    "places made before": (Places(), "of shape [0 to any, 0 to 50, 2]"),
    "memory that nobody wrote": (
        lambda layer, x: layer(x).mean(1) + torch.empty(3).sum() * 0,
        "calls aten.empty.memory_format, which is not among what a program may call",
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
    shape = '"inputs_0" of shape [0 to any, 0 to 32] in torch.int64, and gets one of [2, 33]'
    assert told.startswith(f"the Program of Attention takes {shape}")
    assert "takes ids, ids_lengths." in message_of(ModelError, program, labels=torch.ones(2))


def forged(saved: Path, folder: Path, operations: list[list[Any]]) -> Path:
    """Copy a saved program, and let it begin with other operations, of a name and arguments."""
    shutil.copytree(saved, folder)
    content = json.loads((folder / "model.json").read_text())
    del content["checksum"]
    recipe = content["recipe"]["program"]
    program = json.loads(recipe["args"][0])
    added = [
        [f"r{i}", name, args, {"dict": list(named.items())}, []]
        for i, (name, args, *(named,)) in enumerate((*one, {})[:3] for one in operations)
    ]
    program["operations"] = added + program["operations"]
    recipe["args"] = [json.dumps(program)]
    (folder / "model.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    MODELS["half"]().save(folder)
    return folder


FORGED: dict[str, list[Any]] = {
    "a function of torch": ["os.system", ["touch {mark}"]],
    "by a dotted name": ["torch.os.system", ["touch {mark}"]],
    "a file": ["from_file.default", ["{mark}", True, 4]],
    "a file of TorchScript": ["save.default", [1, "{mark}"]],
    "a method": ["linear.__class__", []],
    "a private operator": ["_sparse_coo_tensor_unsafe.default", []],
    "another namespace": ["prim::Print", ["x"]],
    "without checks": ["segment_reduce.default", []],
    "into other memory": ["as_strided_.default", []],
    "a result": ["add.out", []],
    "not there": ["no_such.default", []],
    "a kind of numbers": ["zeros.default", [[2]], {"dtype": {"leaf": {"dtype": "quint8"}}}],
    "a layout": ["zeros.default", [[2]], {"layout": {"leaf": {"layout": "sparse_coo"}}}],
    "an attribute": ["zeros.default", [[2]], {"dtype": {"leaf": {"dtype": "os"}}}],
}


@pytest.mark.parametrize("row", FORGED)
def test_a_forged_program_calls_nothing(row: str, saved: Path, tmp_path: Path) -> None:
    mark, (name, args, *named) = tmp_path / "mark", FORGED[row]
    args = [one.format(mark=mark) if isinstance(one, str) else one for one in args]
    folder = forged(saved, tmp_path / "model", [[name, args, *named]])
    told = message_of(ModelError, load, folder)
    assert any(
        some in told for some in ("a program may not call", "a program has no", "does not have")
    )
    assert not mark.exists()


R0, R1, R2 = ({"leaf": {"value": f"r{i}"}} for i in range(3))
UNFIT: dict[str, list[list[Any]]] = {
    "fewer values than keys": [
        ["zeros.default", [[1, 2, 64, 8]]],
        ["zeros.default", [[1, 2, 1, 8]]],
        ["scaled_dot_product_attention.default", [R0, R0, R1]],
    ],
    "bags before the first index": [
        ["zeros.default", [[4, 8]]],
        ["arange.default", [3]],
        ["neg.default", [R1]],
        ["embedding_bag.padding_idx", [R0, R1, R2, False, 0, False, None, False, None]],
    ],
    "states of one row": [
        ["zeros.default", [[1, 1, 4]]],
        ["zeros.default", [[3, 5, 16]]],
        ["zeros.default", [[16, 16]]],
        ["lstm.input", [R1, [R0, R0], [R2, R2], False, 1, 0.0, False, False, True]],
    ],
}


@pytest.mark.parametrize("row", UNFIT)
def test_a_forged_program_stays_within_its_memory(row: str, saved: Path, tmp_path: Path) -> None:
    """Kernels of torch that trust their arguments get what fits together."""
    program = load(forged(saved, tmp_path / "model", UNFIT[row])).module
    with pytest.raises(ValueError, match=r"other keys|list of indices|other shapes"):
        program(torch.ones(2, 3, dtype=torch.bfloat16))


def test_a_program_needs_its_default_dtype(saved: Path) -> None:
    program = load(saved).module
    torch.set_default_dtype(torch.float64)
    try:
        told = message_of(ModelError, program, torch.ones(2, 3, dtype=torch.bfloat16))
    finally:
        torch.set_default_dtype(torch.float32)
    assert "was made where torch's default dtype is torch.float32" in told

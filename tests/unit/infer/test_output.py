"""A model's output as a Spark column."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from mistakes import message_of
from torch import nn

from sparkdl import Convert
from sparkdl.data.columns.base import Column
from sparkdl.errors import ParameterError
from sparkdl.infer import outputs as output_module
from sparkdl.infer.forward import ShippedModule
from sparkdl.infer.outputs import (
    Output,
    OutputColumn,
    as_numpy,
    common_type,
    offsets,
    pieces,
    sql_type,
    to_arrow,
    to_nested,
    type_of,
)
from sparkdl.infer.read import ReadColumns
from sparkdl.infer.score import ScoreColumns
from sparkdl.model.recipe import Signature

TYPES = [
    (torch.float32, "float", pa.float32()),
    (torch.float64, "double", pa.float64()),
    (torch.float16, "float", pa.float32()),
    (torch.bfloat16, "float", pa.float32()),
    (torch.int64, "bigint", pa.int64()),
    (torch.int32, "int", pa.int32()),
    (torch.int16, "smallint", pa.int16()),
    (torch.int8, "tinyint", pa.int8()),
    (torch.uint8, "smallint", pa.int16()),
    (torch.bool, "boolean", pa.bool_()),
]


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3), (4, 3, 2), (4, 1, 2, 3)])
@pytest.mark.parametrize(("dtype", "sql", "arrow"), TYPES)
def test_an_output_becomes_the_column_that_was_declared(
    dtype: torch.dtype, sql: str, arrow: pa.DataType, shape: tuple[int, ...]
) -> None:
    tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5).to(dtype)
    output = Output.of(tensor)
    assert output == Output(shape[1:], str(dtype).removeprefix("torch."))
    depth = len(shape) - 1
    assert sql_type(output.kind).simpleString() == "array<" * depth + sql + ">" * depth
    column = to_arrow(as_numpy(tensor))
    kind = arrow
    for _ in range(depth):
        kind = pa.list_(kind)
    assert column.type == kind
    column.validate(full=True)
    assert column.to_pylist() == tensor.tolist()


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "complex64", "float8_e5m2"])
def test_an_output_that_no_column_holds_is_told(name: str) -> None:
    values = torch.zeros(2, 3).to(getattr(torch, name))
    told = message_of(ParameterError, OutputColumn.of, "p", None, values, 2)
    assert told.startswith(f"Spark has no column type for {name}: convert the output with postpro")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 3, 2), (2, 0), (2, 0, 3), (2, 3, 0)])
def test_no_rows_and_rows_of_nothing(shape: tuple[int, ...]) -> None:
    column = to_arrow(np.zeros(shape, np.float32))
    column.validate(full=True)
    assert column.to_pylist() == np.zeros(shape).tolist()


@pytest.mark.parametrize("spec", [None, Convert(list)], ids=["plain", "grows"])
def test_outputs_are_given_away_batch_by_batch(spec: Convert | None) -> None:
    """However many rows come in at once: outputs may be much larger than inputs."""
    rows = np.arange(26.0, dtype=np.float32).reshape(13, 2)
    seen: list[int] = []

    def count(output: torch.Tensor) -> torch.Tensor:
        seen.append(len(output))
        return output

    reader = ReadColumns.of((Column("x", "float32", depth=1, spec=spec),), 4)
    column = OutputColumn("p", None, Output((2,), "float32"), finish=count)
    module = ShippedModule.of(nn.Identity(), None)
    body = ScoreColumns(module, reader, (column,), Signature(), 4, by_length=False)
    outputs = body(to_arrow(part) for part in (rows[:10], rows[10:]))
    first = next(outputs)
    assert seen == [4]
    found = [first, *outputs]
    assert [len(array) for array in found] == seen == [4, 4, 2, 3]
    assert [row for array in found for row in array.to_pylist()] == rows.tolist()


def test_an_output_of_more_values_than_offsets_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2**31 - 1 at most are the offsets of a list; here of 12."""
    monkeypatch.setattr(output_module, "MAX_VALUES", 12)
    batch = np.arange(35.0).reshape(5, 7)
    assert [part.tolist() for part in pieces(batch)] == [[row] for row in batch.tolist()]
    assert [len(part) for part in pieces(batch[:, :5])] == [2, 2, 1]
    assert [len(part) for part in pieces(batch[:, :0])] == [5]
    assert [len(part) for part in pieces(batch[:, 0])] == [5]


def test_offsets_do_not_wrap() -> None:
    assert offsets(3, 2**29).to_pylist() == [0, 2**29, 2**30, 3 * 2**29]
    with pytest.raises(pa.ArrowInvalid):
        offsets(4, 2**29)


def test_an_output_in_another_memory_order_and_with_gradients() -> None:
    tensor = torch.arange(12.0, requires_grad=True).reshape(2, 2, 3).transpose(1, 2)
    assert not tensor.is_contiguous()
    assert to_arrow(as_numpy(tensor)).to_pylist() == tensor.tolist()


@pytest.mark.parametrize(("output", "kind"), [((torch.ones(1),), "a tuple"), (None, "None")])
def test_what_is_no_tensor(output: object, kind: str) -> None:
    assert message_of(TypeError, as_numpy, output) == f"the model returned {kind}, not a tensor"


NESTED: dict[str, tuple[list[object], list[object] | None, str]] = {
    "boxes": (
        [torch.ones(2, 4), torch.zeros(0, 4)], [[[1.0] * 4] * 2, []], "array<array<float>>"
    ),
    "arrays of other shapes": (
        [torch.ones(1, 2).half(), torch.ones(2, 1).half()],
        [[[1.0, 1.0]], [[1.0], [1.0]]], "array<array<float>>",
    ),
    "numbers": ([torch.tensor(3), torch.tensor(4)], [3, 4], "bigint"),
    "NumPy": ([np.float32(0.5), np.float32(1)], [0.5, 1.0], "float"),
    "bytes of images": ([np.arange(2, dtype=np.uint8)], [[0, 1]], "array<smallint>"),
    "texts": ([["a", "b"], [], None], [["a", "b"], [], None], "array<string>"),
    "whole and other numbers": ([[1], [0.5], []], [[1.0], [0.5], []], "array<double>"),
    "tensors and lists": ([torch.ones(2), [2.0]], [[1.0, 1.0], [2.0]], "array<double>"),
    "entities": (
        [[{"of a": "x", "at": torch.tensor([1, 2])}], [{"of a": "y"}], []],
        [[{"of a": "x", "at": [1, 2]}], [{"of a": "y", "at": None}], []],
        "array<struct<of a:string,at:array<bigint>>>",
    ),
    "a struct that is null": ([None, {"a": True}], [None, {"a": True}], "struct<a:boolean>"),
    "texts and numbers": (["a", 1], None, "it is string in one row and int64 in another"),
    "lists and numbers": ([[1], 1], None, "in one row and int64 in another"),
    "objects": ([object()], None, "a column cannot hold an object"),
    "times": ([[np.datetime64("2026-01-01", "s")]], None, r"a column cannot hold datetime64\[s\]"),
}  # fmt: skip


@pytest.mark.parametrize("row", NESTED)
def test_values_by_row(row: str) -> None:
    values, expected, sql = NESTED[row]
    if expected is None:
        with pytest.raises(TypeError, match=sql):
            common_type(map(type_of, values))
        return
    kind = common_type(map(type_of, values))
    assert sql_type(kind).simpleString() == sql
    found = to_nested(values, kind)
    assert found.type == kind
    assert found.to_pylist() == expected
    assert to_nested(values[:0], kind).to_pylist() == []

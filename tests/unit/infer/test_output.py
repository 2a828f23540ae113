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
from sparkdl.infer import outputs as output_module
from sparkdl.infer.forward import ShippedModule
from sparkdl.infer.outputs import Output, OutputColumn, as_numpy, offsets, pieces, to_arrow
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
    assert output.sql_type == "array<" * depth + sql + ">" * depth
    column = to_arrow(as_numpy(tensor))
    kind = arrow
    for _ in range(depth):
        kind = pa.list_(kind)
    assert column.type == kind
    column.validate(full=True)
    assert column.to_pylist() == tensor.tolist()


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

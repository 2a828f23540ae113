"""A model's output for one sample, and its conversion to a Spark column."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import Column

from sparkdl.errors import ParameterError, kind_of

_SQL = {
    "float32": "float",
    "float64": "double",
    "float16": "float",
    "bfloat16": "float",
    "int64": "bigint",
    "int32": "int",
    "int16": "smallint",
    "int8": "tinyint",
    "uint8": "smallint",
    "bool": "boolean",
}
MAX_VALUES = 2**31 - 1
"""The most values that a column of lists can hold, since its offsets are int32."""


@dataclass(frozen=True)
class Output:
    """The shape of the output for one sample (as seen once; lengths may vary), and its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(output: torch.Tensor) -> Output:
        """Return the description of a batch's output, whose first dimension is the rows."""
        return Output(tuple(output.shape[1:]), str(output.dtype).removeprefix("torch."))

    @property
    def dimensions(self) -> int:
        """The number of dimensions of a batch's output."""
        return len(self.shape) + 1

    @property
    def sql_type(self) -> str:
        """The type of the prediction column: ``float``, ``array<float>``, ...

        Raises :class:`sparkdl.ParameterError` for a dtype that no column can hold.
        """
        kind = _SQL.get(self.dtype)
        if kind is None:
            raise ParameterError(
                f"Spark has no column type for {self.dtype}: convert the output with postprocess=, "
                "for example to torch.float32."
            )
        for _ in self.shape:
            kind = f"array<{kind}>"
        return kind


def ml_column(column: Column, output: Output) -> Column:
    """Return a column of predictions as a double or as a vector of ``pyspark.ml``."""
    from pyspark.ml.functions import array_to_vector  # takes a while

    if len(output.shape) > 1:
        raise ParameterError(
            f"ml_types=True: a prediction has the shape {list(output.shape)}, and pyspark.ml has "
            "numbers and vectors only: make one of it with postprocess=."
        )
    if not output.shape:
        return column.cast("double")
    return column[0].cast("double") if output.shape == (1,) else array_to_vector(column)


def to_arrow(batch: np.ndarray) -> pa.Array:
    """Return a batch of shape (rows, ...) as an Arrow column of numbers or of nested lists."""
    if batch.dtype == np.uint8:
        batch = batch.astype(np.int16)
    array: pa.Array = pa.array(np.ascontiguousarray(batch).reshape(-1))
    for axis in range(batch.ndim - 1, 0, -1):
        lists, length = math.prod(batch.shape[:axis]), batch.shape[axis]
        array = pa.ListArray.from_arrays(offsets(lists, length), array)
    return array


def offsets(lists: int, length: int) -> pa.Array:
    """Return the offsets of ``lists`` lists of this length. Raises ``pa.ArrowInvalid`` beyond int32."""
    return pa.array(np.arange(lists + 1) * length, pa.int32())


def pieces(batch: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of a batch in pieces with no more values than int32 offsets can count."""
    rows = max(1, MAX_VALUES // max(1, math.prod(batch.shape[1:])))
    for start in range(0, len(batch), rows):
        yield batch[start : start + rows]


def as_numpy(output: Any) -> np.ndarray:
    """Return a model's output as NumPy, half precisions as float32.

    Raises TypeError if it is not a tensor.
    """
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"the model returned {kind_of(output)}, not a tensor")
    tensor = output.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.numpy()

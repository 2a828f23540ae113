"""What a model puts out for one sample, and how Spark sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

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
"""So many values a column of lists holds at most: their offsets are int32."""


@dataclass(frozen=True)
class Output:
    """``shape`` of the output for one sample (as seen once; lengths may vary), and its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(output: torch.Tensor) -> Output:
        """Of a batch's output, first dimension the rows."""
        return Output(tuple(output.shape[1:]), str(output.dtype).removeprefix("torch."))

    @property
    def dimensions(self) -> int:
        """Of a batch's output."""
        return len(self.shape) + 1

    @property
    def sql_type(self) -> str:
        """The type of the prediction column: ``float``, ``array<float>``, ... Raises
        :class:`sparkdl.ParameterError` for numbers of which there are no columns."""
        kind = _SQL.get(self.dtype)
        if kind is None:
            raise ParameterError(
                f"Spark has no column of {self.dtype}: make other numbers of the output with "
                "postprocess=, such as torch.float32."
            )
        for _ in self.shape:
            kind = f"array<{kind}>"
        return kind


def to_arrow(batch: np.ndarray) -> pa.Array:
    """Shape (rows, ...) -> a column: numbers, or nested lists of them."""
    if batch.dtype == np.uint8:
        batch = batch.astype(np.int16)
    array: pa.Array = pa.array(np.ascontiguousarray(batch).reshape(-1))
    for axis in range(batch.ndim - 1, 0, -1):
        lists, length = math.prod(batch.shape[:axis]), batch.shape[axis]
        array = pa.ListArray.from_arrays(offsets(lists, length), array)
    return array


def offsets(lists: int, length: int) -> pa.Array:
    """Where so many lists of this length begin and end. Raises ``pa.ArrowInvalid`` beyond int32."""
    return pa.array(np.arange(lists + 1) * length, pa.int32())


def pieces(batch: np.ndarray) -> Iterator[np.ndarray]:
    """The rows of a batch, together as long as offsets count their values."""
    rows = max(1, MAX_VALUES // max(1, math.prod(batch.shape[1:])))
    for start in range(0, len(batch), rows):
        yield batch[start : start + rows]


def as_numpy(output: Any) -> np.ndarray:
    """A model's output as NumPy; half precisions become float32. Raises TypeError for a non-tensor."""
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"the model returned {kind_of(output)}, not a tensor")
    tensor = output.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.numpy()

"""A column type of a test: it shows that a new one needs its own class alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column, ColumnSpec, DataType
from sparkdl.data.fields import Field
from sparkdl.data.row_errors import RowError


@dataclass(frozen=True, kw_only=True)
class Hex(ColumnSpec):
    """Text of hexadecimal digits as a vector of bytes: "00ff" as [0, 255]."""

    kind = "hex"
    for_records = True

    digits: int = 4

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        if data_type.typeName() != "string":
            return f"is of type {data_type.simpleString()}: a Hex is text."
        return Column(name, "uint8", 1, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> np.ndarray:
        rows = [
            self.from_record(value, column.name, row, column.dtype)
            for row, value in enumerate(array.to_pylist(), start=first_row)
        ]
        return np.array(rows, np.uint8).reshape(-1, self.digits // 2)

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        if not re.fullmatch(f"[0-9a-f]{{{self.digits}}}", str(value)):
            raise RowError(name, row, f"is {value!r}, not {self.digits} digits", "Mend such rows.")
        return np.frombuffer(bytes.fromhex(value), np.uint8)

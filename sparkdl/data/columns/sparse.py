"""The column type of vectors of which most values are 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from sparkdl.data.columns.base import Column, DataType, check_values
from sparkdl.data.columns.convert import as_array
from sparkdl.data.columns.numeric import NumericSpec, nested, vector_entries
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.row_errors import INSIDE_VECTORS, MEND_RECORDS, RowError, finite
from sparkdl.errors import known_arguments
from sparkdl.plain import is_whole, make_plain

WIDE = 1 << 14
"""The number of values from which on sparse vectors are stored without their zeros by themselves."""
FORMS = ("dense", "tensor", "indices")
EXACT = {"float32": 1 << 24, "float64": 1 << 53}
"""The number of whole numbers from 0 that each dtype holds."""


@known_arguments
@dataclass(frozen=True)
class Sparse(NumericSpec):
    """A specification of vectors of ``pyspark.ml`` that are stored without their zeros.

    These are what HashingTF, CountVectorizer, OneHotEncoder and files of libsvm hold. A row is stored
    as its entries, (index, value), of shape (entries, 2). A column of arrays is read as well. A fit on
    a DataFrame reads sparse vectors of 16,384 values or more in this way by itself, as "dense".
    """

    kind = "sparse"
    for_records = True

    size: int
    """The number of values of each vector."""
    form: str = "dense"
    """What the model gets of a mini-batch.

    - "dense": a tensor of shape (B, size), as without this specification.
    - "tensor": a sparse COO tensor of this shape, for ``torch.nn.Linear`` or ``torch.sparse.mm``.
    - "indices": two tensors, the indices, int64, and their values, both (B, E) for the longest row, for
      ``torch.nn.EmbeddingBag(size, ..., mode="sum")(indices, per_sample_weights=values)``. Shorter rows
      are filled up with the value 0. By keyword the values are ``KEYWORD_values``.
    """

    def __post_init__(self) -> None:
        make_plain(self)
        check_values(
            self,
            ("size: give the number of values of each vector.", is_whole(self.size, 1)),
            (f"form: use one of {', '.join(FORMS)}.", self.form in FORMS),
        )

    @classmethod
    def suited(cls, column: Column, array: pa.Array) -> Column | None:
        """Return a column of vectors with this specification, if some are sparse and wide."""
        if not column.vector or column.spec is not None or column.label:
            return None
        size = pa.compute.max(array.field("size")).as_py()  # null where a vector is dense
        if size is None or not WIDE <= size <= EXACT[column.dtype]:
            return None
        return replace(column, vector=False, spec=cls(size))

    @property
    def rule(self) -> Padding:
        """Return the padding of the entries."""
        return Padding(entries_of=self.size, form=self.form)

    def problems(self, role: str) -> Iterator[str]:
        """Yield a problem if it is for a label."""
        if role == "label":
            yield "is a sparkdl.Sparse, which is for features: a loss takes dense labels."

    def of_numbers(self, column: Column, data_type: DataType, float_dtype: str) -> Column | str:
        """Return the column, or an error text if it is no vector, or too large to count in floats."""
        if not column.vector and column.depth != 1:
            return (
                f"is of type {data_type.simpleString()}: a sparkdl.Sparse is a vector of pyspark.ml, "
                "or an array of numbers."
            )
        if self.size > EXACT[float_dtype]:
            return (
                f"has vectors of {self.size:,} values, of which {float_dtype} counts "
                f"{EXACT[float_dtype]:,}: hash to fewer, or train a model of float64."
            )
        return replace(column, dtype=float_dtype, depth=1, vector=False, spec=self)

    def example(self, field: Field) -> np.ndarray:
        """Return a vector of zeros."""
        return np.zeros(self.size)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Ragged:
        """Return the entries of each vector that are not 0."""
        if pa.types.is_struct(array.type):
            rows, indices, values, sizes = vector_entries(array, column, first_row)
        else:
            dense = nested(array, column, first_row) if len(array) else np.zeros((0, self.size))
            rows, indices = (places.reshape(-1) for places in np.indices(dense.shape))
            values, sizes = dense.reshape(-1), np.full(len(dense), dense.shape[1])
        wrong = np.flatnonzero(sizes != self.size)
        if len(wrong):
            row = int(wrong[0])
            raise RowError(
                column.name,
                first_row + row,
                f"has {int(sizes[row])} values, not {self.size}",
                f"Give sparkdl.Sparse(size) the size of all vectors, such as {int(sizes[row])}.",
            )
        with np.errstate(over="ignore"):
            values = values.astype(column.dtype)
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            nan = bool(np.isnan(values[place]))
            text, remedy = (
                ("holds NaN", INSIDE_VECTORS) if nan else ("holds inf", finite(column.dtype))
            )
            raise RowError(column.name, first_row + int(rows[place]), text, remedy)
        there = values != 0
        entries = np.stack([indices[there].astype(column.dtype), values[there]], axis=1)
        counts = np.bincount(rows[there], minlength=len(array))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Ragged(entries, offsets, self.rule)

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        """Return the entries of a vector of ``pyspark.ml``, or of an array."""
        if hasattr(value, "toArray") and hasattr(
            value, "indices"
        ):  # with a 0, which is left out below
            size, indices = value.size, np.append(value.indices, 0)
            values = as_array(np.append(value.values, 0.0), name, row, float_dtype)
        else:
            values = as_array(value, name, row, float_dtype)
            size, indices = values.size if values.ndim == 1 else None, np.arange(values.size)
        if size != self.size:
            shape = f"of shape {list(values.shape)}" if size is None else f"of {size} values"
            raise RowError(
                name, row, f"is {shape}, not a vector of {self.size} values", MEND_RECORDS
            )
        there = np.flatnonzero(values)
        return np.stack([indices[there], values[there]], axis=1).astype(float_dtype)

"""The column type of vectors of which most values are 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column, DataType
from sparkdl.data.columns.numeric import NumericSpec, vector_entries
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.row_errors import INSIDE_VECTORS, RowError, finite
from sparkdl.errors import ParameterError, known_arguments, raise_all, shown
from sparkdl.plain import is_whole, make_plain

FORMS = ("dense", "tensor", "indices")
EXACT = {"float32": 1 << 24, "float64": 1 << 53}
"""The number of whole numbers from 0 that each dtype holds."""


@known_arguments
@dataclass(frozen=True)
class Sparse(NumericSpec):
    """A specification of vectors of ``pyspark.ml`` that are stored without their zeros.

    These are what HashingTF, CountVectorizer, OneHotEncoder and files of libsvm hold. A row is stored
    as its entries, (index, value), of shape (entries, 2).
    """

    kind = "sparse"

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
        problems = []
        if not is_whole(self.size, 1):
            problems.append(f"size={shown(self.size)}: give the number of values of each vector.")
        if self.form not in FORMS:
            problems.append(f"form={shown(self.form)}: use one of {', '.join(FORMS)}.")
        raise_all(ParameterError, [f"Sparse: {problem}" for problem in problems])

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
        if not column.vector:
            return (
                f"is of type {data_type.simpleString()}: a sparkdl.Sparse is a vector of pyspark.ml. "
                "pyspark.ml.functions.array_to_vector makes one of an array."
            )
        if self.size > EXACT[float_dtype]:
            return (
                f"has vectors of {self.size:,} values, of which {float_dtype} counts "
                f"{EXACT[float_dtype]:,}: hash to fewer, or train a model of float64."
            )
        return replace(column, vector=False, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Ragged:
        """Return the entries of each vector that are not 0."""
        rows, indices, values, sizes = vector_entries(array, column, first_row)
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

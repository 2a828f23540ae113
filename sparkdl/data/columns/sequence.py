"""The column type of rows of varying length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from sparkdl.data.columns.base import Column, DataType, check_values, rules_of_lengths
from sparkdl.data.columns.convert import as_array
from sparkdl.data.columns.numeric import NumericSpec, to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.row_errors import INSIDE_ARRAYS, MEND_RECORDS, SAME_SHAPE, RowError, refuse_nulls
from sparkdl.errors import known_arguments
from sparkdl.plain import is_number, make_plain

_INSIDE = {
    "is null": "holds a null",
    "is NaN": "holds NaN",
    "is inf": "holds inf",
    "is an empty array": "holds an empty one",
}
"""Problem of an item -> problem of the row that contains the item."""
VARYING_ITEMS = f"{SAME_SHAPE} Lists of lists are read by sparkdl.Sequence(sparkdl.Sequence())."


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Sequence(NumericSpec):
    """A specification of rows of varying length, which may be empty.

    The column is ``array<number>``, or ``array<array<number>>`` for (T, D). Rows are stored
    unpadded; each mini-batch pads them to its longest row. ``Sequence(Sequence())`` reads
    lists of lists that both vary in length, such as documents of sentences, as (T, L). In a fit on a
    DataFrame, ``Sequence()`` becomes that where the inner lists vary.
    """

    kind = "sequence"
    for_records = True

    items: Sequence | None = field(default=None, kw_only=False)
    """How the items of a row are read, if they vary in length, too."""
    max_length: int | None = None
    """Longer rows are cut at the end."""
    padding: float = 0
    """The value that fills up shorter rows."""
    lengths: bool = False
    """Give the model the lengths as one more input directly after this one: int64, shape (B,)."""
    mask: bool = False
    """Give the model a mask as one more input: int64 of the shape of the padded rows, 1 for values and
    0 for padding. By keyword it is ``attention_mask`` beside ``input_ids``, else ``KEYWORD_mask``."""
    pad_to_max: bool = False
    """Always pad to ``max_length``, so that every mini-batch has the same shape."""
    padding_side: str = "right"
    """The side on which shorter rows are filled up, "left" or "right": that of the column with whose
    elements these go together, such as the tokens that they label."""

    def __post_init__(self) -> None:
        make_plain(self)
        inner: Any = self.items
        lists = isinstance(inner, Sequence)
        of_rows = "items: lengths and mask are of whole rows: give them to the outer Sequence."
        check_values(
            self,
            ("padding: give a number.", is_number(self.padding)),
            *rules_of_lengths(self),
            ('padding_side: give "left" or "right".', self.padding_side in ("left", "right")),
            ("items: give a sparkdl.Sequence, or None.", inner is None or lists),
            (of_rows, not lists or not (inner.lengths or inner.mask)),
            ("padding: give items the same.", not lists or inner.padding == self.padding),
        )

    @classmethod
    def suited(cls, column: Column, array: pa.Array) -> Column | None:
        """Return a column of this type with more levels, if lists inside its innermost ones vary."""
        spec = column.spec
        if not isinstance(spec, cls):
            return None
        levels = len(Field(column.name, column.dtype, (), spec.rule).rules)
        varying = 0
        for level in range(1, column.depth):
            if array.null_count:
                return None
            array = array.flatten()
            lengths = array.value_lengths()
            if level >= levels and len(lengths):
                low, high = pa.compute.min_max(lengths).as_py().values()
                varying = level - levels + 1 if low is not None and low < (high or 1) else varying
        return replace(column, spec=spec._deeper(varying)) if varying else None

    def _deeper(self, levels: int) -> Sequence:
        if self.items is not None:
            return replace(self, items=self.items._deeper(levels))
        inner: Sequence | None = None
        for _ in range(levels):
            inner = Sequence(inner, padding=self.padding)
        return replace(self, items=inner)

    @property
    def rule(self) -> Padding:
        """Return the padding of its mini-batches."""
        return Padding(
            value=self.padding,
            length=self.max_length if self.pad_to_max else None,
            lengths=self.lengths,
            mask=self.mask,
            side=self.padding_side,
            items=None if self.items is None else self.items.rule,
        )

    def example(self, field: Field) -> Any:
        """Return two elements of zeros, if they are no lists themselves."""
        return np.zeros((2, *field.shape), field.dtype) if len(field.rules) == 1 else None

    def problems(self, role: str) -> Iterator[str]:
        """Yield a problem if a label is to give lengths or a mask, which only a model takes."""
        for name in ("lengths", "mask"):
            if getattr(self, name) and role == "label":
                yield f"has {name}=True, which is for features only: the loss gets no {name}."

    def of_numbers(self, column: Column, data_type: DataType, float_dtype: str) -> Column | str:
        """Return the column, or an error text if it is no array that can hold the padding."""
        shown = data_type.simpleString()
        if not column.depth or column.vector:
            return f"is of type {shown}: a sparkdl.Sequence is an array of numbers."
        levels = len(Field(column.name, column.dtype, (), self.rule).rules)
        if column.depth < levels:
            return f"is of type {shown}, which has fewer than {levels} levels of arrays."
        if not _holds(column.dtype, self.padding):
            return f"is of type {shown}, of which padding={self.padding} is no value."
        return replace(column, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Ragged:
        """Return the rows; where items are no sequences themselves, they must have one shape."""
        refuse_nulls(array, column.name, first_row)
        lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        inner = replace(column, depth=column.depth - 1, spec=self.items)
        try:
            values = to_numpy(array.flatten(), inner)
        except RowError as error:
            item = error.problem.row
            row = int(np.searchsorted(offsets, item, side="right")) - 1
            text = _INSIDE.get(error.problem.text, error.problem.text)
            if text.startswith("has "):
                text = text.replace("has ", "has an item of ", 1).replace("row 0", "the first item")
                raise RowError(column.name, first_row + row, text, VARYING_ITEMS) from None
            remedy = error.problem.remedy if text == "holds inf" else INSIDE_ARRAYS
            raise RowError(column.name, first_row + row, text, remedy) from None
        rows = Ragged(values, offsets, self.rule)
        return rows if self.max_length is None else rows.cut(self.max_length)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sequence:
        """Return the specification; one without ``items`` is of a model that had none."""
        items = values.get("items")
        return cls(**{**values, "items": None if items is None else cls.from_json(items)})

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        """Return the values of a record, cut to ``max_length``."""
        if self.items is not None:
            raise RowError(
                name, row, "is to be a list of lists of varying length", "They are for DataFrames."
            )
        if isinstance(value, np.ndarray) and value.shape == (0,) and value.dtype.kind in "iuf":
            return value.astype(float_dtype if value.dtype.kind == "f" else np.int64)
        array = as_array(value, name, row, float_dtype)
        if array.ndim == 0:
            raise RowError(name, row, "is a number, not a sequence of numbers", MEND_RECORDS)
        return array[: self.max_length]


def _holds(dtype: str, value: float) -> bool:
    """Return whether ``value`` can be represented in this dtype."""
    if dtype == "bool":
        return value in (0, 1)
    if not dtype.startswith("int"):
        return True
    limits = np.iinfo(dtype)
    return value == int(value) and limits.min <= value <= limits.max

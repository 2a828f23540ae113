"""The columns that are made of what a model returns, and their conversion to Spark's types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import Column

from sparkdl.data.ragged import Ragged, Rows
from sparkdl.errors import ModelError, ParameterError, counted, kind_of, shown
from sparkdl.infer.nested import (
    are_records,
    common_type,
    fields_of,
    is_known,
    part_of_rows,
    sql_type,
    to_nested,
    type_of,
)
from sparkdl.metrics.scorer import in_rows
from sparkdl.model.recipe import (
    Part,
    described,
    for_example,
    part_of,
    parts_of,
    problems_of_part,
    with_tensors,
)

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
Finish: TypeAlias = Callable[[Any], torch.Tensor] | None
"""The user's ``postprocess``, or None."""


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


@dataclass(frozen=True)
class OutputColumn:
    """A column of predictions."""

    name: str
    part: Part
    output: Output
    by_element: bool = False  # the first dimension is the row's sequence: cut it to its length
    finish: Finish = None  # makes the predictions of the part, on the CPU
    dimensions: int | None = None  # of a batch's part, if ``finish`` gets it

    @staticmethod
    def of(name: str, part: Part, value: Any, rows: int, finish: Finish = None) -> OutputColumn:
        """Return the column of a part, given its value for a batch."""
        dimensions = value.ndim if isinstance(value, torch.Tensor) else None
        if finish is not None:
            given = described(value)
            try:
                value = finish(value)
            except Exception as error:
                raise ParameterError(
                    f"postprocess fails on {given}: {_reason(error)}. It gets the model's output for "
                    "a batch."
                ) from error
        by_row = finish is not None or callable(part) or isinstance(part, str) or are_records(value)
        if isinstance(value, list) and len(value) == rows and by_row:
            return RowsColumn.of_rows(name, part, value, finish)
        if not isinstance(value, torch.Tensor) or not value.ndim or len(value) != rows:
            number = counted(rows, "row")
            if finish is not None:
                raise ParameterError(
                    f"postprocess returned {described(value)} for a batch of {number}: it must return "
                    f"a tensor with one value for each row, of shape [{rows}, ...], as "
                    "partial(torch.argmax, dim=1) does."
                )
            raise ModelError(
                f'output "{name}" is {described(value)} for a batch of {number}: it must be a tensor '
                f"of shape [{rows}, ...]. Name another part, {for_example(value)}."
            )
        column = OutputColumn(name, part, Output.of(value), False, finish, dimensions)
        column.sql_type  # noqa: B018 - raises if there is none
        return column

    @property
    def sql_type(self) -> str:
        """The type of the column."""
        return self.output.sql_type

    @property
    def row_bytes(self) -> int:
        """The approximate bytes of one prediction; a sequence counts 128 elements."""
        shape = (128, *self.output.shape[1:]) if self.by_element else self.output.shape
        return 4 * math.prod(shape)

    def values(self, returned: Any, rows: int) -> Any:
        """Return the predictions of a batch, given what the model returned for it."""
        return as_numpy(in_rows(self._value(returned, rows), rows, self.output.dimensions))

    def _value(self, returned: Any, rows: int) -> Any:
        with torch.no_grad():
            value = value_of(returned, self.part)
            if self.finish is not None:  # it was tried on the CPU
                value = with_tensors(in_rows(value, rows, self.dimensions), torch.Tensor.cpu)
                value = self.finish(value)
        return value

    def pieces(self, values: Any) -> Iterator[Any]:
        """Yield predictions in pieces that Arrow arrays can hold."""
        return pieces(values)

    def to_arrow(self, values: np.ndarray, sequences: Ragged | None) -> pa.Array:
        """Return predictions, (rows, ...), as an Arrow array; ``sequences`` if lengths vary."""
        if not self.by_element or sequences is None:
            return to_arrow(values)
        kept = sequences.present(values.shape[1])
        ends = np.concatenate([[0], np.cumsum(kept.sum(1))])
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), to_arrow(values[kept]))

    def to_python(self, values: np.ndarray, sequences: Ragged | None) -> list[Any]:
        """Return predictions, (rows, ...), as a number, text or array for each row."""
        if self.by_element and sequences is not None:
            pairs = zip(values, sequences.present(values.shape[1]), strict=True)
            return [value[kept] for value, kept in pairs]
        return [value if value.ndim else value.item() for value in values]

    def nulls(self, rows: int) -> pa.Array:
        """Return the column of so many rows without a prediction."""
        shape = (0, *(1 for _ in self.output.shape))
        dtype = self.output.dtype.replace("bfloat16", "float32").replace("float16", "float32")
        return pa.nulls(rows, self.to_arrow(np.zeros(shape, dtype), None).type)


class NoResults(ModelError):
    """No row that a model was tried on has a result, so the type of a column is not known."""


@dataclass(frozen=True)
class RowsColumn(OutputColumn):
    """A column whose values are given row by row, and differ in number, or have fields."""

    kind: pa.DataType = field(default_factory=pa.null)
    bytes_of_row: int = 64

    @staticmethod
    def of_rows(name: str, part: Part, rows: list[Any], finish: Finish) -> RowsColumn:
        """Return the column of such values, given those of a few rows."""
        try:
            kind = common_type(map(type_of, rows))
            if is_known(kind):
                sql_type(kind)
        except TypeError as error:
            raise ParameterError(
                f'output "{name}": {error}. The value of a row may be a tensor, a number, a text, a '
                "list of values of one type, or a mapping or dataclass of such."
            ) from None
        if not is_known(kind):
            raise NoResults(
                f'output "{name}": no row that the model was tried on has a result, so the type of the '
                "column is not known: pass example=, a DataFrame with rows that have some."
            )
        size = to_nested(rows, kind).nbytes // len(rows)
        unknown = Output((), "float32")
        return RowsColumn(name, part, unknown, False, finish, None, kind, max(64, size))

    @property
    def sql_type(self) -> str:
        return sql_type(self.kind)

    @property
    def row_bytes(self) -> int:
        return self.bytes_of_row

    def values(self, returned: Any, rows: int) -> pa.Array:
        value = self._value(returned, rows)
        if not isinstance(value, list):
            raise ModelError(
                f'output "{self.name}" is {described(value)}, and was a list with a value for each row '
                "when the model was tried."
            )
        try:
            return to_nested(value, self.kind)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise ModelError(
                f'output "{self.name}": a row has a value of another type than {self.sql_type}, which '
                f"the model was tried with ({error}). Return values of one type."
            ) from error

    def to_arrow(self, values: pa.Array, sequences: Ragged | None) -> pa.Array:
        return values

    def to_python(self, values: pa.Array, sequences: Ragged | None) -> list[Any]:
        return list(values.to_pylist())

    def nulls(self, rows: int) -> pa.Array:
        return pa.nulls(rows, self.kind)

    def pieces(self, values: pa.Array) -> Iterator[pa.Array]:
        yield values


@dataclass(frozen=True)
class ClassScores:
    """The ``postprocess`` of a classifier: raw prediction, probability and class, side by side.

    The result is float64 of shape (rows, 2 * classes + 1).
    """

    probability: bool = False  # the output is one number, the probability of class 1
    thresholds: tuple[float, ...] = ()  # the largest probability / threshold is predicted; (): none

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        values = output.double()
        if values.ndim == 1 or values.shape[1] == 1:
            values = values.reshape(len(values))
            if self.probability:
                raw = probabilities = torch.stack([1 - values, values], 1)
            else:
                raw = torch.stack([-values, values], 1)
                probabilities = raw.sigmoid()
        else:
            raw, probabilities = values, values.softmax(1)
        scaled = probabilities
        if self.thresholds:
            scaled = probabilities / torch.tensor(self.thresholds, dtype=torch.float64)
        return torch.cat([raw, probabilities, scaled.argmax(1, keepdim=True)], 1)


def offered_parts(returned: Any, rows: int, name: str) -> dict[str, Part]:
    """Return the parts that become columns if the user names none: the tensors with a row each."""
    if isinstance(returned, torch.Tensor):
        return {name: None}
    if are_records(returned) and len(returned) == rows:
        return {key: key for row in returned for key in fields_of(row) or ()}
    found: dict[Any, Any] = {
        key: value
        for key, value in parts_of(returned).items()
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows
    }
    if not found:
        raise ModelError(
            f"the model returns {described(returned)} for a batch of {counted(rows, 'row')}, and no "
            "part of it is a tensor with a row for each row: say with outputs=, a function of what it "
            "returns."
        )
    if len(found) == 1:
        return {name: next(iter(found))}
    return {f"{name}_{key}" if isinstance(key, int) else str(key): key for key in found}


def named_parts(outputs: Any, name: str) -> dict[str, Part] | None:
    """Return the parts that the user asks for by column name; None if the user leaves it open."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        parts = dict(outputs)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        parts = {str(part): part for part in outputs}
    else:
        parts = {name: outputs}
    wrong = [key for key in parts if not isinstance(key, str)]
    problems = [p for part in parts.values() for p in problems_of_part(part)]
    if wrong or problems or not parts:
        raise ParameterError(
            f"outputs={shown(outputs)}: name a part of what the model returns (a key, an attribute, a "
            "number or a function of it), a list of names, or a mapping from column names to parts."
        )
    return parts


def value_of(returned: Any, part: Part) -> Any:
    """Return a part; a function that fails is a user's mistake."""
    if isinstance(part, str) and are_records(returned):
        by_row = part_of_rows(returned, part)
        if by_row is not None:
            return by_row
    try:
        return part_of(returned, part)
    except (ModelError, ParameterError):
        raise
    except Exception as error:
        raise ParameterError(
            f"the function of the output fails on {described(returned)}: {_reason(error)}."
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('. ')}"


def sequences_of(arrays: Sequence[Rows]) -> Ragged | None:
    """Return the first feature whose rows vary in length, or None."""
    return next((rows for rows in arrays if isinstance(rows, Ragged)), None)


def lengths_of(arrays: Sequence[Rows]) -> np.ndarray | None:
    """Return the lengths of the rows of the first feature whose rows vary in length, or None."""
    rows = sequences_of(arrays)
    if rows is None or rows.padding.length is None:
        return None if rows is None else rows.lengths
    return np.minimum(rows.lengths, rows.padding.length)


def ml_column(column: Column, of: OutputColumn) -> Column:
    """Return a column of predictions as a double or as a vector of ``pyspark.ml``."""
    from pyspark.ml.functions import array_to_vector  # takes a while

    output = of.output
    if isinstance(of, RowsColumn):
        raise ParameterError(
            f"ml_types=True: a prediction is {of.sql_type}, and pyspark.ml has numbers and "
            "vectors only."
        )
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

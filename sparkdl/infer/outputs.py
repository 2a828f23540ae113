"""The columns that are made of what a model returns, and their conversion to Spark's types."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import Column
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, DataType

from sparkdl.data.ragged import Ragged, Rows
from sparkdl.errors import ModelError, ParameterError, counted, kind_of, shown
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

_PYTHON: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a mapping, named tuple or dataclass by name; None for any other value."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return None
    return {str(name): part for name, part in parts_of(value).items()} or None


def are_records(values: Any) -> bool:
    """Return whether ``values`` is a list of values with fields."""
    return isinstance(values, list) and bool(values) and all(map(fields_of, values))


def type_of(value: Any) -> pa.DataType:
    """Return the Arrow type of a value; ``null`` stands for what an empty list does not tell.

    Raises TypeError for a value that no column can hold.
    """
    if value is None:
        return pa.null()
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        array = as_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
        if array.dtype.kind in "mM":  # versions of Spark read times without a zone differently
            raise TypeError(f"a column cannot hold {array.dtype}")
        return to_arrow(array[None]).type
    if (fields := fields_of(value)) is not None:
        return pa.struct([(name, type_of(part)) for name, part in fields.items()])
    if isinstance(value, (list, tuple)):
        return pa.list_(common_type(map(type_of, value)))
    if type(value) not in _PYTHON:
        raise TypeError(f"a column cannot hold {kind_of(value)}")
    return _PYTHON[type(value)]


def common_type(kinds: Iterable[pa.DataType]) -> pa.DataType:
    """Return the type that has room for values of all these. Raises TypeError if there is none."""
    common = pa.null()
    for kind in kinds:
        common = _wider(common, kind)
    return common


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_wider(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = _wider(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items()))
    numbers = [pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (one, other)]
    if all(numbers):
        floating = pa.types.is_floating(one) or pa.types.is_floating(other)
        return pa.float64() if floating else pa.int64()
    raise TypeError(f"it is {one} in one row and {other} in another")


def is_known(kind: pa.DataType) -> bool:
    """Return whether a type says what every part of its values is."""
    if pa.types.is_list(kind):
        return is_known(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_known(field.type) for field in kind)
    return not pa.types.is_null(kind)


def sql_type(kind: pa.DataType) -> DataType:
    """Return the type of a column in Spark. Raises TypeError if it has none."""
    try:
        return from_arrow_type(kind)
    except TypeError:
        raise TypeError(f"Spark has no column type for {kind}") from None


def to_nested(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a value for each row as an Arrow array of a type.

    Raises TypeError, ValueError or ``pa.ArrowInvalid`` if one is of another type.
    """
    if pa.types.is_struct(kind):
        rows = [None if value is None else fields_of(value) for value in values]
        columns = [
            to_nested([None if row is None else row.get(field.name) for row in rows], field.type)
            for field in kind
        ]
        missing = pa.array([row is None for row in rows], pa.bool_())
        return pa.StructArray.from_arrays(columns, fields=list(kind), mask=missing)
    if pa.types.is_list(kind):
        return _lists(values, kind)
    return pa.array([one.item() if hasattr(one, "item") else one for one in values], kind)


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the lists of rows; arrays whose members have one shape are copied at once."""
    if any(
        isinstance(value, (str, bytes)) or not hasattr(value, "__len__")
        for value in values
        if value is not None
    ):
        raise TypeError(f"a row has no list where others have {kind}")
    rows = [as_numpy(v) if isinstance(v, torch.Tensor) else v for v in values if v is not None]
    counts = np.array([0 if value is None else len(value) for value in values], np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    offsets = pa.array(ends, pa.int32(), mask=np.array([v is None for v in values] + [False]))
    if rows and all(isinstance(row, np.ndarray) for row in rows):
        full = [row for row in rows if len(row)] or rows[:1]
        if len({row.shape[1:] for row in full}) == 1:
            members = to_arrow(np.concatenate(full)).cast(kind.value_type)
            return pa.ListArray.from_arrays(offsets, members)
    members = to_nested([member for row in rows for member in row], kind.value_type)
    return pa.ListArray.from_arrays(offsets, members)


def part_of_rows(rows: Sequence[Any], name: str) -> list[Any] | None:
    """Return a field of each row's value; None if no row has it."""
    found: list[Mapping[str, Any]] = [fields_of(row) or {} for row in rows]
    return [row.get(name) for row in found] if any(name in row for row in found) else None


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
    def kind(self) -> pa.DataType:
        """The Arrow type of a prediction. Raises ParameterError for a dtype that no column can have."""
        empty = torch.zeros(0, *self.shape, dtype=getattr(torch, self.dtype))
        try:
            kind = to_arrow(as_numpy(empty)).type
            sql_type(kind)
            return kind
        except (TypeError, pa.ArrowException):
            raise ParameterError(
                f"Spark has no column type for {self.dtype}: convert the output with postprocess=, "
                "for example to torch.float32."
            ) from None


@dataclass(frozen=True)
class OutputColumn:
    """A column of predictions: of tensors, or of values row by row, which differ in number or have
    fields."""

    name: str
    part: Part
    output: Output | None  # of tensors
    by_element: bool = False  # the first dimension is the row's sequence: cut it to its length
    finish: Finish = None  # makes the predictions of the part, on the CPU
    dimensions: int | None = None  # of a batch's part, if ``finish`` gets it
    kind_of_rows: pa.DataType | None = None  # of values row by row
    bytes_of_row: int = 64

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
            return OutputColumn._of_rows(name, part, value, finish)
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
        column.kind  # noqa: B018 - raises if there is none
        return column

    @staticmethod
    def _of_rows(name: str, part: Part, rows: list[Any], finish: Finish) -> OutputColumn:
        """Return the column of such values, given those of a few rows."""
        try:
            kind = common_type(map(type_of, rows))
            if is_known(kind):
                sql_type(kind)
        except (TypeError, pa.ArrowException) as error:
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
        return OutputColumn(name, part, None, False, finish, None, kind, max(64, size))

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type of a prediction."""
        return self.kind_of_rows if self.output is None else self.output.kind

    @property
    def type(self) -> DataType:
        """The type of the column."""
        return sql_type(self.kind)

    @property
    def row_bytes(self) -> int:
        """The approximate bytes of one prediction; a sequence counts 128 elements."""
        if self.output is None:
            return self.bytes_of_row
        shape = (128, *self.output.shape[1:]) if self.by_element else self.output.shape
        return 4 * math.prod(shape)

    def values(self, returned: Any, rows: int) -> np.ndarray | pa.Array:
        """Return the predictions of a batch, given what the model returned for it."""
        with torch.no_grad():
            value = value_of(returned, self.part)
            if self.finish is not None:  # it was tried on the CPU
                value = with_tensors(in_rows(value, rows, self.dimensions), torch.Tensor.cpu)
                value = self.finish(value)
        if self.output is not None:
            return as_numpy(in_rows(value, rows, self.output.dimensions))
        if not isinstance(value, list):
            raise ModelError(
                f'output "{self.name}" is {described(value)}, and was a list with a value for each row '
                "when the model was tried."
            )
        try:
            return to_nested(value, self.kind)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise ModelError(
                f'output "{self.name}": a row has a value of another type than '
                f"{self.type.simpleString()}, which the model was tried with ({error}). Return values "
                "of one type."
            ) from error

    def to_arrow(self, values: np.ndarray | pa.Array, sequences: Ragged | None) -> pa.Array:
        """Return predictions as an Arrow array; ``sequences`` if lengths vary."""
        if isinstance(values, pa.Array):
            return values
        if not self.by_element or sequences is None:
            return to_arrow(values)
        kept = sequences.present(values.shape[1])
        ends = np.concatenate([[0], np.cumsum(kept.sum(1))])
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), to_arrow(values[kept]))

    def to_python(self, values: np.ndarray | pa.Array, sequences: Ragged | None) -> list[Any]:
        """Return predictions as a number, text, array or nested values for each row."""
        if isinstance(values, pa.Array):
            return list(values.to_pylist())
        if self.by_element and sequences is not None:
            pairs = zip(values, sequences.present(values.shape[1]), strict=True)
            return [value[kept] for value, kept in pairs]
        return [value if value.ndim else value.item() for value in values]


class NoResults(ModelError):
    """No row that a model was tried on has a result, so the type of a column is not known."""


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
    output = of.output
    if output is None:
        raise ParameterError(
            f"ml_types=True: a prediction is {of.type.simpleString()}, and pyspark.ml has numbers and "
            "vectors only."
        )
    if len(output.shape) > 1:
        raise ParameterError(
            f"ml_types=True: a prediction has the shape {list(output.shape)}, and pyspark.ml has "
            "numbers and vectors only: make one of it with postprocess=."
        )
    return as_numbers(column, of.type, output.shape == (1,))


def as_numbers(output: Column, kind: DataType, one: bool) -> Column:
    """Return a module's output as evaluators take it: one number as double, several as a vector."""
    from pyspark.ml.functions import array_to_vector  # takes a while

    if not isinstance(kind, ArrayType):
        return output.cast("double")
    if isinstance(kind.elementType, ArrayType):
        return output
    return output[0].cast("double") if one else array_to_vector(output.cast("array<double>"))


def to_arrow(batch: np.ndarray) -> pa.Array:
    """Return a batch of shape (rows, ...) as an Arrow column of numbers or of nested lists."""
    other = {"uint8": np.int16, "float16": np.float32}.get(batch.dtype.name, batch.dtype)
    array: pa.Array = pa.array(np.ascontiguousarray(batch, other).reshape(-1))
    for axis in range(batch.ndim - 1, 0, -1):
        lists, length = math.prod(batch.shape[:axis]), batch.shape[axis]
        array = pa.ListArray.from_arrays(offsets(lists, length), array)
    return array


def offsets(lists: int, length: int) -> pa.Array:
    """Return the offsets of ``lists`` lists of this length. Raises ``pa.ArrowInvalid`` beyond int32."""
    return pa.array(np.arange(lists + 1) * length, pa.int32())


def pieces(batch: np.ndarray | pa.Array) -> Iterator[np.ndarray | pa.Array]:
    """Yield the rows of a batch in pieces with no more values than int32 offsets can count."""
    if isinstance(batch, pa.Array):
        yield batch
        return
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

"""Values that differ in number from row to row, as nested Arrow columns: boxes, entities, texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sparkdl.errors import kind_of
from sparkdl.model.recipe import parts_of

_SQL = {
    "float": "float",
    "halffloat": "float",
    "double": "double",
    "int64": "bigint",
    "int32": "int",
    "int16": "smallint",
    "int8": "tinyint",
    "uint8": "smallint",
    "bool": "boolean",
    "string": "string",
    "binary": "binary",
}
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
        array = _array(value)
        kind = pa.from_numpy_dtype(array.dtype)
        for _ in range(array.ndim):
            kind = pa.list_(kind)
    elif (fields := fields_of(value)) is not None:
        return pa.struct([(name, type_of(part)) for name, part in fields.items()])
    elif isinstance(value, (list, tuple)):
        return pa.list_(common_type(map(type_of, value)))
    else:
        kind = _PYTHON.get(type(value))
    if kind is None:
        raise TypeError(f"a column cannot hold {kind_of(value)}")
    return kind


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


def sql_type(kind: pa.DataType) -> str:
    """Return the type of a column in SQL. Raises TypeError if Spark has none."""
    if pa.types.is_list(kind):
        return f"array<{sql_type(kind.value_type)}>"
    if pa.types.is_struct(kind):
        fields = (f"`{f.name.replace('`', '``')}`:{sql_type(f.type)}" for f in kind)
        return f"struct<{','.join(fields)}>"
    if str(kind) not in _SQL:
        raise TypeError(f"Spark has no column type for {kind}")
    return _SQL[str(kind)]


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
    rows = [_array(v) if isinstance(v, torch.Tensor) else v for v in values if v is not None]
    counts = np.array([0 if value is None else len(value) for value in values], np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)])
    offsets = pa.array(ends, pa.int32(), mask=np.array([v is None for v in values] + [False]))
    if rows and all(isinstance(row, np.ndarray) for row in rows):
        full = [row for row in rows if len(row)] or rows[:1]
        if len({row.shape[1:] for row in full}) == 1:
            members = _dense(np.concatenate(full), kind.value_type)
            return pa.ListArray.from_arrays(offsets, members)
    members = to_nested([member for row in rows for member in row], kind.value_type)
    return pa.ListArray.from_arrays(offsets, members)


def _dense(array: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return the first dimension of an array as Arrow values, the others as lists of one length."""
    if not pa.types.is_list(kind):
        if array.ndim != 1:
            raise TypeError(f"a row has arrays where others have {kind}")
        return pa.array(array).cast(kind)
    if array.ndim < 2:
        raise TypeError(f"a row has numbers where others have {kind}")
    offsets = pa.array(np.arange(len(array) + 1) * array.shape[1], pa.int32())
    members = _dense(array.reshape(-1, *array.shape[2:]), kind.value_type)
    return pa.ListArray.from_arrays(offsets, members)


def _array(value: Any) -> np.ndarray:
    """Return a tensor or array as NumPy, of a dtype that a column can have."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    array = np.asarray(value)
    return array.astype(np.int16) if array.dtype == np.uint8 else array


def part_of_rows(rows: Sequence[Any], name: str) -> list[Any] | None:
    """Return a field of each row's value; None if no row has it."""
    found: list[Mapping[str, Any]] = [fields_of(row) or {} for row in rows]
    return [row.get(name) for row in found] if any(name in row for row in found) else None

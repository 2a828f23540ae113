"""Columns to tensors: the types of a DataFrame's schema that are allowed.

These are numeric columns, arrays and nested arrays of numbers, and ``pyspark.ml.linalg`` vectors, dense
and sparse. Floating columns take the model's floating dtype (float32 or float64). Integers stay
integers (int64 in a batch: indices for an embedding, class numbers), and booleans stay booleans. Images
and other types need a specification, see :mod:`sparkdl.data.columns.base`.
"""

from __future__ import annotations

from collections.abc import Sequence as Names
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.data.columns.base import Column, Convert, Image, Sequence, Spec, Specs
from sparkdl.data.columns.image import STRUCT
from sparkdl.data.fields import Field, dtype_as
from sparkdl.errors import DataError, nearest, raise_all

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

_INTEGERS = {"byte": "int8", "short": "int16", "integer": "int32", "long": "int64"}
_FLOATS = {"float", "double", "decimal"}


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def columns_of(
    schema: StructType,
    features: Names[str],
    label: Names[str],
    float_dtype: str,
    specs: Specs | None = None,
    fields: Names[Field] = (),
) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """Return the feature and label columns of a DataFrame; see :func:`read_schema`."""
    return read_schema(schema, features, label, None, float_dtype, specs, fields)[:2]


def read_schema(
    schema: StructType,
    features: Names[str],
    label: Names[str],
    weight: str | None,
    float_dtype: str,
    specs: Specs | None = None,
    fields: Names[Field] = (),
) -> tuple[tuple[Column, ...], tuple[Column, ...], tuple[Column, ...]]:
    """Return the feature columns, the label columns and the weight (none or one) of a DataFrame.

    Args:
        schema: The schema of the DataFrame.
        features: The names of the feature columns.
        label: The names of the label columns.
        weight: The name of the weight column, or None.
        float_dtype: The model's floating dtype.
        specs: Specifications by name.
        fields: The fields that the model was trained with, if it was trained before; integers become
            floats where it had floats.

    Raises:
        DataError: Columns are missing, or of a type that cannot become a tensor; the message lists all.
    """
    problems: list[str] = []
    found: list[list[Column]] = []
    weights = () if weight is None else (weight,)
    trained = chain(fields, repeat(None))
    for role, names in (("feature", features), ("label", label), ("weight", weights)):
        columns = []
        for name, field in zip(names, trained, strict=False):
            if name not in schema.names:
                problems.append(
                    f'{role} column "{name}" is missing.'
                    + _hint(name, schema)
                    + f" The DataFrame has: {', '.join(schema.names) or 'no columns'}."
                    + ("" if fields else _WITHOUT.get(role, ""))
                )
                continue
            spec = (specs or {}).get(name) if role != "weight" else None
            column = _specified(name, schema[name].dataType, float_dtype, spec, role, field)
            if isinstance(column, str):
                problems.append(f'{role} column "{name}" {column}')
            else:
                columns.append(column)
        found.append(columns)
    raise_all(DataError, problems)
    return tuple(found[0]), tuple(found[1]), tuple(found[2])


def _hint(name: str, schema: StructType) -> str:
    """Return a hint at what may be meant by a name that no column has."""
    outer, _, inner = name.partition(".")
    if inner and outer in schema.names:
        make = f'df.withColumn("{inner}", df["{name}"])'
        return f" A field of a struct is no column: {make} makes it one."
    return nearest(name, schema.names)


_WITHOUT = {
    "label": " To train without a label, set label=None.",
    "weight": " To train without weights, set weight=None.",
}


def _specified(
    name: str,
    data_type: DataType,
    float_dtype: str,
    spec: Spec | None,
    role: str,
    field: Field | None,
) -> Column | str:
    """Return the column that follows from specification, role and type, or what is wrong with it."""
    shown = data_type.simpleString()
    image_struct = getattr(data_type, "names", None) == list(STRUCT)
    if spec is None and image_struct and role == "feature":
        spec = Image()
    if isinstance(spec, Image):
        if not image_struct and data_type.typeName() != "binary":
            return (
                f"is of type {shown}, which is no image: give encoded bytes (binary), or what "
                'spark.read.format("image") reads.'
            )
        return Column(name, float_dtype if spec.scale is not None else "uint8", 3, spec=spec)
    if isinstance(spec, Convert):
        return Column(name, float_dtype, spec=spec, trained=field)
    if spec is None and data_type.typeName() == "binary":
        return (
            "is of type binary, which cannot become a tensor by itself: specify it, as "
            f'columns={{"{name}": sparkdl.Image()}} for encoded images, or with '
            "sparkdl.Convert(function)."
        )
    column = _column(name, data_type, float_dtype)
    if isinstance(column, str):
        return column + (_way_out(name, data_type) if role != "weight" else "")
    column = replace(column, dtype=dtype_as(column.dtype, field))
    if role == "weight":
        if column.depth or column.dtype == "bool":
            return f"is of type {shown}: a weight is one number."
        return Column(name, float_dtype, weight=True)
    if isinstance(spec, Sequence):
        if not column.depth or column.vector:
            return f"is of type {shown}: a sparkdl.Sequence is an array of numbers."
        if not _holds(column.dtype, spec.padding):
            return f"is of type {shown}, of which padding={spec.padding} is no value."
        return Column(name, column.dtype, column.depth, spec=spec)
    return column


_CONVERTIBLE = ("timestamp", "date", "time", "struct", "map", "daytime", "yearmonth", "matrixudt")
"""Prefixes of the names of types whose values a function can turn into numbers."""


def _way_out(name: str, data_type: DataType) -> str:
    """Return advice for a column whose type has numbers in it but is not numeric."""
    inner = data_type
    while inner.typeName() == "array":
        inner = inner.elementType  # type: ignore[attr-defined]
    kind = inner.typeName()
    convert = f'columns={{"{name}": sparkdl.Convert(function)}}, a function of its Python value.'
    if not kind.startswith(_CONVERTIBLE):
        return ""
    if inner is not data_type:
        return f" Or give {convert}"
    if kind.startswith(("timestamp", "date")):
        return (
            f' Make a number of it, such as functions.datediff("{name}", start), or '
            f'functions.unix_timestamp("{name}") less a start (float32 has 7 digits), or give {convert}'
        )
    if kind == "struct":
        field = data_type.names[0] if data_type.names else "a"  # type: ignore[attr-defined]
        make = f'df.withColumn("{field}", df["{name}"]["{field}"])'
        return f" Make its fields columns, as {make}, or give {convert}"
    if kind == "map":
        return f' Make values of it columns, as df["{name}"]["a key"], or give {convert}'
    return f" Or give {convert}"


def _holds(dtype: str, value: float) -> bool:
    """Return whether ``value`` can be represented in this dtype."""
    if dtype == "bool":
        return value in (0, 1)
    if not dtype.startswith("int"):
        return True
    limits = np.iinfo(dtype)
    return value == int(value) and limits.min <= value <= limits.max


def _column(name: str, data_type: DataType, float_dtype: str) -> Column | str:
    """Return the column, or what is wrong with its type and what to do."""
    kind, depth = data_type, 0
    while kind.typeName() == "array":
        kind, depth = kind.elementType, depth + 1  # type: ignore[attr-defined]
    type_name = kind.typeName()
    if type_name == "vectorudt" or type(kind).__name__ == "VectorUDT":
        if depth:
            return "is an array of vectors: use nested arrays, or one vector a row."
        return Column(name, float_dtype, depth=1, vector=True)
    if type_name in _INTEGERS:
        return Column(name, _INTEGERS[type_name], depth)
    if type_name in _FLOATS or type_name.startswith("decimal"):
        return Column(name, float_dtype, depth)
    if type_name == "boolean":
        return Column(name, "bool", depth)
    shown = data_type.simpleString()
    if type_name in ("string", "varchar", "char"):
        return (
            f"is of type {shown}: turn text into numbers first, for example with "
            "pyspark.ml.feature.StringIndexer, or cast it where it holds numbers."
        )
    return (
        f"is of type {shown}, which cannot become a tensor: use numbers, arrays of numbers or "
        "pyspark.ml.linalg vectors."
    )

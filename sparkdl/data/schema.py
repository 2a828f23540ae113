"""Columns to tensors: the types of a DataFrame's schema that are allowed.

These are numeric columns, arrays and nested arrays of numbers, and ``pyspark.ml.linalg`` vectors, dense
and sparse. Floating columns take the model's floating dtype (float32 or float64). Integers stay
integers (int64 in a batch: indices for an embedding, class numbers), and booleans stay booleans. Images
and other types need a specification, see :mod:`sparkdl.data.columns.base`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Names
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from sparkdl.data.columns.base import KINDS, Column, ColumnSpec, Specs, default_spec
from sparkdl.data.columns.numeric import numeric_column, weight_column
from sparkdl.data.fields import Field
from sparkdl.data.sampling import Sampling
from sparkdl.errors import DataError, kind_of, nearest, raise_all

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


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

    Integers become floats where the trained ``fields`` have floats. One error lists all problems.
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
            beside = () if spec is None else spec.beside
            if missing := [other for other in beside if other not in schema.names]:
                problems.append(
                    f'column "{missing[0]}", which columns["{name}"] names, is missing.'
                    f"{_hint(missing[0], schema)} The DataFrame has: {', '.join(schema.names)}."
                )
                continue
            kind: DataType = schema[name].dataType
            if beside:
                kind = type(schema)([schema[one] for one in (name, *beside)])
            column = _resolved(name, kind, float_dtype, spec, role, field)
            if isinstance(column, str):
                problems.append(f'{role} column "{name}" {column}')
            else:
                columns.append(replace(column, label=role == "label"))
        found.append(columns)
    raise_all(DataError, problems)
    return tuple(found[0]), tuple(found[1]), tuple(found[2])


def sample_columns(
    schema: StructType,
    features: Names[str],
    label: Names[str],
    weight: str | None,
    float_dtype: str,
    specs: Specs | None,
    sampling: Sampling | None,
    fields: Names[Field] = (),
) -> tuple[Column, ...]:
    """Return the columns of a sample: features, labels, what rows are drawn by, and the weight."""
    inputs, labels, weights = read_schema(
        schema, features, label, weight, float_dtype, specs, fields
    )
    drawn = [] if sampling is None else [_sampling_column(schema, sampling.column, sampling.spec)]
    return (*inputs, *labels, *drawn, *weights)


def _sampling_column(schema: StructType, name: str, spec: ColumnSpec) -> Column:
    """Return the column by which rows are drawn. Raises DataError."""
    if name not in schema.names:
        raise DataError(
            f'sampling column "{name}" is missing.{_hint(name, schema)} The DataFrame has: '
            f"{', '.join(schema.names) or 'no columns'}."
        )
    column = spec.resolve(name, schema[name].dataType, "float64", None)
    if isinstance(column, str):
        raise DataError(f'sampling column "{name}" {column}')
    return replace(column, label=True)  # a row without it has no stand-in


def _hint(name: str, schema: StructType) -> str:
    """Return a hint at what may be meant by a name that no column has."""
    outer, _, inner = name.partition(".")
    if inner and outer in schema.names:
        make = f'df.withColumn("{inner}", df["{name}"])'
        return f" A field of a struct is not a column: {make} makes it one."
    return nearest(name, schema.names)


_WITHOUT = {
    "label": " To train without a label, set label=None.",
    "weight": " To train without weights, set weight=None.",
}


def _resolved(
    name: str,
    data_type: DataType,
    float_dtype: str,
    spec: ColumnSpec | None,
    role: str,
    trained: Field | None,
) -> Column | str:
    """Return the column that follows from specification, role and type, or what is wrong with it."""
    if spec is None and role == "feature":
        spec = default_spec(data_type)
    if spec is not None:
        return spec.resolve(name, data_type, float_dtype, trained)
    if data_type.typeName() == "binary":
        return (
            "is of type binary, which cannot become a tensor by itself: say what it holds, as "
            f'columns={{"{name}": sparkdl.Image()}} for encoded images, or with '
            "sparkdl.Convert(function)."
        )
    read = weight_column if role == "weight" else numeric_column
    return read(name, data_type, float_dtype, trained)


_INDEX = re.compile(r"\[\d+\]$")
"""Matches the index in a field of an RDD's records, such as "features[0]"."""


def check_specs(
    specs: object, features: Names[str], label: Names[str], weight: str | None = None
) -> Iterator[str]:
    """Yield the problems of ``Trainer.columns``, given the other parameters, one sentence each."""
    if not isinstance(specs, Mapping):
        yield (
            f"columns is {kind_of(specs)}: give a dict of column names, such as "
            '{"photo": sparkdl.Image()}.'
        )
        return
    for name, spec in specs.items():
        named = {str(name), _INDEX.sub("", str(name))}  # a field of an RDD, such as "features[0]"
        if isinstance(spec, type) and issubclass(spec, ColumnSpec):
            yield f'columns["{name}"] is the class {spec.__name__}: give an instance of it.'
        elif not isinstance(spec, ColumnSpec):
            yield f'columns["{name}"] is {kind_of(spec)}: give a {_own_types()}.'
        elif name == weight:
            yield (
                f'columns["{name}"] is the weight, which is always a number: leave it out of '
                "columns."
            )
        elif not named & {*features, *label}:
            yield (
                f'columns["{name}"] is neither a feature nor a label.'
                f"{nearest(str(name), [*features, *label])} Known: "
                f"{', '.join([*features, *label])}."
            )
        else:
            for problem in spec.problems("feature" if named & {*features} else "label"):
                yield f'columns["{name}"] {problem}'


def _own_types() -> str:
    """Return the column types of this package as a message lists them."""
    own = [kind.__name__ for kind in KINDS.values() if kind.__module__.startswith("sparkdl.")]
    *most, last = [f"sparkdl.{name}" for name in sorted(own)]
    return f"{', '.join(most)} or {last}"

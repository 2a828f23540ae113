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
from typing import TYPE_CHECKING

from sparkdl.data.columns.base import KINDS, Column, ColumnSpec, Specs, default_spec
from sparkdl.data.columns.numeric import numeric_column, weight_column
from sparkdl.data.fields import Field
from sparkdl.data.row_errors import columns_with
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
    """Return the feature and label columns of a DataFrame; see :func:`sample_columns`."""
    columns = sample_columns(schema, features, label, None, float_dtype, specs, None, fields)
    return columns[: len(features)], columns[len(features) :]


def sample_columns(
    schema: StructType,
    features: Names[str],
    label: Names[str],
    weight: str | None,
    float_dtype: str,
    specs: Specs | None = None,
    sampling: Sampling | None = None,
    fields: Names[Field] = (),
) -> tuple[Column, ...]:
    """Return the columns of a sample: features, labels, what rows are drawn by, and the weight.

    Integers become floats where the trained ``fields`` have floats. One error lists all problems.
    """
    problems, columns, trained = [], [], iter(fields)
    drawn = () if sampling is None else (sampling.column,)
    roles = {"feature": features, "label": label, "sampling": drawn, "weight": (weight,)}
    for role, name in [(role, name) for role, names in roles.items() for name in names if name]:
        if role == "sampling" and sampling is not None:
            found = _column(schema, name, role, "float64", sampling.spec, None)
        else:
            spec = None if role == "weight" else (specs or {}).get(name)
            found = _column(schema, name, role, float_dtype, spec, next(trained, None))
        if isinstance(found, str):
            known = fields or name in schema.names
            problems.append(found if known else found + _WITHOUT.get(role, ""))
        else:
            # a row without the column that it is drawn by has no stand-in either
            columns.append(replace(found, label=role in ("label", "sampling")))
    raise_all(DataError, problems)
    return tuple(columns)


def _column(
    schema: StructType,
    name: str,
    role: str,
    float_dtype: str,
    spec: ColumnSpec | None,
    trained: Field | None,
) -> Column | str:
    """Return the column that follows from specification, role and type, or what is wrong with it."""
    names = (name, *(() if spec is None else spec.beside))
    if missing := [one for one in names if one not in schema.names]:
        what = f'{role} column "{name}"'
        if missing[0] != name:
            what = f'column "{missing[0]}", which columns["{name}"] names,'
        return (
            f"{what} is missing.{_hint(missing[0], schema)} The DataFrame has: "
            f"{', '.join(schema.names) or 'no columns'}."
        )
    kind: DataType = schema[name].dataType
    if len(names) > 1:
        kind = type(schema)([schema[one] for one in names])
    if spec is None and role == "feature":
        spec = default_spec(kind)
    if spec is not None:
        column = spec.resolve(name, kind, float_dtype, trained)
    elif role == "weight":
        column = weight_column(name, kind, float_dtype, trained)
    elif kind.typeName() == "binary":
        column = (
            "is of type binary, which cannot become a tensor by itself: say what it holds, as "
            f"{columns_with(name, 'Image()')} for encoded images, or with sparkdl.Convert(function)."
        )
    else:
        column = numeric_column(name, kind, float_dtype, trained)
    return f'{role} column "{name}" {column}' if isinstance(column, str) else column


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

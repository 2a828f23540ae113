"""Columns of a DataFrame as a model needs them, and columns made of its output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, NumericType, StructType

from sparkdl.data.fields import Field
from sparkdl.data.schema import quoted
from sparkdl.errors import ModelError, ParameterError
from sparkdl.infer.outputs import Output


def column(name: str) -> Column:
    """Return the column of this name, whatever characters it has."""
    return functions.col(quoted(name))


def are_valid(schema: StructType, names: Sequence[str]) -> Column:
    """Return a condition: no column (that is there) holds null, NaN or an infinite number."""
    there = [name for name in names if name in schema.names]
    conditions = [_is_valid(column(name), schema[name].dataType) for name in there]
    return reduce(lambda one, other: one & other, conditions, functions.lit(True))


def _is_valid(value: Column, kind: DataType) -> Column:
    there = value.isNotNull()
    if isinstance(kind, (FloatType, DoubleType)):
        return there & ~functions.isnan(value) & (functions.abs(value) != float("inf"))
    if isinstance(kind, VectorUDT):
        value, kind = vector_to_array(value), ArrayType(DoubleType())
    if isinstance(kind, ArrayType):
        inner = kind.elementType
        every = functions.forall(value, lambda one: _is_valid(one, inner))
        return there & functions.coalesce(every, functions.lit(False))
    return there


def zeros(name: str, kind: DataType, field: Field) -> Column:
    """Return a valid value for a row whose own is not: zeros of the shape that the model takes."""
    shape = [*(1 for _ in field.rules), *field.shape]
    if field.padding is not None and field.padding.entries_of is not None:
        shape = [field.padding.entries_of]
    inner = kind
    while isinstance(inner, ArrayType):
        inner = inner.elementType
    if isinstance(kind, VectorUDT):
        return array_to_vector(functions.array_repeat(functions.lit(0.0), shape[0]))
    if not isinstance(inner, NumericType):
        raise ParameterError(
            f'handleInvalid="keep" goes with numbers, arrays and vectors, and "{name}" is of type '
            f'{kind.simpleString()}: use "skip" or "error".'
        )
    value = functions.lit(0)
    for length in reversed(shape):
        value = functions.array_repeat(value, length)
    return value.cast(kind)


def as_classes(data: DataFrame, name: str, weights: bool) -> DataFrame:
    """Return ``data`` with a label column of numbers as the loss of a classifier takes it.

    StringIndexer makes class numbers of type double, and torch's losses of classes take integers;
    with ``weights`` the loss takes floats, as BCEWithLogitsLoss does.
    """
    kind = data.schema[name].dataType if name in data.schema.names else None
    if not isinstance(kind, NumericType) and (kind is None or kind.typeName() != "boolean"):
        return data  # the fit says what is wrong with it
    label = column(name)
    if weights:
        return data.withColumn(name, label.cast("double"))
    if kind.typeName() in ("float", "double") or kind.typeName().startswith("decimal"):
        text = functions.concat(
            functions.lit(f'label column "{name}" holds '),
            label.cast("string"),
            functions.lit(
                ", and class numbers are whole, from 0 on: make them with StringIndexer, or use "
                "TorchRegressor for numbers."
            ),
        )
        wrong = label.isNotNull() & (label % 1 != 0)  # floor would overflow at infinity
        whole = functions.when(wrong, mistake(text).cast("bigint"))
        return data.withColumn(name, whole.otherwise(label.cast("bigint")))
    return data.withColumn(name, label.cast("bigint"))


def mistake(text: Column) -> Column:
    """Return a column that fails the job with a :class:`sparkdl.DataError` of this text."""
    return functions.raise_error(
        functions.concat(functions.lit("sparkdl.errors.DataError: "), text)
    )


def label_names(schema: StructType, name: str) -> tuple[str, ...]:
    """Return the names of the classes that StringIndexer left in the column's metadata."""
    attributes = schema[name].metadata.get("ml_attr", {}) if name in schema.names else {}
    return tuple(str(value) for value in attributes.get("vals", ()))


def class_metadata(name: str, labels: Sequence[str], count: int) -> dict[str, Any]:
    """Return the metadata of a column of class numbers, whose names IndexToString takes."""
    values = {"vals": list(labels)} if labels else {"num_vals": count}
    return {"ml_attr": {"type": "nominal", "name": name, **values}}


def class_count(output: Output | None) -> int:
    """Return the number of classes of a classifier with this output."""
    if output is None or len(output.shape) > 1:
        found = "not a single tensor" if output is None else f"of shape {['rows', *output.shape]}"
        raise ModelError(
            f"the output of the model is {found}: a classifier's has one number for each class, or one "
            "for two classes. Say with trainerArgs output= which part it is, or use TorchEstimator."
        )
    return 2 if output.shape in ((), (1,)) else output.shape[0]


def part_of_scores(scores: Column, first: int, count: int) -> Column:
    """Return values of a result of ``ClassScores`` as a vector; ``first`` counts from 0."""
    return array_to_vector(functions.slice(scores, first + 1, count))


def as_numbers(output: Column, kind: DataType, one: bool) -> Column:
    """Return a module's output as evaluators take it: one number as double, several as a vector."""
    if not isinstance(kind, ArrayType):
        return output.cast("double")
    if isinstance(kind.elementType, ArrayType):
        return output
    return output[0].cast("double") if one else array_to_vector(output.cast("array<double>"))


def nothing_like(kind: DataType, width: int) -> Column:
    """Return NaN as a prediction of this type."""
    nan = functions.lit(float("nan"))
    if kind.typeName() == "double":
        return nan
    if isinstance(kind, ArrayType):
        return functions.lit(None).cast(kind)
    return array_to_vector(functions.array_repeat(nan, width))

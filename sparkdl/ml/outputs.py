"""Columns made from a module's output: classes with their probabilities, and numbers."""

from __future__ import annotations

from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, functions
from pyspark.sql.types import ArrayType, DataType

from sparkdl.errors import ModelError
from sparkdl.infer.outputs import Output


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

"""From a module's output to columns: classes with their probabilities, and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, functions
from pyspark.sql.types import ArrayType, DataType

from sparkdl.errors import ModelError
from sparkdl.infer.output import Output


@dataclass(frozen=True)
class ClassScores:
    """The ``postprocess`` of a classifier: raw prediction, probability and class, side by side.

    The result is float64 of shape (rows, 2 * classes + 1).

    Attributes:
        probability: The output is one number, the probability of class 1.
        thresholds: The class with the largest probability / threshold is predicted; () is none.
    """

    probability: bool = False
    thresholds: tuple[float, ...] = ()

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


def class_count(output: Output | None) -> int:
    """Return the number of classes of a classifier with this output.

    Raises:
        ModelError: It is not the output of a classifier.
    """
    if output is None or len(output.shape) > 1:
        found = "not a single tensor" if output is None else f"of shape {['rows', *output.shape]}"
        raise ModelError(
            f"the output of the model is {found}: a classifier's has one number for each class, or one "
            "for two classes. Say with trainerArgs output= which part it is, or use TorchEstimator."
        )
    return 2 if output.shape in ((), (1,)) else output.shape[0]


def part_of_scores(scores: Column, first: int, count: int) -> Column:
    """Return some values of the result of :class:`ClassScores` as a vector.

    Args:
        scores: The column with the result.
        first: The number of the first value, from 0.
        count: The number of values.
    """
    return array_to_vector(functions.slice(scores, first + 1, count))


def as_numbers(output: Column, kind: DataType, one: bool) -> Column:
    """Return a module's output as evaluators take it: one number as double, several as a vector.

    Args:
        output: The column with the output.
        kind: Its type.
        one: The output is an array of one number.
    """
    if not isinstance(kind, ArrayType):
        return output.cast("double")
    if isinstance(kind.elementType, ArrayType):
        return output
    return output[0].cast("double") if one else array_to_vector(output.cast("array<double>"))


def nothing_like(kind: DataType, width: int) -> Column:
    """Return NaN as a prediction of this type.

    Args:
        kind: The type of the prediction.
        width: The number of values of a vector.
    """
    nan = functions.lit(float("nan"))
    if kind.typeName() == "double":
        return nan
    if isinstance(kind, ArrayType):
        return functions.lit(None).cast(kind)
    return array_to_vector(functions.array_repeat(nan, width))

"""Predictions that are ready to be computed, and the options that all of them have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

from pyspark.sql import DataFrame, functions
from torch import nn

from sparkdl.compat import arrow_udf
from sparkdl.data.arrow_tasks import check_new_columns
from sparkdl.data.columns.base import Column
from sparkdl.data.schema import quoted
from sparkdl.errors import ParameterError, shown
from sparkdl.infer.scoring.forward import check_options
from sparkdl.infer.scoring.parts import write_parts
from sparkdl.infer.scoring.task import ScoreRows
from sparkdl.plain import plain
from sparkdl.usercode import accompanied
from sparkdl.usercode.content import content_digest

HANDLING = ("error", "skip", "keep")
HELD = "sparkdl_predictions"
"""The column that holds the predictions before each gets a column of its own."""


@dataclass(frozen=True)
class Options:
    """The options that all functions of this kind share, see :func:`predict`."""

    batch_size: int = 256
    precision: str = "fp32"
    quantize: str | None = None
    handle_invalid: str = "error"
    error_col: str = "error"

    def __post_init__(self) -> None:
        size = plain(self.batch_size)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ParameterError(f"batch_size={shown(size)}: give a whole number of at least 1.")
        object.__setattr__(self, "batch_size", size)
        check_options(self.precision, self.quantize)
        if self.handle_invalid not in HANDLING:
            raise ParameterError(
                f"handle_invalid={shown(self.handle_invalid)}: use one of {', '.join(HANDLING)}."
            )
        if not isinstance(self.error_col, str):
            raise ParameterError(f"error_col={shown(self.error_col)}: give a column name.")


@dataclass(frozen=True)
class Inference:
    """Predictions that are ready to be computed."""

    task: ScoreRows
    options: Options
    module: nn.Module  # before it is quantized

    def udf(self, example: DataFrame) -> Any:
        """Return the work as a function of columns of the types that ``example`` has."""
        types = [example.schema[column.name].dataType for column in self.task.columns]
        return arrow_udf(accompanied(self.task), types, self.task.sql_type)

    def applied(self, data: DataFrame) -> DataFrame:
        """Return the data with the columns of predictions."""
        names = [column.name for column in self.task.outputs]
        keep = self.options.handle_invalid == "keep"
        fields = [*names, *([self.options.error_col] if keep else [])]
        check_new_columns(data, fields, ", with prediction_col=, outputs= or error_col=")
        inputs = [functions.col(quoted(column.name)) for column in self.task.columns]
        # not deterministic: Spark would compute it again for each filter on a prediction
        computed = self.udf(data).asNondeterministic()(*inputs)
        if len(names) == 1 and self.task.error_col is None:
            return data.withColumn(names[0], computed)
        found = data.withColumn(HELD, computed)
        if self.options.handle_invalid == "skip":
            found = found.where(functions.col(HELD)[self.task.error_col].isNull())
        columns = [functions.col(HELD)[name].alias(name) for name in fields]
        return found.select("*", *columns).drop(HELD)

    def identity(self) -> str:
        """Return a digest of model, columns and options, which is the same in another process."""
        task, options = self.task, replace(self.options, batch_size=1)
        columns = [(column.name, column.dtype, _spec(column)) for column in task.columns]
        outputs = [(column.name, column.part, column.labels) for column in task.outputs]
        return content_digest((self.module, options, task.signature, columns, outputs))[:16]

    def compute(self, data: DataFrame, path: Any, partitions: int, overwrite: bool) -> DataFrame:
        """Return the data with predictions: lazily, or as read from ``path`` once it is there."""
        if path is None:
            return self.applied(data)
        scored, reason = self, None
        if self.options.handle_invalid == "skip":  # the file leaves them out, but knows of them
            reason = "sparkdl_reason"
            options = replace(self.options, handle_invalid="keep", error_col=reason)
            scored = replace(self, options=options, task=replace(self.task, error_col=reason))
        identity = self.identity()
        return write_parts(data, scored.applied, path, partitions, overwrite, identity, reason)


def _spec(column: Column) -> Any:
    """Return the specification of a column, or its description with its tokenizer if it is of text."""
    try:
        described = None if column.spec is None else column.spec.to_json(column.name)
    except ParameterError:  # its function has no name
        return column.spec
    held = vars(column.spec).values() if column.spec is not None else ()
    return described, [one for one in held if isinstance(one, (FunctionType, partial, nn.Module))]

"""Predictions that are ready to be computed, and the options that all of them have."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyspark.sql import DataFrame, functions
from torch import nn

from sparkdl.data.arrow_tasks import check_new_columns
from sparkdl.data.columns.base import Column
from sparkdl.data.schema import quoted
from sparkdl.errors import ParameterError, shown
from sparkdl.infer.predict import arrow_udf
from sparkdl.infer.scoring.forward import check_options
from sparkdl.infer.scoring.outputs import OutputColumn
from sparkdl.infer.scoring.parts import write_parts
from sparkdl.infer.scoring.programs import tensors_of
from sparkdl.infer.scoring.task import ScoreRows
from sparkdl.plain import plain
from sparkdl.usercode import accompanied
from sparkdl.usercode.code import codes_in

HANDLING = ("error", "skip", "keep")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
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
    """Predictions that are ready to be computed.

    Attributes:
        task: The work on a partition.
        options: The options.
        module: The module before it is quantized.
    """

    task: ScoreRows
    options: Options
    module: nn.Module

    def udf(self) -> Any:
        """Return the work as a function of columns."""
        return arrow_udf(accompanied(self.task), len(self.task.columns), self.task.sql_type)

    def applied(self, data: DataFrame) -> DataFrame:
        """Return the data with the columns of predictions.

        Raises:
            DataError: A column of this name exists, or two new ones have the same.
        """
        names = [column.name for column in self.task.outputs]
        keep = self.options.handle_invalid == "keep"
        fields = [*names, *([self.options.error_col] if keep else [])]
        check_new_columns(data, fields, ", with prediction_col=, outputs= or error_col=")
        inputs = [functions.col(quoted(column.name)) for column in self.task.columns]
        # not deterministic: Spark would compute it again for each filter on a prediction
        computed = self.udf().asNondeterministic()(*inputs)
        if len(names) == 1 and self.task.error_col is None:
            return data.withColumn(names[0], computed)
        found = data.withColumn(HELD, computed)
        if self.options.handle_invalid == "skip":
            found = found.where(functions.col(HELD)[self.task.error_col].isNull())
        columns = [functions.col(HELD)[name].alias(name) for name in fields]
        return found.select("*", *columns).drop(HELD)

    def identity(self) -> str:
        """Return a digest of weights, columns and options, which is the same in another process."""
        digest, task = hashlib.blake2b(digest_size=8), self.task
        for name, tensor in sorted(tensors_of(self.module).items()):
            whole = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)} ".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
        options = replace(self.options, batch_size=1)
        described = [repr(self.module), repr(options), *task.signature.inputs]
        described += [f"{column.name} {column.dtype} {_spec(column)}" for column in task.columns]
        described += [_part(column) for column in task.outputs]
        digest.update(_ADDRESS.sub("", repr(described)).encode())
        return digest.hexdigest()

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


def _spec(column: Column) -> str:
    """Return the specification of a column as text, with its tokenizer if it is one of text."""
    try:
        return "" if column.spec is None else repr(column.spec.to_json(column.name))
    except ParameterError:  # its function has no name
        return repr(column.spec)


def _part(column: OutputColumn) -> str:
    """Return a column as text that changes with the code of its function."""
    part, given = column.part, ""
    while isinstance(part, functools.partial):
        given += f"{part.args} {part.keywords} "
        part = part.func
    code = getattr(part, "__code__", None)
    shown = part if isinstance(part, (str, int)) else getattr(part, "__qualname__", type(part))
    body = ""
    for one in () if code is None else codes_in(code):
        constants = [value for value in one.co_consts if not isinstance(value, type(code))]
        body += f"{one.co_code.hex()} {one.co_names} {constants}"
    return f"{column.name} {shown} {given}{body} {column.labels}"

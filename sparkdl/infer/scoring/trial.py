"""Trials of a model on the driver, with a few rows, before any job computes predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.arrow_tasks import select_columns, ship_batches
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import RowError
from sparkdl.errors import DataError, ModelError
from sparkdl.infer.scoring.forward import Forward
from sparkdl.infer.scoring.outputs import OutputColumn, described_column, offered_parts, value_of
from sparkdl.infer.trial import zeros_like
from sparkdl.model.recipe import Part
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating
from sparkdl.spark.failures import reading_explained

ROWS = 2
LOOKED_AT = 32
"""The number of rows among which good ones are looked for, if bad rows are allowed."""


def tried_columns(
    forward: Forward, arrays: Sequence[Rows], parts: dict[str, Part] | None, name: str
) -> tuple[tuple[OutputColumn, ...], int]:
    """Return the columns that the model's outputs for these rows come to.

    Return also the bytes of the largest tensor that a layer returns for a row, or for an element of a
    row whose length varies.
    """
    fixed = getattr(forward.module, "fixed_rows", None)
    if fixed is not None:
        arrays = [array[np.arange(fixed) % len(array)] for array in arrays]
    with largest_tensor(forward.module) as bytes_of:
        returned = _tried(forward, arrays)
    rows = len(arrays[0])
    chosen = offered_parts(returned, rows, name) if parts is None else parts
    values = {column: value_of(returned, part) for column, part in chosen.items()}
    found = [described_column(n, chosen[n], value, rows) for n, value in values.items()]
    if not any(isinstance(array, Ragged) for array in arrays):
        return tuple(found), bytes_of[0] // rows
    padded, other = (_padded_length(some) for some in (arrays, _of_other_length(arrays)))
    unit_bytes = bytes_of[0] // (rows * padded)
    try:
        again = _tried(forward, _of_other_length(arrays))
    except ModelError:
        return tuple(found), unit_bytes
    follows = {
        column.name: column.output.shape[:1] == (padded,)
        and tuple(value_of(again, column.part).shape[1:2]) == (other,)
        for column in found
    }
    return tuple(replace(one, by_element=follows[one.name]) for one in found), unit_bytes


@contextlib.contextmanager
def largest_tensor(module: nn.Module) -> Iterator[list[int]]:
    """Yield a list whose one number becomes the bytes of the largest tensor that a layer returns."""
    largest = [0]

    def note(layer: nn.Module, inputs: Any, returned: Any) -> None:
        if isinstance(returned, torch.Tensor):
            largest[0] = max(largest[0], returned.nbytes)

    layers = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def _tried(forward: Forward, arrays: Sequence[Rows]) -> Any:
    with seeded(0), evaluating(forward.module), buffers_kept(forward.module):
        return forward.returned(arrays)


def _of_other_length(arrays: Sequence[Rows]) -> list[Rows]:
    """Return rows of varying length as shorter ones, or longer ones if they have one element."""
    changed: list[Rows] = []
    for array in arrays:
        if isinstance(array, Ragged) and (longest := int(array.lengths.max())) > 1:
            changed.append(array.cut(longest - 1))
        elif isinstance(array, Ragged):
            rows = [np.repeat(row, 2, axis=0) for row in array]
            changed.append(Ragged.of(rows, array.padding))
        else:
            changed.append(array)
    return changed


def _padded_length(arrays: Sequence[Rows]) -> int:
    return next(int(array.padded().shape[1]) for array in arrays if isinstance(array, Ragged))


def made_up(columns: Sequence[Column], fields: Sequence[Field], types: Sequence[Any]) -> Any:
    """Return two rows that look like those of the columns, or None if that cannot be known."""
    if fields:
        return zeros_like(fields)
    known = {"string": pa.array(["a", "a a"])}
    arrays = []
    for column, kind in zip(columns, types, strict=True):
        if kind.typeName() in known:
            array = known[kind.typeName()]
        elif column.depth == 0 and column.spec is None:
            array = pa.array(np.zeros(ROWS, column.dtype))
        else:
            return None
        try:
            arrays.append(to_numpy(array, column))
        except RowError:
            return None
    return arrays


def rows_to_try(data: DataFrame, columns: Sequence[Column], keep: bool) -> Iterator[list[Rows]]:
    """Yield rows, by one Spark job: the first two, and single ones if bad ones are allowed."""
    if data.isStreaming:
        raise DataError(
            "the data is a stream, whose rows cannot be looked at beforehand: pass example=, a "
            "DataFrame with some rows like those of the stream."
        )
    with reading_explained("looking at the first rows"):
        chosen = select_columns(data, columns).limit(LOOKED_AT if keep else ROWS)
        shipped = chosen.mapInArrow(ship_batches, "source int, batches binary").collect()
    tables = [pa.ipc.open_stream(bytes(row[1])).read_all() for row in shipped]
    table = pa.concat_tables([t for t in tables if t.num_rows]) if any(map(len, tables)) else None
    if table is None:
        raise DataError(
            "the data has no row to try the model on: pass example=, a DataFrame with some rows."
        )
    arrays = [column.combine_chunks() for column in table.columns]
    if not keep:
        try:
            yield _read(arrays, columns)
        except RowError as error:
            raise DataError(error.problem.message("the data")) from None
    for row in range(table.num_rows if keep else 0):
        try:
            yield _read([array.take(pa.array([row, row])) for array in arrays], columns)
        except RowError:
            continue


def _read(arrays: Sequence[Any], columns: Sequence[Column]) -> list[Rows]:
    return [to_numpy(array, column) for array, column in zip(arrays, columns, strict=True)]

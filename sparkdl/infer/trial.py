"""Trials of a model on the driver, with a few rows, which show what predictions will hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import RDD
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.arrow_tasks import of_structs, select_columns, ship_batches
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import RowError
from sparkdl.errors import DataError, ModelError, UserError
from sparkdl.infer.forward import Forward
from sparkdl.infer.outputs import Finish, NoResults, Output, OutputColumn, offered_parts, value_of
from sparkdl.infer.read import ReadColumns, Reader
from sparkdl.model.recipe import Part
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating
from sparkdl.spark.failures import reading_explained

ROWS = 2
LOOKED_AT = 32
"""The number of rows among which good ones are looked for, if bad rows are allowed."""


@dataclass(frozen=True)
class Trial:
    """A trial of a model, whose result is the columns of its outputs."""

    forward: Forward
    parts: Mapping[str, Part] | None  # by column; None: those that it offers
    name: str  # of the column if there is one
    finish: Finish = None
    known: Output | None = None  # of the part, from the training

    def run(
        self,
        made: Sequence[Rows] | None,
        rows: Iterator[Sequence[Rows]],
        more: Callable[[], Iterator[Sequence[Rows]]] = lambda: iter(()),
    ) -> tuple[tuple[OutputColumn, ...], int]:
        """Return :meth:`columns` of the made-up rows or, if the model fails on these, of others.

        If no row has a result that shows the type of a column, ``more`` rows are looked at.
        """
        failed: UserError | None = None
        try:
            if self.known is not None:
                zeros = torch.zeros(ROWS, *self.known.shape, dtype=getattr(torch, self.known.dtype))
                ((name, part),) = (self.parts or {self.name: None}).items()
                return (OutputColumn.of(name, part, zeros, ROWS, self.finish),), 0
            if made is not None:
                return self.columns(made)
        except UserError as error:
            if error.__cause__ is None and not isinstance(error, NoResults):  # on any rows
                raise
            failed = error
        for following in (lambda: rows, more):
            for some in following():
                try:
                    return self.columns(some)
                except UserError as error:
                    failed = error
            if not isinstance(failed, NoResults):
                break
        raise failed or DataError(
            "the data is a stream, whose rows cannot be looked at beforehand, or it has no good row to "
            "try the model on: pass example=, a DataFrame with some rows."
        )

    def columns(self, arrays: Sequence[Rows]) -> tuple[tuple[OutputColumn, ...], int]:
        """Return the columns that the model's outputs for these rows come to.

        Return also the bytes of the largest tensor that a layer returns for a row, or for an element
        of a row whose length varies.
        """
        fixed = getattr(self.forward.module, "fixed_rows", None)
        if fixed is not None:
            arrays = [array[np.arange(fixed) % len(array)] for array in arrays]
        with largest_tensor(self.forward.module) as bytes_of:
            returned = self._returned(arrays)
        rows = len(arrays[0])
        chosen = offered_parts(returned, rows, self.name) if self.parts is None else self.parts
        values = {name: value_of(returned, part) for name, part in chosen.items()}
        found = [
            OutputColumn.of(name, chosen[name], value, rows, self.finish)
            for name, value in values.items()
        ]
        if self.finish is not None or not any(isinstance(array, Ragged) for array in arrays):
            return tuple(found), bytes_of[0] // rows
        padded, other = (_padded_length(some) for some in (arrays, _of_other_length(arrays)))
        unit_bytes = bytes_of[0] // (rows * padded)
        try:
            again = self._returned(_of_other_length(arrays))
        except ModelError:
            return tuple(found), unit_bytes
        follows = {
            column.name: column.output is not None
            and column.output.shape[:1] == (padded,)
            and tuple(value_of(again, column.part).shape[1:2]) == (other,)
            for column in found
        }
        return tuple(replace(one, by_element=follows[one.name]) for one in found), unit_bytes

    def _returned(self, arrays: Sequence[Rows]) -> Any:
        module = self.forward.module
        with seeded(0), evaluating(module), buffers_kept(module):
            return self.forward.returned(arrays)


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


def _of_other_length(arrays: Sequence[Rows]) -> list[Rows]:
    """Return rows of varying length as shorter ones, or longer ones if they have one element."""
    changed: list[Rows] = []
    for array in arrays:
        if isinstance(array, Ragged) and (longest := int(array.lengths.max())) > 1:
            changed.append(array.cut(longest - 1))
        elif isinstance(array, Ragged):
            twice = np.repeat(np.arange(len(array.used)), 2)
            offsets = (array.offsets - array.offsets[0]) * 2
            changed.append(Ragged(array.used[twice], offsets, array.padding))
        else:
            changed.append(array)
    return changed


def _padded_length(arrays: Sequence[Rows]) -> int:
    return next(int(array.padded().shape[1]) for array in arrays if isinstance(array, Ragged))


def zeros_like(
    fields: Sequence[Field], rows: int = ROWS, length: int = ROWS, number: int = 0
) -> list[Rows]:
    """Return rows of ``number``, of ``length`` elements; lists in lists have 4 more a level."""
    arrays: list[Rows] = []
    for field in fields:
        lengths = [length + 4 * level for level in range(len(field.rules))]
        counts = np.cumprod([rows, *lengths])
        zeros: Rows = np.full((counts[-1], *field.shape), number, field.dtype)
        for rule, number, size in reversed(
            list(zip(field.rules, counts[:-1], lengths, strict=True))
        ):
            zeros = Ragged(zeros, np.arange(number + 1) * size, rule)
        arrays.append(zeros)
    return arrays


def made_up(columns: Sequence[Column], types: Sequence[Any]) -> list[Rows] | None:
    """Return two rows that look like those of the columns, or None if that cannot be known."""
    arrays = []
    for column, kind in zip(columns, types, strict=True):
        if kind.typeName() == "string":
            (array,) = of_structs([pa.array(["a", "a a"])] * len(column.names), [column])
        elif column.depth == 0 and column.spec is None:
            array = pa.array(np.zeros(ROWS, column.dtype))
        else:
            return None
        try:
            arrays.append(to_numpy(array, column))
        except RowError:
            return None
    return arrays


def rows_to_try(
    data: DataFrame | RDD, reader: Reader, keep: bool, count: int = ROWS
) -> Iterator[list[Rows]]:
    """Yield the first ``count`` rows, by one Spark job; single ones of more if bad ones are allowed.

    A stream has none that could be looked at.
    """
    items: Any
    count, noun = LOOKED_AT if keep else count, "column"
    if isinstance(data, DataFrame):
        assert isinstance(reader, ReadColumns)
        if data.isStreaming:
            return
        with reading_explained("looking at the first rows"):
            chosen = select_columns(data, reader.columns).limit(count)
            shipped = chosen.mapInArrow(ship_batches, "source int, batches binary").collect()
        tables = [pa.ipc.open_stream(bytes(row[1])).read_all() for row in shipped]
        tables = [table for table in tables if table.num_rows] or [pa.table({})]
        arrays = [column.combine_chunks() for column in pa.concat_tables(tables).columns]
        number = len(arrays[0]) if arrays else 0
        items = arrays if number else []
        singles = [[array.take(pa.array([i, i])) for array in arrays] for i in range(number)]
    else:
        noun = "field"
        with reading_explained("looking at the first records"):
            items = data.take(count)
        singles = [[record, record] for record in items]
    if not keep and items:
        try:
            yield reader.read(items)
        except RowError as error:
            raise DataError(error.problem.message("the data", noun)) from None
    for single in singles if keep else ():
        try:
            yield reader.read(single)
        except RowError:
            continue

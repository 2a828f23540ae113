"""The body of the Arrow UDF: feature columns in, predictions out, in the order of the rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch
from pyspark import TaskContext

from sparkdl.data.columns.base import Column
from sparkdl.data.row_errors import RowError
from sparkdl.errors import DataError, ModelError
from sparkdl.infer.output import pieces
from sparkdl.infer.scoring.forward import Forward
from sparkdl.infer.scoring.outputs import OutputColumn, lengths_of, sequences_of
from sparkdl.infer.scoring.windows import Group, ReadWindow, Window, cut_windows, read_ahead
from sparkdl.infer.shipped_module import ShippedModule, device_of
from sparkdl.model.recipe import Signature
from sparkdl.spark.worker import finish_task, mistakes_told_briefly

TENSOR_BYTES = 8 << 20
"""The most bytes of a layer's result on the CPU."""
LEAST_ROWS = 8


@dataclass(frozen=True)
class ScoreRows:
    """The work on a partition."""

    module: ShippedModule
    columns: tuple[Column, ...]
    outputs: tuple[OutputColumn, ...]
    signature: Signature
    batch_size: int
    unit_bytes: int  # of a row's (or element's) largest tensor; 0: unknown; see rows_at_once
    window: int  # rows read, and sorted by length, together
    precision: str = "fp32"
    error_col: str | None = None  # for the reason why a row has no predictions; None: raise

    @property
    def sql_type(self) -> str:
        """The type of what is yielded: one column, or a struct of several."""
        if self._alone:
            return self.outputs[0].sql_type
        fields = [(column.name, column.sql_type) for column in self.outputs]
        if self.error_col is not None:
            fields.append((self.error_col, "string"))
        return "struct<" + ",".join(f"`{n.replace('`', '``')}`:{t}" for n, t in fields) + ">"

    @property
    def _alone(self) -> bool:
        return len(self.outputs) == 1 and self.error_col is None

    def __call__(self, batches: Iterator[tuple[pa.Array, ...] | pa.Array]) -> Iterator[pa.Array]:
        # tasks share the cores, and tokenizers run in a thread of this one
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        forward = Forward(self.module.load(), self.signature, self.precision)
        arrays = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
        read = ReadWindow(self.columns, self.error_col is not None)
        windows = read_ahead(cut_windows(arrays, self.window), lambda cut: _read(read, *cut))
        with mistakes_told_briefly():
            for window in windows:
                yield from self._scored(forward, window)
        finish_task()

    def _scored(self, forward: Forward, window: Window) -> Iterator[pa.Array]:
        """Yield the predictions of a window: batch by batch if they come in the order of the rows."""
        found = Predictions(window.count, self.outputs, dict(window.problems))
        in_order = self.error_col is None and all(
            lengths_of(group.arrays) is None for group in window.groups
        )
        on_cpu = device_of(forward.module).type == "cpu"
        size = self.rows_at_once if on_cpu else lambda length: self.batch_size
        for group in window.groups:
            for batch in group.batches(size):
                for part, values in self._run(forward, batch, found.problems):
                    if in_order:
                        yield from self._in_order(values)
                    else:
                        found.add(part, values)
        if not in_order:
            yield self._joined(found.arrays(), found)

    def rows_at_once(self, length: int) -> int:
        """Return the number of rows of a batch on the CPU, for rows of this length.

        It is lower than :attr:`batch_size` if tensors would be so large that the memory of each is
        mapped and cleared anew, which takes longer than computing it.
        """
        if self.unit_bytes <= 0:
            return self.batch_size
        return min(self.batch_size, max(LEAST_ROWS, TENSOR_BYTES // (self.unit_bytes * length)))

    def _in_order(self, values: Sequence[np.ndarray]) -> Iterator[pa.Array]:
        if len(values) == 1:
            yield from (self.outputs[0].to_arrow(part, None) for part in pieces(values[0]))
        else:
            pairs = zip(self.outputs, values, strict=True)
            yield self._joined([column.to_arrow(part, None) for column, part in pairs], None)

    def _joined(self, arrays: list[pa.Array], found: Predictions | None) -> pa.Array:
        if self._alone:
            return arrays[0]
        names = [column.name for column in self.outputs]
        if self.error_col is not None and found is not None:
            reasons = [found.problems.get(place) for place in range(found.count)]
            arrays, names = [*arrays, pa.array(reasons, pa.string())], [*names, self.error_col]
        return pa.StructArray.from_arrays(arrays, names)

    def _run(
        self, forward: Forward, batch: Group, problems: dict[int, str]
    ) -> Iterator[tuple[Group, list[np.ndarray]]]:
        """Yield the values of a batch.

        A batch that does not fit into the GPU's memory is halved. So is one that the model fails on, if
        bad rows are kept, until the rows that it fails on are alone.
        """
        try:
            yield batch, forward.predictions(batch.arrays, self.outputs)
            return
        except (torch.OutOfMemoryError, ModelError) as error:
            memory, count = isinstance(error, torch.OutOfMemoryError), len(batch.places)
            if not memory and self.error_col is None:
                raise
            if count == 1:
                if self.error_col is None:
                    raise
                problems[int(batch.places[0])] = str(error)
                return
        if memory:
            torch.cuda.empty_cache()
        for rows in np.array_split(np.arange(count), 2):
            yield from self._run(forward, batch.some(rows), problems)


@dataclass
class Predictions:
    """The predictions of a window, which come in any order."""

    count: int
    columns: Sequence[OutputColumn]
    problems: dict[int, str]  # the reason why a row has none, by its place
    _parts: list[tuple[np.ndarray, list[pa.Array]]] = field(default_factory=list)

    def add(self, batch: Group, values: Sequence[np.ndarray]) -> None:
        """Add the values of a batch, one array per column."""
        sequences = sequences_of(batch.arrays)
        pairs = zip(self.columns, values, strict=True)
        self._parts.append(
            (batch.places, [column.to_arrow(part, sequences) for column, part in pairs])
        )

    def arrays(self) -> list[pa.Array]:
        """Return an array per column, in the order of the rows; null where there is no prediction."""
        if not self._parts:
            return [pa.nulls(self.count, _arrow_type(column)) for column in self.columns]
        places = np.concatenate([places for places, _ in self._parts])
        positions = np.full(self.count, -1)
        positions[places] = np.arange(len(places))
        order = pa.array(positions, mask=positions < 0)
        columns = zip(*(arrays for _, arrays in self._parts), strict=True)
        return [pa.concat_arrays(list(parts)).take(order) for parts in columns]


def _arrow_type(column: OutputColumn) -> pa.DataType:
    """Return the Arrow type of a column without a prediction."""
    shape = (0, *(1 for _ in column.output.shape))
    if column.labels:
        return pa.string()
    dtype = column.output.dtype.replace("bfloat16", "float32").replace("float16", "float32")
    return column.to_arrow(np.zeros(shape, dtype), None).type


def _read(read: ReadWindow, arrays: Sequence[pa.Array], first_row: int) -> Window:
    try:
        return read(arrays, first_row)
    except RowError as error:
        context = TaskContext.get()
        place = "the partition" if context is None else f"partition {context.partitionId()}"
        raise DataError(error.problem.message(place)) from None

"""Training and validation rows in one DataFrame, whose tasks write both into slabs.

A barrier stage reads one DataFrame. The columns of the two parts keep their types, so each part has
columns of its own, which are null in the rows of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute
from pyspark.sql import DataFrame, functions

from sparkdl.data.arrow_tasks import WriteDataFrame, content_hash
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.row_errors import RowError

_HASH, _VALIDATES = "hash", "validates"


def both_parts(training: DataFrame, validation: DataFrame | None, replicas: int) -> DataFrame:
    """Return the rows of both parts in ``replicas`` partitions, each where a classic fit has it."""
    both = training.withColumn(_HASH, content_hash(training))
    if validation is not None:
        other = validation.select(
            *[functions.col(name).alias(_of_validation(name)) for name in validation.columns],
            content_hash(validation).alias(_HASH),
            functions.lit(True).alias(_VALIDATES),
        )
        both = both.withColumn(_VALIDATES, functions.lit(False))
        both = both.unionByName(other, allowMissingColumns=True)
    return both.repartition(replicas, _HASH).drop(_HASH)


def _of_validation(name: str) -> str:
    return f"v{name}"


@dataclass(frozen=True)
class WriteBoth:
    """Writes the rows of a task into slabs, as the samples of both parts."""

    training: WriteDataFrame
    validation: WriteDataFrame | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> list[SampleHandle]:
        """Write the rows of :func:`both_parts`, and return the handle of each part."""
        parts = [_Part.of(self.training)]
        if self.validation is not None:
            parts.append(_Part.of(self.validation))
        for batch in batches:
            names = [f"c{i}" for i in range(len(self.training.columns))]
            if self.validation is None:
                parts[0].write(batch.select(names))
                continue
            validates = batch.column(batch.schema.get_field_index(_VALIDATES))
            parts[0].write(batch.filter(pyarrow.compute.invert(validates)).select(names))
            names = [_of_validation(f"c{i}") for i in range(len(self.validation.columns))]
            parts[1].write(batch.filter(validates).select(names))
        return [part.handle() for part in parts]


@dataclass
class _Part:
    """A part that is being written."""

    task: WriteDataFrame
    writer: PartitionWriter
    failed: SampleHandle | None = None  # once a row was wrong

    @staticmethod
    def of(task: WriteDataFrame) -> _Part:
        return _Part(task, PartitionWriter(task.config, weighted=task.columns[-1].weight))

    def write(self, batch: pa.RecordBatch) -> None:
        if self.failed is None:
            try:
                self.task.write([batch], self.writer)
            except RowError as error:
                self.failed = self.writer.fail(error.problem)

    def handle(self) -> SampleHandle:
        return self.failed or self.writer.finish()

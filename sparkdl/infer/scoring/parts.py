"""Predictions written as Parquet, a file a partition, so that a killed job goes on where it was."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame

from sparkdl.checkpoint.files import Folder
from sparkdl.data.arrow_tasks import content_hash, partition_of
from sparkdl.errors import DataError, ParameterError, shown
from sparkdl.plain import plain
from sparkdl.spark.failures import reading_explained

_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
"""The key under which Spark finds the schema that it wrote, with the types of users."""
_PART = re.compile(r"part-(\d{5})-of-(\d{5})-([0-9a-f]{16})\.parquet")


def write_parts(
    data: DataFrame,
    score: Callable[[DataFrame], DataFrame],
    path: str | os.PathLike[str],
    partitions: int,
    overwrite: bool,
    identity: str,
) -> DataFrame:
    """Write the data with predictions into a folder, except for the partitions that are there.

    A row belongs to a partition by the hash of its content, whatever the cluster, so that the rows of
    finished partitions are left out before anything is computed for them.

    Args:
        data: The rows.
        score: Adds the predictions.
        path: The folder or its URI.
        partitions: The number of files.
        overwrite: Delete other predictions first.
        identity: A digest of what the predictions depend on besides the rows.

    Returns:
        The data with predictions, as read from there.

    Raises:
        UserError: An argument does not fit, or the folder holds other predictions.
        TrainingError: The job fails.
    """
    partitions = plain(partitions)
    if (
        not isinstance(partitions, int)
        or isinstance(partitions, bool)
        or not 0 < partitions < 10**5
    ):
        raise ParameterError(f"partitions={shown(partitions)}: give a whole number of 1 to 99,999.")
    if data.isStreaming:
        raise DataError(
            "path= is for data with an end, and this is a stream: write the result of predict with "
            "writeStream and its checkpointLocation, which goes on after a failure, too."
        )
    folder = Folder.of(path)
    scored = score(data.repartition(partitions, content_hash(data)))
    folder.make()
    finished = _finished(folder, partitions, identity, overwrite)
    missing = sorted(set(range(partitions)) - finished)
    if finished and missing:
        rows = data.where(partition_of(data, partitions).isin(missing))
        scored = score(rows.repartition(partitions, content_hash(rows)))
    if missing:
        task = WritePart(folder, partitions, identity, scored.schema.json(), frozenset(finished))
        with reading_explained("writing predictions"):
            scored.mapInArrow(task, "rows bigint").collect()
    return data.sparkSession.read.schema(scored.schema).parquet(folder.uri)


def _finished(folder: Folder, partitions: int, identity: str, overwrite: bool) -> set[int]:
    """Return the partitions that are there, once those of other predictions are gone.

    Raises:
        ParameterError: There are other predictions, which may not be deleted.
    """
    finished: set[int] = set()
    for name in folder.entries():
        found = _PART.fullmatch(name)
        if found is None:
            continue
        if (int(found[2]), found[3]) == (partitions, identity) and not overwrite:
            finished.add(int(found[1]))
        elif overwrite:
            folder.delete(name)
        else:
            raise ParameterError(
                f'"{folder}" holds other predictions ({name}), of another model, other options or '
                "another number of partitions: give another path, or overwrite=True."
            )
    return finished


@dataclass(frozen=True)
class WritePart:
    """A ``mapInArrow`` task that writes one partition, which appears once it is complete.

    Attributes:
        folder: The folder.
        partitions: The number of partitions.
        identity: A digest of what the predictions depend on.
        schema: The schema in Spark's JSON.
        finished: The partitions that are there already.
    """

    folder: Folder
    partitions: int
    identity: str
    schema: str
    finished: frozenset[int]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        if partition not in self.finished:
            name = f"part-{partition:05}-of-{self.partitions:05}-{self.identity}.parquet"
            yield pa.RecordBatch.from_pydict({"rows": [self._write(batches, name)]})

    def _write(self, batches: Iterable[pa.RecordBatch], name: str) -> int:
        """Write a file on this node, then to the folder; return the number of rows."""
        rows, writer = 0, None
        with tempfile.NamedTemporaryFile(prefix="sparkdl-", suffix=".parquet") as file:
            for batch in batches:
                if writer is None:
                    schema = batch.schema.with_metadata({_SCHEMA: self.schema})
                    writer = pq.ParquetWriter(file.name, schema, coerce_timestamps="us")
                writer.write_batch(batch.replace_schema_metadata(writer.schema.metadata))
                rows += batch.num_rows
            if writer is None:
                # a partition without rows is complete, too
                pq.write_table(pa.table({}), file.name)
            else:
                writer.close()
            self.folder.make()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                content: Any = memoryview(whole)
                self.folder.write(name, content)
                content.release()
        return rows

"""Predictions written as Parquet, a file a partition, so that a killed job goes on where it was."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from sparkdl.checkpoint.files import Folder
from sparkdl.data.arrow_tasks import check_unambiguous, content_hash, partition_of
from sparkdl.errors import DataError, ParameterError, shown
from sparkdl.plain import is_whole, plain
from sparkdl.spark.failures import reading_explained

_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
"""The key under which Spark finds the schema that it wrote, with the types of users."""
_PART = re.compile(r"part-(\d{5})-of-(\d{5})-([0-9a-f]{16})-(\d+-[0-9a-f]{16})\.parquet")
"""The name of a file: the partition, their number, the digest of the model, and that of the rows."""
_PATTERN = re.compile(r"[\[\]{}*?\\]")
"""The characters that make a path a pattern for Hadoop; with a backslash before, they do not."""
_HASH = "sparkdl_hash"
"""The column with the hash of a row while it is written."""
_NEW = "_new"
"""The folder in which predictions are written that replace others; Spark does not read it."""
_REPLACING = "predictions-are-being-replaced.json"
"""The file that lists the new predictions while they take the place of others.

Spark takes it for a file of predictions that it cannot read, so nobody reads a mixture.
"""


def write_parts(
    data: DataFrame,
    score: Callable[[DataFrame], DataFrame],
    path: str | os.PathLike[str],
    partitions: int,
    overwrite: bool,
    identity: str,
    reason: str | None,
) -> DataFrame:
    """Write the data with predictions into a folder, except for the partitions that are there.

    A row belongs to a partition by the hash of its content, whatever the cluster, so that the rows
    of finished partitions are left out before anything is computed for them. The name of a file has
    a digest of the rows that it was made from, so that other rows are noticed. ``identity`` is a
    digest of what else the predictions depend on. Rows where the column ``reason``, which ``score``
    adds, is not null are not written. Return the data as read from the folder.
    """
    partitions = plain(partitions)
    if not (is_whole(partitions, 1) and partitions < 10**5):
        raise ParameterError(f"partitions={shown(partitions)}: give a whole number of 1 to 99,999.")
    if data.isStreaming:
        raise DataError(
            "path= is for data with an end, and this is a stream: write the result of predict with "
            "writeStream and its checkpointLocation, which goes on after a failure, too."
        )
    check_unambiguous(data, data.columns)
    folder = Folder.of(path)
    hashed = content_hash(data)
    scored = score(data.repartition(partitions, hashed))
    folder.make()
    _replace(folder)
    finished, others = _finished(folder, partitions, identity, overwrite)
    target = folder
    if others:
        _check_apart(folder, others, data)
        target = folder.folder(_NEW)
        for name in target.entries():  # of a call that was killed
            target.delete(name)
    if finished:
        finished = _complete(folder, data, partitions, finished)
    missing = sorted(set(range(partitions)) - finished.keys())
    if finished and missing:
        rows = data.where(partition_of(data, partitions).isin(missing))
        scored = score(rows.repartition(partitions, hashed))
    schema = scored.drop(*filter(None, [reason])).schema
    if missing:
        task = WritePart(target, partitions, identity, schema.json(), frozenset(finished), reason)
        with reading_explained("writing predictions"):
            written = scored.withColumn(_HASH, hashed).mapInArrow(task, "name string").collect()
        _delete_others(target, {row.name for row in written}, missing)
    if others:
        folder.write(_REPLACING, json.dumps([row.name for row in written]).encode())
        _replace(folder)
    return data.sparkSession.read.schema(schema).parquet(as_read(folder))


def _finished(
    folder: Folder, partitions: int, identity: str, overwrite: bool
) -> tuple[dict[int, re.Match[str]], list[str]]:
    """Return the names of the partitions that are there, and those of other predictions."""
    finished: dict[int, re.Match[str]] = {}
    others = []
    for name in folder.entries():
        found = _PART.fullmatch(name)
        if found is None:
            if name[0] not in "._":  # Spark would read it with the predictions
                raise ParameterError(
                    f'"{folder}" holds something else ("{name}"): give path= a folder of its own.'
                )
        elif (int(found[2]), found[3]) == (partitions, identity) and not overwrite:
            finished[int(found[1])] = found
        elif overwrite:
            others.append(name)
        else:
            raise ParameterError(
                f'"{folder}" holds other predictions ({name}), of another model, other options or '
                "another number of partitions: give another path, or overwrite=True."
            )
    return finished, others


def _check_apart(folder: Folder, names: Sequence[str], data: DataFrame) -> None:
    """Raise ParameterError if ``data`` reads predictions that are to be replaced."""
    if {uri.rpartition("/")[2] for uri in data.inputFiles()} & {*names}:
        raise ParameterError(
            f'overwrite=True would delete what is in "{folder}", and the rows to predict are read '
            "from there: give another path."
        )


def _replace(folder: Folder) -> None:
    """Let new predictions take the place of others, if the list of them is there; go on if killed."""
    if _REPLACING not in (entries := folder.entries()):
        return
    new = folder.folder(_NEW)
    names, waiting = json.loads(folder.read(_REPLACING)), new.entries()
    for name in entries:
        if _PART.fullmatch(name) and (name in waiting or name not in names):
            folder.delete(name)
    for name in waiting:
        if name in names:
            new.move(name, folder)
        else:  # of a task of a call that was killed
            new.delete(name)
    folder.delete(_REPLACING)
    new.delete_empty()


def as_read(folder: Folder) -> str:
    """Return the path by which Spark reads a folder: on this file system, and without patterns."""
    uri = folder.uri if "://" in folder.uri else f"file://{folder.uri}"
    return _PATTERN.sub(r"\\\g<0>", uri)


def _complete(
    folder: Folder, data: DataFrame, partitions: int, finished: Mapping[int, re.Match[str]]
) -> dict[int, re.Match[str]]:
    """Return those finished partitions that have all of their rows, and delete the others.

    A task that Spark ends sees the end of its rows, and leaves a file of those before. Raises
    ParameterError if rows have changed, as where no partition is as it was.
    """
    part = partition_of(data, partitions)
    hashes = data.where(part.isin(list(finished))).select(
        part.alias("part"), content_hash(data).cast("decimal(20,0)").alias("hash")
    )
    totals = functions.count("hash").alias("rows"), functions.sum("hash").alias("total")
    with reading_explained("reading the rows to predict"):
        found = {
            row.part: _digest(row.rows, int(row.total))
            for row in hashes.groupBy("part").agg(*totals).collect()
        }
    digests = {number: found.get(number, _digest(0, 0)) for number in finished}
    complete = {number: name for number, name in finished.items() if name[4] == digests[number]}
    others = {number: name for number, name in finished.items() if number not in complete}
    for number, name in others.items():
        rows = _rows(name[4])
        if rows >= _rows(digests[number]) or (rows and not complete):
            raise ParameterError(
                f'"{folder}" holds predictions of other rows ({name[0]}): the data has changed since, '
                "or differs each time that it is read. Give another path, or overwrite=True."
            )
    for name in others.values():
        folder.delete(name[0])
    return complete


def _delete_others(folder: Folder, written: Collection[str], partitions: Collection[int]) -> None:
    """Delete files of tasks that were made again, where the rows were others the second time."""
    for name in folder.entries():
        found = _PART.fullmatch(name)
        if found and int(found[1]) in partitions and name not in written:
            folder.delete(name)


def _digest(rows: int, total: int) -> str:
    """Return the number of rows, and a digest of them from the sum of their hashes."""
    return f"{rows}-{hashlib.blake2b(f'{rows} {total}'.encode(), digest_size=8).hexdigest()}"


def _rows(digest: str) -> int:
    return int(digest.partition("-")[0])


@dataclass(frozen=True)
class WritePart:
    """A ``mapInArrow`` task that writes one partition, which appears once it is complete.

    It yields the name of the file. A column of the batches has the hash of each row.
    """

    folder: Folder
    partitions: int
    identity: str
    schema: str  # in Spark's JSON
    finished: frozenset[int]  # partitions that are there already
    reason: str | None  # not null in rows that are not written

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        if partition not in self.finished:
            yield pa.RecordBatch.from_pydict({"name": [self._write(batches, partition)]})

    def _write(self, batches: Iterable[pa.RecordBatch], partition: int) -> str:
        """Write a file on this node, then to the folder; return its name."""
        rows, total, writer = 0, 0, None
        with tempfile.NamedTemporaryFile(prefix="sparkdl-", suffix=".parquet") as file:
            for batch in batches:
                rows += batch.num_rows
                total += _sum(batch.column(_HASH).to_numpy())
                batch = self._to_write(batch)
                if writer is None:
                    schema = batch.schema.with_metadata({_SCHEMA: self.schema})
                    writer = pq.ParquetWriter(file.name, schema, coerce_timestamps="us")
                writer.write_batch(batch.replace_schema_metadata(writer.schema.metadata))
            if writer is None:  # a partition without rows is complete, too
                kinds = to_arrow_schema(StructType.fromJson(json.loads(self.schema)))
                pq.write_table(kinds.empty_table(), file.name, coerce_timestamps="us")
            else:
                writer.close()
            place = f"part-{partition:05}-of-{self.partitions:05}"
            name = f"{place}-{self.identity}-{_digest(rows, total)}.parquet"
            self.folder.make()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                content: Any = memoryview(whole)
                self.folder.write(name, content)
                content.release()
        return name

    def _to_write(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows and columns of a batch that are written."""
        if self.reason is not None:
            batch = batch.filter(pc.is_null(batch.column(self.reason)))
        return batch.select([n for n in batch.schema.names if n not in (_HASH, self.reason)])


def _sum(hashes: np.ndarray) -> int:
    """Return the exact sum of 64-bit hashes."""
    high, low = hashes >> 32, hashes & 0xFFFFFFFF
    return (int(high.sum()) << 32) + int(low.sum())

"""Samples of an RDD: tasks that turn Python objects into arrays and check every one."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.data.columns.base import Specs
from sparkdl.data.fields import Field, with_fields
from sparkdl.data.partition_writer import PART_BYTES, PartitionWriter
from sparkdl.data.records import (
    Names,
    check_alike,
    named,
    record_field,
    record_weight,
    split_record,
    stack_records,
)
from sparkdl.data.row_errors import AS_ERRORS, Handling, InvalidRow, RowError
from sparkdl.data.sampling import Sampling
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.worker import finish_task

_RDD_BATCH = 1024
_PAIRS = Names(("features",), ("label",))


@dataclass(frozen=True)
class WriteRecords:
    """A task that writes one partition of an RDD into slabs and yields its handle.

    The records are ``(features, label)`` pairs, :class:`Sample` objects, or records with names.
    """

    config: SlabConfig
    labelled: bool
    float_dtype: str
    specs: Specs | None = None
    weighted: bool = False
    fields: Sequence[Field] = ()
    names: Names = _PAIRS
    sampling: Sampling | None = None
    handling: Handling = AS_ERRORS

    def __call__(self, partition: int, records: Iterable[Any]) -> Iterator[bytes]:
        writer = PartitionWriter(self.config, weighted=self.weighted)
        names: list[str] = []
        labels: list[int] = []
        waiting: list[list[np.ndarray]] = []
        nbytes = 0  # bytes of the waiting records
        try:
            for record in records:
                row = writer.rows_read + len(waiting)
                try:
                    parts = self._parts(record, row)
                except RowError as error:
                    if self.handling.way == "error":
                        raise
                    key = self.names.key_of(record, self.handling.key)
                    problem = InvalidRow(key, error.problem.column, error.problem.text, row)
                    writer.note_invalid([problem], left_out=True)
                    continue
                if not names:
                    names = [name for name, _ in parts]
                    labels = [i for i, name in enumerate(names) if name.startswith("label")]
                check_alike(parts, waiting, row, self.specs, names)
                waiting.append([value for _, value in parts])
                nbytes += sum(value.nbytes for _, value in parts)
                if len(waiting) == _RDD_BATCH or nbytes >= PART_BYTES:
                    writer.add(names, stack_records(names, waiting, self.specs), labels=labels)
                    waiting, nbytes = [], 0
            if waiting:
                writer.add(names, stack_records(names, waiting, self.specs), labels=labels)
            handle = writer.finish()
        except RowError as error:
            handle = writer.fail(error.problem)
        yield pickle.dumps(handle)
        finish_task()

    def _parts(self, record: Any, row: int) -> list[tuple[str, np.ndarray]]:
        given = record
        record = self.names.sample(record, row, 0 if self.labelled else None)
        features, label = split_record(record, self.labelled, row)
        features = self.names.in_order(features, row)
        values = [*named("features", features), *(named("label", label) if self.labelled else ())]
        parts = [
            (name, record_field(value, name, row, self.float_dtype, self.specs, field))
            for (name, value), field in with_fields(values, self.fields)
        ]
        if self.sampling is not None:
            value = self.names.value(self.sampling.column, given, label, row)
            array = self.sampling.spec.from_record(value, "sampling", row, self.float_dtype)
            parts.append(("sampling", array))
        if self.weighted:
            parts.append(("weight", record_weight(record, row, self.float_dtype)))
        return parts

    def content_hash(self, record: Any) -> int:
        """Return the CRC-32 of the record's numbers.

        A hash of its pickle would not do, because the pickle of a tensor holds an address.
        """
        try:
            values = [value for _, value in self._parts(record, 0)]
        except RowError:
            return 0  # reported by the task that writes the record
        crc = 0
        for value in values:
            crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
        return crc

"""Samples of an RDD: Python objects as arrays, the names of their values, and tasks that write them."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sparkdl.data.columns.base import Specs, padding_of
from sparkdl.data.columns.convert import as_array, described
from sparkdl.data.columns.numeric import weight_array
from sparkdl.data.fields import Field, dtype_as, with_fields
from sparkdl.data.partition_writer import PART_BYTES, PartitionWriter
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import (
    AS_ERRORS,
    MEND_RECORDS,
    SAME_SHAPE,
    SAME_TYPE,
    Handling,
    InvalidRow,
    RowError,
)
from sparkdl.data.sampling import Sampling
from sparkdl.errors import kind_of
from sparkdl.slab.root import SlabConfig


@dataclass(frozen=True)
class Sample:
    """A training sample of an RDD.

    Attributes:
        features: A number, an array-like, a tensor, or a tuple of these for a model with several
            inputs.
        label: Like ``features``, or None.
        weight: How much the sample counts, if the trainer is given a weight.
    """

    features: Any
    label: Any = None
    weight: float | None = None


@dataclass(frozen=True)
class Names:
    """The names that a trainer gives to features, labels and weight.

    A record whose values have names of their own (a Row, a named tuple, a mapping) is read by name,
    never by position.
    """

    features: tuple[str, ...]
    label: tuple[str, ...] = ()
    weight: str | None = None
    inputs: tuple[str, ...] = ()
    """The keywords by which the model takes the features, if it does; a record may use them too."""

    def in_order(self, features: Any, row: int) -> Any:
        """Return the features of a record; a mapping by keyword is put in the order of the keywords."""
        if not self.inputs or not isinstance(features, Mapping):
            return features
        missing = [name for name in self.inputs if name not in features]
        if missing:
            text = f"is {kind_of(features)} of {', '.join(map(str, features)) or 'nothing'}"
            raise RowError("features", row, f"{text}, and lacks {', '.join(missing)}", MEND_RECORDS)
        found = tuple(features[name] for name in self.inputs)
        return found[0] if len(found) == 1 else found

    @staticmethod
    def key_of(record: Any, name: str | None) -> str | None:
        """Return the key of a record whose values have names; None if it has none."""
        key = None if name is None else (_named_values(record) or {}).get(name)
        return None if key is None else str(key)

    def sample(self, record: Any, row: int, bare: int | None = 0) -> Any:
        """Return the :class:`Sample` of a record with these names, and nameless records unchanged.

        One of ``bare`` values (None: any number) under other names is the features alone, in order.
        """
        values = _named_values(record)
        if values is None:
            return record
        weight = () if self.weight is None else (self.weight,)
        missing = [name for name in (*self.features, *self.label, *weight) if name not in values]
        if not missing:
            features, label = ([values[n] for n in names] for names in (self.features, self.label))
            return Sample(
                features[0] if len(features) == 1 else tuple(features),
                (label[0] if len(label) == 1 else tuple(label)) if label else None,
                values[self.weight] if self.weight is not None else None,
            )
        if bare is None or bare == len(values):
            return record
        raise RowError(
            "record",
            row,
            f"is {kind_of(record)} of {', '.join(map(str, values))}, which has no "
            f"{', '.join(missing)}",
            "Records with named values are read by name: give the trainer these names, as "
            "Trainer(features=..., label=...), or make (features, label) pairs with rdd.map.",
        )

    def value(self, name: str, record: Any, label: Any, row: int) -> Any:
        """Return one value of a record as it was given: by name, or the ``label`` that it has."""
        values = _named_values(record) or {}
        if name in values:
            return values[name]
        if name in self.label:
            return label[self.label.index(name)] if len(self.label) > 1 else label
        raise RowError(
            "record",
            row,
            f'has no value "{name}" to draw rows by',
            "Give records whose values have names, such as Row, or draw by the label.",
        )


def _named_values(record: Any) -> Mapping[Any, Any] | None:
    """Return the values of a record by name, or None if it has no names."""
    if isinstance(record, Mapping):
        return record
    names = getattr(record, "__fields__", None) or getattr(record, "_fields", None)
    if isinstance(record, tuple) and names and len(names) == len(record):
        return dict(zip(names, record, strict=True))
    return None


def split_record(record: Any, labelled: bool, row: int) -> tuple[Any, Any]:
    """Return (features, label) of an RDD's record; if not ``labelled``, a value may be bare."""
    if isinstance(record, Sample):
        if labelled and record.label is None:
            raise RowError(
                "label", row, "is None", "Give Sample(features, label), or train with label=None."
            )
        return record.features, record.label if labelled else None
    if not labelled:
        return record, None
    if isinstance(record, tuple) and len(record) == 2:
        return record
    size = f" of {len(record)}" if isinstance(record, tuple) else ""
    raise RowError(
        "record",
        row,
        f"is {kind_of(record)}{size}",
        "Give (features, label) pairs or sparkdl.Sample(features, label).",
    )


def named(role: str, value: Any) -> list[tuple[str, Any]]:
    """Return a record's features or label as named parts: "features", or "features[0]", ..."""
    values = value if isinstance(value, tuple) else (value,)
    return [(role if len(values) == 1 else f"{role}[{i}]", v) for i, v in enumerate(values)]


def feature_names(count: int) -> list[str]:
    """Return the names of ``count`` features of a record, see :func:`named`."""
    return [name for name, _ in named("features", (None,) * count)]


def record_field(
    value: Any,
    name: str,
    row: int,
    float_dtype: str,
    specs: Specs | None = None,
    field: Field | None = None,
) -> np.ndarray:
    """Return a sample's value as the array of a field; integers become floats as in ``field``."""
    spec = (specs or {}).get(name)
    if spec is None:
        array = as_array(value, name, row, float_dtype)
    else:
        array = spec.from_record(value, name, row, float_dtype)
    return array.astype(dtype_as(array.dtype.name, field), copy=False)


def record_weight(record: Any, row: int, float_dtype: str) -> np.ndarray:
    """Return the weight of a :class:`Sample`, shape ()."""
    weight = record.weight if isinstance(record, Sample) else None
    if weight is None:
        text = "is None" if isinstance(record, Sample) else "is missing"
        raise RowError(
            "weight", row, text, "Give Sample(features, label, weight), or train with weight=None."
        )
    return weight_array(weight, "weight", row, float_dtype)


Parts: TypeAlias = list[tuple[str, np.ndarray]]
"""The fields of a record, with their names."""


def stack_records(
    records: Sequence[tuple[int, Parts]], names: list[str], specs: Specs | None = None
) -> list[Rows]:
    """Return the rows of each field of records, which come with their numbers and must be alike.

    ``names`` are those of the very first record, and are set to them if there are none yet.
    """
    first_row, first = records[0]
    names += [] if names else [name for name, _ in first]
    for row, parts in records:
        found = [name for name, _ in parts]
        if found != names:
            text = f"has {', '.join(found)} where row 0 has {', '.join(names)}"
            raise RowError(names[0], row, text, SAME_SHAPE)
        for (name, value), (_, wanted) in zip(parts, first, strict=True):
            varying = int(padding_of(specs, name) is not None)  # the first length may differ
            same_shape = value.shape[varying:] == wanted.shape[varying:]
            if not same_shape or value.dtype != wanted.dtype:
                text = f"is {described(value)} where row {first_row} is {described(wanted)}"
                raise RowError(name, row, text, SAME_TYPE if same_shape else SAME_SHAPE)
    stacked: list[Rows] = []
    for name, values in zip(names, zip(*(parts for _, parts in records), strict=True), strict=True):
        padding, arrays = padding_of(specs, name), [value for _, value in values]
        stacked.append(np.stack(arrays) if padding is None else Ragged.of(arrays, padding))
    return stacked


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
        yield pickle.dumps(writer.filled(lambda: self._write(records, writer)))

    def _write(self, records: Iterable[Any], writer: PartitionWriter) -> None:
        names: list[str] = []
        waiting: list[tuple[int, Parts]] = []
        nbytes = 0  # bytes of the waiting records

        def add() -> None:
            columns = stack_records(waiting, names, self.specs)
            labels = [i for i, name in enumerate(names) if name.startswith("label")]
            writer.add(names, columns, labels=labels)

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
            waiting.append((row, parts))
            nbytes += sum(value.nbytes for _, value in parts)
            if len(waiting) == _RDD_BATCH or nbytes >= PART_BYTES:
                add()
                waiting, nbytes = [], 0
        if waiting:
            add()

    def _parts(self, record: Any, row: int) -> Parts:
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

"""Samples of an RDD: Python objects as arrays, and the names of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.data.columns.base import Specs, padding_of
from sparkdl.data.columns.convert import as_array
from sparkdl.data.columns.numeric import check_weights
from sparkdl.data.fields import Field, dtype_as
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import MEND_RECORDS, SAME_SHAPE, SAME_TYPE, RowError
from sparkdl.errors import kind_of


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


def check_alike(
    parts: Sequence[tuple[str, np.ndarray]],
    before: Sequence[Sequence[np.ndarray]],
    row: int,
    specs: Specs | None,
    names: Sequence[str] = (),
) -> None:
    """Raise :class:`RowError` if the fields of a record differ from those directly ``before`` it.

    ``names`` are those of the very first record; () if they follow from their number.
    """
    found = [name for name, _ in parts]
    if (names and found != list(names)) or (before and len(found) != len(before[0])):
        wanted = list(names) or feature_names(len(before[0]))
        text = f"has {', '.join(found)} where row 0 has {', '.join(wanted)}"
        raise RowError(wanted[0], row, text, SAME_SHAPE)
    first_row = row - len(before)
    for (name, value), first in zip(parts, before[0] if before else (), strict=False):
        varying = int(padding_of(specs, name) is not None)  # the first length may differ
        same_shape = value.shape[varying:] == first.shape[varying:]
        if not same_shape or value.dtype != first.dtype:
            raise RowError(
                name,
                row,
                f"is {value.dtype}{list(value.shape)} where row {first_row} is "
                f"{first.dtype}{list(first.shape)}",
                SAME_TYPE if same_shape else SAME_SHAPE,
            )


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


def record_array(value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
    """Return a sample's value as an array, see :func:`as_array`."""
    return as_array(value, name, row, float_dtype, MEND_RECORDS)


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
        array = record_array(value, name, row, float_dtype)
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
    array = record_array(weight, "weight", row, float_dtype)
    if array.ndim or array.dtype.kind == "b":
        raise RowError("weight", row, f"is {weight!r}, not one number", MEND_RECORDS)
    array = array.astype(float_dtype)
    check_weights(array.reshape(1), "weight", row)
    return array


def stack_records(
    names: Sequence[str], records: Sequence[Sequence[np.ndarray]], specs: Specs | None = None
) -> list[Rows]:
    """Stack the values of several records into the rows of each field."""
    stacked: list[Rows] = []
    for name, values in zip(names, zip(*records, strict=True), strict=True):
        padding = padding_of(specs, name)
        stacked.append(np.stack(values) if padding is None else Ragged.of(values, padding))
    return stacked

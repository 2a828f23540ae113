"""The identity of a run in its checkpoints: the model's layout and the data, and how they differ
from others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.data.fields import SampleHandle
from sparkdl.errors import counted
from sparkdl.model.flat import Layout

FEW = 5
"""The number of differences that are listed; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class TensorIdentity:
    """A tensor of the flat vector: its name, kind, shape and dtype (without ``torch.``)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f'{"parameter" if self.kind == "parameter" else "buffer"} "{self.name}"'


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The tensors of a model in the order of the flat vector, and the flat vector's dtype."""

    dtype: str
    tensors: tuple[TensorIdentity, ...]

    @staticmethod
    def of(layout: Layout) -> ModelIdentity:
        """Return the identity of a model with this layout."""
        return ModelIdentity(
            dtype=_plain(layout.dtype),
            tensors=tuple(
                TensorIdentity(
                    name=s.name, kind=s.kind, shape=tuple(s.shape), dtype=_plain(s.dtype)
                )
                for s in layout.segments
            ),
        )

    def differences(self, stored: ModelIdentity, where: str = "the checkpoint") -> Iterator[str]:
        """Yield a phrase for each difference of this model from the one ``stored`` in ``where``."""
        here, there = ({t.name: t for t in m.tensors} for m in (self, stored))
        for name, one in here.items():
            other = there.get(name)
            if other is None:
                yield f"{one} is not in {where}"
            elif one.shape != other.shape:
                yield f"{one} is {list(one.shape)} here and {list(other.shape)} in {where}"
            elif one.dtype != other.dtype:
                yield f"{one} is {one.dtype} here and {other.dtype} in {where}"
            elif one.kind != other.kind:
                yield f'{one} is of kind "{one.kind}" here and "{other.kind}" in {where}'
        for name, other in there.items():
            if name not in here:
                yield f"{other} of {where} is not in this model"
        if self.dtype != stored.dtype:
            yield f"the model trains in {self.dtype} here and in {stored.dtype} in {where}"
        if list(here) != list(there) and set(here) == set(there):
            i = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
            one, other = self.tensors[i], stored.tensors[i]
            yield f"tensor {i} is {one} here and {other} in {where}: the order differs"


@dataclass(frozen=True, kw_only=True)
class FieldIdentity:
    """An input or label of a sample: name, NumPy dtype, shape without the rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.shape else self.dtype


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The training data: its fields, and for each of the M partitions its rows and their checksum."""

    rows: tuple[int, ...]
    checksums: tuple[int, ...]
    fields: tuple[FieldIdentity, ...]

    @staticmethod
    def of(handles: Sequence[SampleHandle]) -> DataIdentity:
        """Return the identity of partitions; the fields are those of the first partition that has
        rows."""
        fields = next((h.fields for h in handles if h.num_rows), ())
        return DataIdentity(
            rows=tuple(int(h.num_rows) for h in handles),
            checksums=tuple(int(h.checksum) for h in handles),
            fields=tuple(
                FieldIdentity(name=f.name, dtype=f.dtype, shape=tuple(f.shape)) for f in fields
            ),
        )

    def differences(self, stored: DataIdentity) -> Iterator[str]:
        """Yield a phrase for each difference of this data from that ``stored`` in a checkpoint."""
        here, there = ({f.name: f for f in d.fields} for d in (self, stored))
        for name, one in here.items():
            if name not in there:
                yield f'the field "{name}" is not in the checkpoint'
            elif one != there[name]:
                yield f'the field "{name}" is {one} here and {there[name]} in the checkpoint'
        for name in there:
            if name not in here:
                yield f'the field "{name}" of the checkpoint is not in this data'
        if list(here) != list(there) and set(here) == set(there):
            yield f"the fields are {_listed(here)} here and {_listed(there)} in the checkpoint"
        total, before = sum(self.rows), sum(stored.rows)
        if total != before:
            yield f"the data has {total:,} rows here and {before:,} in the checkpoint"
        elif len(self.rows) != len(stored.rows):
            yield (
                f"the data is in {counted(len(self.rows), 'partition')} here and in "
                f"{len(stored.rows)} in the checkpoint"
            )
        else:
            if self.rows != stored.rows:
                yield (
                    "the number of rows is that of the checkpoint, but they are divided "
                    "differently (an RDD with as many partitions as replicas keeps its partitions: "
                    "divide it as before)"
                )
            for i, (rows, old) in enumerate(zip(self.rows, stored.rows, strict=True)):
                if rows != old:
                    yield f"partition {i} has {rows:,} rows here and {old:,} in the checkpoint"
                elif self.checksums[i] != stored.checksums[i]:
                    yield (
                        f"partition {i} holds other rows than in the checkpoint (the checksums "
                        "differ)"
                    )


def consistency_text(text: str) -> str:
    """Return the description of a consistency model without the options that are None.

    So a model that gets an option more, None by default, is still that of older checkpoints.
    """
    return re.sub(r", \w+=None\b|\b\w+=None(, |(?=\)))", "", text)


def constant_differences(here: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each constant of a run (``batch_size``, ``seed``, ...) that differs."""
    for name, value in here.items():
        if value != stored[name]:
            yield f"{name} is {value!r} here and {stored[name]!r} in the checkpoint"


def first_few(phrases: Iterator[str]) -> list[str]:
    """Return at most :data:`FEW` phrases, and then a phrase with the number of the others."""
    few = list(itertools.islice(phrases, FEW))
    more = sum(1 for _ in phrases)
    return [*few, f"and {more:,} more"] if more else few


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")

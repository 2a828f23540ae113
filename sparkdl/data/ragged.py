"""Rows of varying length in memory: one array of values and the offsets at which rows begin.

Rows stay ragged from the column to the mini-batch, and are padded only there, to its longest row. The
layout is that of Arrow's list arrays: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``. Where rows
are lists of lists of varying length, ``values`` are ragged rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Padding:
    """A rule that makes one tensor of rows of varying length."""

    value: float = 0
    """The value that fills up shorter rows."""
    length: int | None = None
    """Always pad to this length; None: pad to the longest row of the mini-batch."""
    lengths: bool = False
    """Also give the model the lengths, int64 of shape (rows,), directly after the padded input."""
    mask: bool = False
    """Also give the model a mask after these, int64 of the shape of the padded input: 1 where there is
    a value, 0 where there is padding."""
    side: str = "right"
    """The side of the padding, "left" or "right"."""
    types: bool = False
    """Also give the model the types of the elements after these, of the shape of the padded input. Then
    the last dimension of an item holds a value and its type."""
    windows: bool = False
    """An item is a window of elements. The last dimension of an item also tells, last, where the window
    has none, and the mask is that of the elements."""
    items: Padding | None = None
    """The padding of the items of a row, if they vary in length, too."""
    entries_of: int | None = None
    """Rows are the entries, (index, value), of vectors of this size."""
    form: str = ""
    """The form in which the model gets such vectors."""

    def names(self, name: str) -> list[str]:
        """Return the names of the model's inputs that are made of the input ``name``.

        The mask of ``input_ids`` is ``attention_mask``, as in transformers; of another input ``NAME``
        it is ``NAME_mask``. The types of ``input_ids`` are ``token_type_ids``.
        """
        others = {}
        if name.endswith("input_ids"):
            before = name.removesuffix("input_ids")
            others = {"mask": f"{before}attention_mask", "types": f"{before}token_type_ids"}
        values = [f"{name}_values"] if self.form == "indices" else []
        return [name, *values, *(others.get(kind, f"{name}_{kind}") for kind in self.extras)]

    @property
    def extras(self) -> list[str]:
        """The kinds of inputs that follow the padded one, in their order."""
        return [kind for kind in ("lengths", "mask", "types") if getattr(self, kind)]


@dataclass(frozen=True)
class Ragged:
    """Rows of shape (length, *item): ``values`` (total, *item) and ``offsets`` (rows + 1,), int64.

    ``values`` may hold more than the rows: offsets need not begin at 0.
    """

    values: np.ndarray | Ragged
    offsets: np.ndarray
    padding: Padding = field(default_factory=Padding)

    @staticmethod
    def of(rows: Sequence[Rows], padding: Padding | None = None) -> Ragged:
        """Make ragged rows from at least one array of shape (length, *item), or ragged rows."""
        offsets, padding = np.cumsum([0, *map(len, rows)], dtype=np.int64), padding or Padding()
        values = concatenate(rows)
        if isinstance(values, Ragged) and padding.items is not None:
            values = replace(values, padding=padding.items)
        return Ragged(values, offsets, padding)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice | np.ndarray) -> Ragged:
        """Return some of the rows: a contiguous slice is a view, anything else is a gathered copy."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                part = self.offsets[start : max(start, stop) + 1]
                return Ragged(self.values, part, self.padding)
            rows = np.arange(start, stop, step)
        chosen = np.asarray(rows)
        starts = self.offsets[chosen]
        lengths = self.offsets[chosen + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[places], offsets, self.padding)

    def __iter__(self) -> Iterator[Any]:
        for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            yield self.values[start:stop]

    def tolist(self) -> list[Any]:
        """Return the rows as lists."""
        return [row.tolist() for row in self]

    @property
    def lengths(self) -> np.ndarray:
        """Return the length of each row (int64)."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows and their offsets."""
        return int(self.used.nbytes + self.offsets.nbytes)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Return the shape of an item of the innermost lists."""
        values = self.values
        return values.item_shape if isinstance(values, Ragged) else values.shape[1:]

    @property
    def used(self) -> np.ndarray | Ragged:
        """Return the part of ``values`` that holds the rows."""
        return self.values[int(self.offsets[0]) : int(self.offsets[-1])]

    @property
    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of all rows, and the offsets at which each row begins in them."""
        values, offsets = self.used, self.offsets - self.offsets[0]
        while isinstance(values, Ragged):
            offsets = (values.offsets - values.offsets[0])[offsets]
            values = values.used
        return values, offsets

    def cut(self, length: int) -> Ragged:
        """Return the rows, each cut to at most ``length`` elements."""
        lengths = np.minimum(self.lengths, length)
        if (lengths == self.lengths).all():
            return self
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1] - offsets[:-1], lengths)
        return Ragged(self.values[places], offsets, self.padding)

    def padded(self, length: int | None = None) -> np.ndarray:
        """Return a new array of shape (rows, longest, *item).

        Rows are padded to ``length`` or to the padding's length, if either is given; longer rows are
        cut.
        """
        values = self.values
        if isinstance(values, Ragged):
            return Ragged(values.padded(), self.offsets, self.padding).padded(length)
        length = length or self.padding.length
        longest = longest_of(self.lengths) if length is None else length
        shape = (len(self), longest, *values.shape[1:])
        result = np.full(shape, self.padding.value, dtype=self.dtype)
        left = self.padding.side == "left"
        for out, row in zip(result, self, strict=True):
            begin = max(0, longest - len(row)) if left else 0
            out[begin : begin + len(row)] = row[:longest]
        return result

    def present(self, width: int) -> np.ndarray:
        """Return where rows padded to ``width`` have values, bool of shape (rows, width)."""
        lengths, places = np.minimum(self.lengths, width)[:, None], np.arange(width)
        return places >= width - lengths if self.padding.side == "left" else places < lengths

    def inputs(self) -> list[np.ndarray]:
        """Return the model's inputs: the padded rows and, if requested, their lengths and mask."""
        padded, lengths = self.padded(), self.lengths
        if self.padding.length is not None:
            lengths = np.minimum(lengths, self.padding.length)
        rule = self.padding
        if isinstance(self.values, Ragged):
            masks = [self.mask(padded.shape[1:])] if rule.mask else []
            return [padded, *([lengths] if rule.lengths else []), *masks]
        present = self.present(padded.shape[1])
        parts = [padded]
        if rule.types or rule.windows:
            there = present.reshape(*present.shape, *(1 for _ in padded.shape[2:-1]))
            values, *others = np.moveaxis(padded, -1, 0)
            if rule.windows:
                present = there & (others.pop() == 0)
            parts = [np.ascontiguousarray(values), *(other * there for other in others)]
        inputs = [parts[0], *([lengths] if rule.lengths else [])]
        if rule.mask:
            inputs.append(present.astype(np.int64))
        return inputs + parts[1:]

    def mask(self, widths: tuple[int, ...]) -> np.ndarray:
        """Return where rows padded to ``widths`` have values, int64."""
        if not isinstance(self.values, Ragged):
            return self.present(widths[0]).astype(np.int64)
        rule = Padding(length=widths[0], side=self.padding.side)
        return Ragged(self.values.mask(widths[1:]), self.offsets, rule).padded()


Rows: TypeAlias = np.ndarray | Ragged
"""Some rows of one field: an array of shape (rows, *shape), or rows of varying length."""


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all ``parts``, which are of one kind, one after another."""
    first = parts[0]
    if not isinstance(first, Ragged):
        return np.concatenate(parts) if len(parts) > 1 else first  # type: ignore[arg-type]
    ragged = [part for part in parts if isinstance(part, Ragged)]
    lengths = np.concatenate([part.lengths for part in ragged])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(concatenate([part.used for part in ragged]), offsets, first.padding)


def longest_of(lengths: np.ndarray) -> int:
    """Return the length that rows are padded to: at least 1, since many modules take no other."""
    return int(lengths.max(initial=min(1, len(lengths))))


def model_inputs(fields: Sequence[Rows]) -> list[np.ndarray]:
    """Return the model's arguments: ragged fields are padded, with lengths and masks if requested."""
    result: list[np.ndarray] = []
    for rows in fields:
        result += rows.inputs() if isinstance(rows, Ragged) else [rows]
    return result


def dense(fields: Sequence[Rows]) -> list[np.ndarray]:
    """Return one array a field, ragged fields padded and without their lengths (for labels)."""
    return [rows.padded() if isinstance(rows, Ragged) else rows for rows in fields]


@dataclass(frozen=True)
class RowLengths:
    """The lengths of the rows of an array padded to the longest, and the side of the padding."""

    lengths: np.ndarray
    left: bool = False

    def of_rows(self, rows: slice | np.ndarray) -> RowLengths:
        """Return those of some rows."""
        return RowLengths(self.lengths[rows], self.left)

    def places(self, width: int) -> slice:
        """Return the places, among ``width``, to which the longest row reaches."""
        longest = longest_of(self.lengths)
        return slice(max(0, width - longest), None) if self.left else slice(longest)


def padded_lengths(fields: Sequence[Rows], labels: bool = False) -> list[RowLengths | None]:
    """Return the lengths for each of :func:`model_inputs`, or :func:`dense` if the fields are labels.

    They are None for an array without padding, and for one that is always padded to one length.
    """
    found: list[RowLengths | None] = []
    for rows in fields:
        own, rule = None, rows.padding if isinstance(rows, Ragged) else None
        if isinstance(rows, Ragged) and rows.padding.length is None:
            own = RowLengths(rows.lengths, rows.padding.side == "left")
        found.append(own)
        if rule is not None and not labels:
            found += [None if kind == "lengths" else own for kind in rule.extras]
    return found

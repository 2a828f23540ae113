"""Sampling: the rows of an epoch are drawn, balanced over the values of a column or by a weight.

Rows stay where they are: each replica draws from its own, as many as are its share. The draw is a pure
function of (seed, epoch, replica) and of the rows in canonical order, so it is the same on every engine
and after every fault. Drawing without replacement by weight is the exponential race of Efraimidis and
Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97, 2006.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column, ColumnSpec, DataType, check_values
from sparkdl.data.columns.numeric import to_numpy, weight_array, weight_column
from sparkdl.data.epoch import apportion, generator
from sparkdl.data.fields import Field, SampleHandle
from sparkdl.data.partition_reader import MappedPartition, open_partition
from sparkdl.data.ragged import Rows
from sparkdl.data.row_errors import MEND_RECORDS, RowError, drop, refuse_nulls
from sparkdl.errors import DataError
from sparkdl.plain import is_whole, make_plain

MOST_VALUES = 4096
"""The most different values that rows can be balanced over."""
SCALE = float(1 << 52)
"""Weights are compared as whole numbers, of which the largest share has this."""
FINE = 44
"""The last bits of a weight in float64 by which weights are not told apart where they are counted."""
HALF = 1 << FINE - 1


@dataclass(frozen=True)
class Draws:
    """How many rows each replica draws in an epoch, and how."""

    field: int  # the number of the field that decides
    counts: tuple[int, ...]
    replacement: bool
    quotas: bytes = b""
    """For :class:`Balanced`, int64 of shape (1 + replicas, values): the values, and for each replica
    how many rows of each it draws."""

    def order(self, partition: MappedPartition, seed: int, epoch: int, replica: int) -> np.ndarray:
        """Return the numbers of the rows that ``replica`` draws from its partition, in order (int64).

        The copy k of row i, counted from 0, has the number i + k * rows, which has random draws of
        its own in ``augment``.
        """
        values = partition.values(self.field)
        assert isinstance(values, np.ndarray)
        if not self.counts[replica]:
            return np.zeros(0, np.int64)
        rng = generator(seed, "draw", epoch, replica)
        draw = self._balanced if self.quotas else self._weighted
        return _numbered(draw(rng, values, replica), len(values))

    def _balanced(self, rng: np.random.Generator, values: np.ndarray, replica: int) -> np.ndarray:
        table = np.frombuffer(self.quotas, np.int64).reshape(1 + len(self.counts), -1)
        by_value = np.argsort(values, kind="stable")
        ends = np.searchsorted(values[by_value], table[0], side="right")
        starts = np.searchsorted(values[by_value], table[0])
        chosen = []
        for start, end, quota in zip(starts, ends, table[1 + replica].tolist(), strict=True):
            rows = by_value[start:end]
            if self.replacement and quota:
                chosen.append(rows[rng.integers(len(rows), size=quota)])
            elif quota:
                chosen.append(rng.permutation(rows)[:quota])
        return rng.permutation(np.concatenate(chosen))

    def _weighted(self, rng: np.random.Generator, weights: np.ndarray, replica: int) -> np.ndarray:
        count = self.counts[replica]
        if not self.replacement:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.argsort(rng.exponential(size=len(weights)) / weights, kind="stable")[
                    :count
                ]
        ends = np.cumsum(weights)
        places = np.searchsorted(ends, rng.random(count) * ends[-1], side="right")
        return np.minimum(places, np.flatnonzero(weights)[-1])  # where a product was rounded up


def _numbered(rows: np.ndarray, count: int) -> np.ndarray:
    """Return the number of each row in its order, of which copies of a row have different ones."""
    by_row = np.argsort(rows, kind="stable")
    ranked = rows[by_row]
    firsts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    copies = np.arange(len(rows)) - np.repeat(firsts, np.diff([*firsts, len(rows)]))
    numbers = np.empty(len(rows), np.int64)
    numbers[by_row] = ranked + count * copies
    return numbers


@dataclass(frozen=True)
class Tally:
    """The values of a field and how often each occurs, which :meth:`read` counts in a partition."""

    field: int
    weights: bool = False
    """Count those above 0 alone; before them come the sum of all and the number of rows."""

    def read(self, partition: int, handle: SampleHandle) -> tuple[np.ndarray, np.ndarray]:
        """Return the tally of one partition, which is on this node."""
        values: Any = np.zeros(0, np.float64 if self.weights else np.int64)
        if handle.num_rows:
            values = open_partition(handle).values(self.field)
        return self.of(values)

    def of(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tally of the values of a partition."""
        if self.weights:
            bits = np.array(values[values > 0], np.float64).view(np.int64)
            middles, counts = np.unique((bits >> FINE << FINE) + HALF, return_counts=True)
            total = values.sum(dtype=np.float64)
            return np.array([total, *middles.view(np.float64)]), np.array([len(values), *counts])
        found, counts = np.unique(values, return_counts=True)
        return found[: MOST_VALUES + 1], counts[: MOST_VALUES + 1]


Tallies = Sequence[tuple[np.ndarray, np.ndarray]]


def counts_of(tallies: Tallies) -> tuple[np.ndarray, np.ndarray]:
    """Return all values, ascending, and the rows of each by partition, (partitions, values)."""
    values = np.unique(np.concatenate([found for found, _ in tallies]))
    counts = np.zeros((len(tallies), len(values)), np.int64)
    for row, (found, numbers) in zip(counts, tallies, strict=True):
        row[np.searchsorted(values, found)] = numbers
    return values, counts


class _Key(ColumnSpec):
    """The value of a column as a whole number: itself, or a hash of what is none."""

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        if data_type.typeName() in ("array", "map", "struct", "udt", "variant"):
            return f"is of type {data_type.simpleString()}: balance over numbers or text."
        return Column(name, "int64", spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> np.ndarray:
        refuse_nulls(array, column.name, first_row)
        if pa.types.is_floating(array.type):
            nan = np.flatnonzero(np.isnan(array.to_numpy(zero_copy_only=False)))
            if len(nan):
                raise RowError(column.name, first_row + int(nan[0]), "is NaN", drop(column.name))
        encoded = array.dictionary_encode()
        keys = np.array([_key(value) for value in encoded.dictionary.to_pylist()], np.int64)
        return keys[encoded.indices.to_numpy()]

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        value = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
        if value is None or isinstance(value, (list, tuple, dict)) or np.ndim(value):
            raise RowError(name, row, f"is {value!r}, not a number or text", MEND_RECORDS)
        return np.array(_key(value), np.int64)


def _key(value: Any) -> int:
    if isinstance(value, int):
        return int(value)
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class _Weight(ColumnSpec):
    """A weight to draw by, in float64."""

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        column = weight_column(name, data_type, "float64", None)
        return column if isinstance(column, str) else Column(name, "float64", spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> Rows:
        return to_numpy(array, Column(column.name, "float64", weight=True), first_row)

    def from_record(self, value: Any, name: str, row: int, float_dtype: str) -> np.ndarray:
        return weight_array(value, name, row, "float64")


@dataclass(frozen=True)
class Sampling(ABC):
    """The base of what ``Trainer(sampling=...)`` takes."""

    spec: ClassVar[ColumnSpec]
    """How the column is read."""
    column: str
    """The column that decides; the model does not get it unless it is a feature, too."""
    replacement: bool = True
    """Draw each time from all rows. False: no row is drawn twice in an epoch."""
    rows: int | None = None
    """The rows of an epoch; None: as many as the data has."""

    def __post_init__(self) -> None:
        make_plain(self)
        rows = self.rows is None or is_whole(self.rows, 1)
        check_values(
            self,
            ("column: give the name of a column.", isinstance(self.column, str) and self.column),
            ("rows: give a whole number of at least 1, or None.", rows),
        )

    def tally(self, field: int) -> Tally:
        """Return the task that counts what :meth:`draws` needs."""
        return Tally(field, isinstance(self.spec, _Weight))

    @abstractmethod
    def draws(self, field: int, tallies: Tallies) -> Draws:
        """Return how the replicas draw. Raises DataError."""


@dataclass(frozen=True)
class Balanced(Sampling):
    """``sampling=sparkdl.Balanced("label")``: each value of a column has the same share of an epoch.

    The column holds numbers or text. With replacement, rows of rare values are drawn several times,
    and others are left out. Without it, each value has as many rows as the rarest one, which are
    drawn anew in each epoch; ``rows`` can make them fewer.
    """

    spec = _Key()

    def draws(self, field: int, tallies: Tallies) -> Draws:
        values, counts = counts_of(tallies)
        if len(values) > MOST_VALUES:
            raise DataError(
                f'sampling=Balanced("{self.column}"): the column has more than {MOST_VALUES:,} values. '
                "Balance over classes or groups, or draw by a weight with sparkdl.Weighted."
            )
        totals = counts.sum(axis=0)
        rows = self.rows
        if rows is None:
            rows = int(totals.sum()) if self.replacement else int(totals.min()) * len(values)
        each, rest = divmod(rows, len(values))
        shares = each + (np.arange(len(values)) < rest)
        if not self.replacement and (shares > totals).any():
            raise DataError(
                f'sampling=Balanced("{self.column}", replacement=False, rows={rows:,}): a value has '
                f"{int(totals.min()):,} rows and would need {int(shares.max()):,}. Give at most "
                f"rows={int(totals.min()) * len(values):,}, or draw with replacement."
            )
        quotas = np.zeros_like(counts)
        for value, (share, total) in enumerate(zip(shares.tolist(), totals.tolist(), strict=True)):
            times, more = divmod(share, total)
            quotas[:, value] = times * counts[:, value] + apportion(counts[:, value].tolist(), more)
        table = np.concatenate([values.astype(np.int64)[None], quotas])
        return Draws(field, tuple(quotas.sum(axis=1).tolist()), self.replacement, table.tobytes())


@dataclass(frozen=True)
class Weighted(Sampling):
    """``sampling=sparkdl.Weighted("column")``: rows are drawn in proportion to a number of at least 0.

    Without replacement ``rows`` is needed: fewer than have a weight above 0, since all of them are an
    epoch without sampling.
    """

    spec = _Weight()

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = (
            "replacement: give rows=, the rows of an epoch; each row once is one without sampling."
        )
        check_values(self, (rule, self.replacement or self.rows is not None))

    def draws(self, field: int, tallies: Tallies) -> Draws:
        sums = np.array([float(values[0]) for values, _ in tallies])
        rows_left = np.array([int(counts[1:].sum()) for _, counts in tallies])
        if not sums.any():
            raise DataError(
                f'sampling=Weighted("{self.column}"): all weights are 0, so no row can be drawn.'
            )
        if not self.replacement and int(rows_left.sum()) < (self.rows or 0):
            raise DataError(
                f'sampling=Weighted("{self.column}", replacement=False, rows={self.rows:,}): only '
                f"{int(rows_left.sum()):,} rows have a weight above 0. Give fewer rows, or draw with "
                "replacement."
            )
        if self.replacement:
            mass = (sums / sums.max() * SCALE).astype(np.int64) // len(sums)
            drawn = apportion(mass.tolist(), self.rows or sum(int(n[0]) for _, n in tallies))
        else:
            drawn = _rounded(_expected(tallies, self.rows or 0), rows_left)
        return Draws(field, tuple(drawn.tolist()), self.replacement)


def _expected(tallies: Tallies, rows: int) -> np.ndarray:
    """Return how many of ``rows`` rows the exponential race over all partitions draws from each.

    A row of weight w is among them with the probability 1 - exp(-w t), for the t that makes these
    ``rows`` altogether; the bisection is by the logarithm of t.
    """
    logs = [(np.log(values[1:]), counts[1:]) for values, counts in tallies]
    heaviest = max(float(values.max(initial=-np.inf)) for values, _ in logs)

    def at(time: float) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.array([-np.expm1(-np.exp(w - heaviest + time)) @ n for w, n in logs])

    low, high = -50.0, 1500.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).sum() > rows else (middle, high)
    return at(high) * (rows / at(high).sum())


def _rounded(shares: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return whole numbers of the same sum, the largest remainders rounded up, at most ``most``."""
    whole = np.minimum(np.floor(shares + 1e-9).astype(np.int64), most)
    missing = round(float(shares.sum())) - int(whole.sum())
    rest = np.where(whole < most, shares - whole, -np.inf)
    whole[np.argsort(-rest, kind="stable")[:missing]] += 1
    return whole

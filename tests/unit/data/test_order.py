"""The canonical order: a function of what the rows are, never of how they arrived."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_order import canonical_order, checksum, row_contents, row_hashes


def test_rows_are_sorted_by_hash_and_ties_by_content() -> None:
    hashes = np.array([5, 1, 5, 1, 3], dtype=np.uint32)
    letters = np.frombuffer(b"bzay?", dtype=np.uint8)
    asked: list[int] = []

    def contents(rows: np.ndarray) -> np.ndarray:
        asked.extend(rows.tolist())
        return row_contents([letters[rows]])

    assert canonical_order(hashes, contents).tolist() == [3, 1, 4, 2, 0]
    assert sorted(asked) == [0, 1, 2, 3]  # never for a hash that is alone


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "float32", "float64", "bool"])
def test_a_hash_sees_each_value_of_each_column(dtype: str) -> None:
    first = np.zeros((4, 2, 3), dtype)
    second = np.zeros(4, dtype)
    base = row_hashes([first, second])
    assert base.dtype == np.uint64
    assert len(set(base.tolist())) == 1
    changed = first.copy()
    changed[2, 1, 2] = 1
    assert (row_hashes([changed, second]) != base).tolist() == [False, False, True, False]
    last = second.copy()
    last[0] = 1
    assert (row_hashes([first, last]) != base).tolist() == [True, False, False, False]


def test_a_hash_does_not_depend_on_the_memory_layout() -> None:
    column = np.arange(24, dtype=np.float32).reshape(4, 6)
    scattered = np.asfortranarray(column)
    assert not scattered.flags.c_contiguous
    np.testing.assert_array_equal(row_hashes([scattered]), row_hashes([column]))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "float32", "float64"])
def test_rows_that_differ_in_signs_only_have_different_hashes(dtype: str) -> None:
    """A sum of products alone would keep no more than the parity of the topmost bits."""
    signs = (np.arange(4096)[:, None] >> np.arange(12)) & 1
    assert len(set(row_hashes([(1 - 2 * signs).astype(dtype)]).tolist())) == 4096


def test_the_checksum_sees_values_that_rows_trade() -> None:
    column = np.arange(12, dtype=np.float32).reshape(4, 3)
    traded = column.copy()
    traded[[0, 1], 2] = column[[1, 0], 2]
    assert checksum(row_hashes([traded])) != checksum(row_hashes([column]))


def test_the_checksum_counts_equal_rows() -> None:
    """A plain XOR would not see a pair of equal rows come or go."""
    row = np.array([5, 6], dtype=np.int64)
    sums = {checksum(row_hashes([np.repeat(row, [1, pairs])])) for pairs in (1, 3, 5)}
    assert len(sums) == 3
    assert checksum(row_hashes([row[:0]])) == 0


def test_the_checksum_stays_what_it_is() -> None:
    hashes = row_hashes([np.array([1, 2, 3], np.int32)])
    assert hashes.tolist() == [6860782474596666437, 13485956406272572984, 14758989619158980308]
    assert checksum(hashes) == 16658984426318668113


# Rows of varying length


def test_a_hash_sees_content_and_length_of_a_row() -> None:
    def hashes(*columns: list[list[int]]) -> list[int]:
        arrays = [Ragged.of([np.array(r, np.int64) for r in rows]) for rows in columns]
        return row_hashes(arrays).tolist()

    base = hashes([[1], [2, 3]], [[4, 5], [6]])
    assert hashes([[1], [2, 3]], [[4, 5], [7]])[1] != base[1]
    assert hashes([[1, 4], [2, 3]], [[5], [6]])[0] != base[0]
    assert hashes([[0]]) != hashes([[0, 0]])
    view = Ragged.of([np.array(r, np.int64) for r in ([9], [1], [2, 3])])[1:]
    assert row_hashes([view]).tolist() == hashes([[1], [2, 3]])


def column_of(rows: list[list[int]], ragged: bool) -> Rows:
    """A row of three bytes for each, or of as many as it has."""
    if ragged:
        return Ragged.of([np.array(row, np.int8) for row in rows])
    return np.array([[*row, 2, 2][:3] for row in rows], np.int8)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 2**32),
    st.integers(1, 5),
)
def test_any_arrival_gives_the_same_rows_in_the_same_order(
    rows: list[list[int]], ragged: bool, seed: int, at_once: int
) -> None:
    """Ties by the hash, which here is nearly nothing; ``at_once`` makes large ties of small ones."""
    arrival = np.random.default_rng(seed).permutation(len(rows))
    found = []
    for arrived in (rows, [rows[i] for i in arrival]):
        column = column_of(arrived, ragged)
        asked: list[int] = []

        def contents(
            places: np.ndarray, column: Rows = column, asked: list[int] = asked
        ) -> np.ndarray:
            asked.append(len(places))
            return row_contents([column[places]])

        canonical = canonical_order(row_hashes([column]) % np.uint64(2), contents, at_once)
        assert max(asked, default=0) <= at_once
        found.append([row.tolist() for row in column[canonical]])
        assert sorted(found[-1]) == sorted(row.tolist() for row in column)
    assert found[0] == found[1]

"""Rows of varying length, held against lists of arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.data.ragged import Padding, Ragged, concatenate, dense, model_inputs

quick = settings(deadline=None, max_examples=60)
Lists = list[list[int]]
LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=8)


def ragged(rows: Lists, padding: Padding | None = None) -> Ragged:
    return Ragged.of([np.array(row, np.int64) for row in rows], padding)


def lists(rows: Ragged) -> Lists:
    return [row.tolist() for row in rows]


@quick
@given(LISTS, st.data())
def test_indexing_is_that_of_a_list(rows: Lists, data: st.DataObject) -> None:
    whole = ragged(rows)
    assert lists(whole) == rows
    assert len(whole) == len(rows)
    assert whole.lengths.tolist() == [len(row) for row in rows]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9))
    assert lists(whole[np.array(chosen, np.int64)]) == [rows[i] for i in chosen]
    cut = data.draw(st.slices(len(rows)))
    part = whole[cut]
    assert lists(part) == rows[cut]
    again = data.draw(st.lists(st.integers(0, max(0, len(part) - 1)), max_size=5))
    if len(part):
        assert lists(part[np.array(again, np.int64)]) == [rows[cut][i] for i in again]


@quick
@given(LISTS, LISTS, st.integers(0, 3), st.integers(1, 6))
def test_joining_cutting_padding(one: Lists, other: Lists, skip: int, length: int) -> None:
    """Of views too, which begin in the middle of their values."""
    parts = [ragged(one), ragged([[7]] * skip + other)[skip:]]
    joined = concatenate(parts)
    rows = one + other
    assert isinstance(joined, Ragged)
    assert lists(joined) == rows
    assert lists(joined.cut(length)) == [row[:length] for row in rows]
    longest = max(1, *map(len, rows))
    for width, found in ((longest, joined.padded()), (length, joined.padded(length))):
        expected = [(row + [0] * width)[:width] for row in rows]
        assert found.shape == (len(rows), width)
        assert found.tolist() == expected


def test_a_row_of_vectors_is_padded_in_its_first_dimension() -> None:
    rows = Ragged.of([np.ones((1, 2), np.float32), np.ones((3, 2), np.float32)], Padding(value=-1))
    padded = rows.padded()
    assert padded.dtype == np.float32
    assert padded.shape == (2, 3, 2)
    assert padded[0].tolist() == [[1, 1], [-1, -1], [-1, -1]]


def test_what_the_model_and_the_loss_get() -> None:
    numbers = np.arange(2)
    words = ragged([[1, 2], [3]], Padding(value=-1, lengths=True))
    padded, lengths, last = model_inputs([words, numbers])
    assert padded.tolist() == [[1, 2], [3, -1]]
    assert (lengths.dtype, lengths.tolist()) == (np.dtype("int64"), [2, 1])
    assert last is numbers
    assert [array.tolist() for array in dense([words, numbers])] == [[[1, 2], [3, -1]], [0, 1]]


def test_a_fixed_length_bounds_the_lengths_too() -> None:
    words = ragged([[1, 2, 3], [4]], Padding(length=2, lengths=True))
    padded, lengths = words.inputs()
    assert padded.tolist() == [[1, 2], [4, 0]]
    assert lengths.tolist() == [2, 1]


def test_lists_of_lists_are_padded_in_both_dimensions() -> None:
    texts = Ragged.of(
        [ragged([[1, 2], [3]]), ragged([[4, 5, 6], []])[1:], ragged([[7]])[:0]],
        Padding(value=-1, lengths=True, mask=True, items=Padding(value=-1)),
    )
    padded, lengths, mask = texts[np.array([2, 0, 1])].inputs()
    assert padded.tolist() == [[[-1, -1], [-1, -1]], [[1, 2], [3, -1]], [[-1, -1], [-1, -1]]]
    assert lengths.tolist() == [0, 2, 1]
    assert mask.tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 0]], [[0, 0], [0, 0]]]
    assert concatenate([texts[1:], texts[:1]]).tolist() == [[[]], [], [[1, 2], [3]]]


def test_a_batch_of_empty_rows_has_one_column() -> None:
    padded, mask = ragged([[], []], Padding(mask=True)).inputs()
    assert (padded.tolist(), mask.tolist()) == ([[0], [0]], [[0], [0]])


def test_size_in_memory_is_that_of_the_rows() -> None:
    words = ragged([[1, 2, 3], [4]])
    assert words.nbytes == 4 * 8 + 3 * 8
    assert words[1:].nbytes == 1 * 8 + 2 * 8

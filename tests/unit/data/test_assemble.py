"""Mini-batches out of a mapped partition: order, augmentation, padding, weights."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdl.data import epoch as batches
from sparkdl.data.batches import (
    Batch,
    Batched,
    BatchSpec,
    fields_to_batch,
    input_fields,
    preview_batch,
    training_rows,
    visit_order,
)
from sparkdl.data.epoch import RowDraws, permutation, remembered
from sparkdl.data.partition_reader import MappedPartition, close_partitions, open_partition
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.preview import Preview
from sparkdl.data.ragged import Padding, Ragged, Rows
from sparkdl.errors import ParameterError
from sparkdl.slab.root import SlabConfig, remove_root

Make = Callable[[list[Rows]], MappedPartition]
NAMES = ["words", "photo", "label", "weight"]


def training_batch(batch_spec: BatchSpec, *place: Any) -> Batch:
    return fields_to_batch(batch_spec, training_rows(batch_spec, *place))


@pytest.fixture
def make(slab: SlabConfig) -> Make:
    def write(columns: list[Rows]) -> MappedPartition:
        writer = PartitionWriter(slab)
        writer.add(NAMES[: len(columns)], columns)
        return open_partition(writer.finish())

    return write


def some_rows(count: int, seed: int = 0) -> list[Rows]:
    """words (ragged, with lengths), photo uint8 (1, 2, 2), label, weight."""
    random = np.random.default_rng(seed)
    words = [random.integers(0, 99, random.integers(1, 20)) for _ in range(count)]
    return [
        Ragged.of(words, Padding(value=-1, lengths=True)),
        random.integers(0, 256, (count, 1, 2, 2), dtype=np.uint8),
        np.arange(count),
        random.random(count).astype(np.float32),
    ]


ASSEMBLY = BatchSpec(num_features=2, num_labels=1, weighted=True, seed=3)


def test_a_plain_batch(make: Make) -> None:
    partition = make(some_rows(30))
    rows = np.array([4, 4, 17])
    batch = fields_to_batch(ASSEMBLY, partition.gather(rows))
    words, photo, label, weight = partition.gather(rows)
    assert isinstance(words, Ragged)
    padded, lengths, pictures = batch.inputs
    assert padded.shape == (3, words.lengths.max())
    for row, length, expected in zip(padded, lengths, words, strict=True):
        assert row[:length].tolist() == expected.tolist()
        assert (row[length:] == -1).all()
    np.testing.assert_array_equal(pictures, photo)
    names = [field.name for field in input_fields(ASSEMBLY, partition.fields)]
    assert names == ["words", "lengths of words", "photo"]
    np.testing.assert_array_equal(batch.targets[0], label)
    np.testing.assert_array_equal(batch.weights, weight)


# Order


def test_without_bucketing_it_is_the_permutation(make: Make) -> None:
    partition = make(some_rows(30))
    np.testing.assert_array_equal(
        visit_order(ASSEMBLY, partition, 2, 1, 4), permutation(3, 2, 1, 30)
    )
    flat = make([np.arange(30)])  # nothing to bucket by
    batch_spec = BatchSpec(num_features=1, num_labels=0, bucketing=8, seed=3)
    np.testing.assert_array_equal(visit_order(batch_spec, flat, 2, 1, 4), permutation(3, 2, 1, 30))


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3))
def test_buckets(make: Make, count: int, bucketing: int, share: int, epoch: int) -> None:
    """Each row once; a chunk's rows are neighbours in length within a window of the permutation."""
    partition = make(some_rows(count))
    batch_spec = replace(ASSEMBLY, bucketing=bucketing)
    order = visit_order(batch_spec, partition, epoch, 1, share)
    assert sorted(order.tolist()) == list(range(count))
    lengths = partition.lengths()
    window = share * max(1, bucketing // share)
    drawn = permutation(3, epoch, 1, count)
    windows = [drawn[i : i + window] for i in range(0, count, window)]
    chunks = [
        tuple(rows[np.argsort(lengths[rows], kind="stable")][i : i + share].tolist())
        for rows in windows
        for i in range(0, len(rows), share)
    ]
    found = [tuple(order[i : i + share].tolist()) for i in range(0, count, share)]
    assert sorted(found) == sorted(chunks)
    if count % share:
        assert found[-1] == chunks[-1]  # the short one stays last, or all others would be cut apart


def test_buckets_save_padding_and_are_shuffled(make: Make) -> None:
    partition = make(some_rows(400))
    lengths = partition.lengths()

    def padded(order: np.ndarray) -> int:
        return sum(int(lengths[order[i : i + 20]].max()) * 20 for i in range(0, 400, 20))

    bucketed = visit_order(replace(ASSEMBLY, bucketing=200), partition, 0, 0, 20)
    assert padded(bucketed) < 0.75 * padded(permutation(3, 0, 0, 400))
    longest = [int(lengths[bucketed[i : i + 20]].max()) for i in range(0, 400, 20)]
    assert longest != sorted(longest)
    other = visit_order(replace(ASSEMBLY, bucketing=200), partition, 1, 0, 20)
    assert other.tolist() != bucketed.tolist()


def test_two_partitions_do_not_share_an_order(make: Make) -> None:
    """Of one size, seed and epoch, as two runs in one process have them."""
    batch_spec = replace(ASSEMBLY, bucketing=40)
    one, other = (make(some_rows(40, seed)) for seed in (1, 2))
    orders = [visit_order(batch_spec, partition, 0, 0, 4).tolist() for partition in (one, other)]
    assert orders[0] != orders[1]
    assert visit_order(batch_spec, one, 0, 0, 4).tolist() == orders[0]


def kept(epoch: int, replica: int, count: int) -> np.ndarray:
    return remembered((epoch, replica, count), lambda: permutation(0, epoch, replica, count))


def test_threads_draw_orders_beside_each_other() -> None:
    """Fits of one driver, under the local engine."""
    interval, failed = sys.getswitchinterval(), []

    def draw(replica: int) -> None:
        try:
            for epoch in range(2000):
                order = kept(epoch, replica, 5)
                assert sorted(order) == list(range(5))
        except Exception as error:
            failed.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=draw, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []


def test_orders_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    batches._orders.clear()
    monkeypatch.setattr(batches, "ORDER_BYTES", 8 * 100 * 5)
    for replica in range(9):
        kept(0, replica, 100)
    assert len(batches._orders) == 5
    big = [kept(0, replica, 10_000) for replica in range(4)]
    assert len(batches._orders) == 2
    assert kept(0, 3, 10_000) is big[3]
    for replica in range(100):
        kept(1, replica, 1)
    assert len(batches._orders) <= 32


# Augmentation


def jitter(words: np.ndarray, photo: np.ndarray, rng: np.random.Generator) -> tuple[Any, Any]:
    """Other lengths, and floats out of bytes; writes into what it is given."""
    photo //= 2
    return words[: rng.integers(1, len(words) + 1)], photo + np.float32(rng.random())


def draws(words: np.ndarray, photo: np.ndarray, rng: np.random.Generator) -> tuple[Any, Any]:
    """Draws as most libraries of transforms do, if not always."""
    photo //= 2
    noise = float(rng.random() < 0.8) and torch.rand(1).item() + np.random.rand() + random.random()
    return words, photo + np.float32(noise)


@Batched
def of_all(words: np.ndarray, photo: np.ndarray, rng: RowDraws) -> tuple[Any, Any]:
    """All rows at once, of equal length."""
    photo //= 2
    normal, number = rng.normal(1), rng.integers(-5, 5, 2)
    assert photo.shape == (*words.shape[:1], *photo.shape[1:])
    noise = rng.random(1, 1, 1)
    return np.concatenate([words, number, normal > 0], 1), photo + np.float32(noise)


of_part = functools.partial(of_all)


class Draws:
    """An object of that kind."""

    def __call__(self, *given: Any) -> tuple[Any, Any]:
        return draws(*given)


def seed_all() -> None:
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)


def draw_from_all() -> tuple[Any, ...]:
    return torch.rand(1), np.random.rand(), random.random()


@pytest.mark.parametrize(
    "augment", [jitter, draws, Draws(), functools.partial(draws), of_all, of_part]
)
def test_augmented_rows_are_the_same_in_any_batch(make: Make, augment: Any) -> None:
    """The global generators are seeded for each row, and go on afterwards as if nothing had been."""
    columns = some_rows(30)
    if augment in (of_all, of_part):
        assert isinstance(columns[0], Ragged)
        columns[0] = Ragged.of([np.arange(4) + i for i in range(30)], columns[0].padding)
    partition = make(columns)
    batch_spec = replace(ASSEMBLY, augment=augment)
    seed_all()
    expected = draw_from_all()
    seed_all()
    everything = training_batch(batch_spec, partition, np.arange(30), 1, 2)
    assert draw_from_all() == expected
    some = training_batch(batch_spec, partition, np.array([7, 3]), 1, 2)
    width = some.inputs[0].shape[1]
    np.testing.assert_array_equal(some.inputs[0], everything.inputs[0][[7, 3], :width])
    for one, whole in zip(some.inputs[1:], everything.inputs[1:], strict=True):
        np.testing.assert_array_equal(one, whole[[7, 3]])
    noise = everything.inputs[2] - partition.gather(np.arange(30))[1] // 2
    assert len(np.unique(noise[:, 0, 0].round(2))) > 15  # of each row its own
    for position in ((2, 2), (1, 3)):
        again = training_batch(batch_spec, partition, np.arange(30), *position)
        assert not np.array_equal(again.inputs[2], everything.inputs[2])


def test_augment_by_keyword(make: Make) -> None:
    """The values take the order of the features, whatever order they are returned in."""
    partition, rows = make(some_rows(30)), np.arange(30)
    batch_spec = replace(ASSEMBLY, augment=lambda a, b, rng: (a[::-1], b))
    named = replace(ASSEMBLY, inputs=("a", "b"), augment=lambda b, rng, a: {"b": b, "a": a[::-1]})
    expected = training_batch(batch_spec, partition, rows, 0, 0)
    found = training_batch(named, partition, rows, 0, 0)
    for one, other in zip(found.inputs, expected.inputs, strict=True):
        np.testing.assert_array_equal(one, other)
    short = replace(named, augment=lambda a, b, rng: {"a": a})
    with pytest.raises(ParameterError, match="a mapping of a: return exactly the features, a, b"):
        training_batch(short, partition, rows, 0, 0)


def test_numbers_of_rows_are_distributed_as_they_say() -> None:
    draws, rows = RowDraws(7, np.arange(2000)), 2000
    uniform, normal = draws.random(50), draws.normal(50)
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(normal.std() - 1) < 0.01
    assert abs(np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]) < 0.015
    assert set(np.unique(draws.integers(-2, 3, 9))) == {-2, -1, 0, 1, 2}
    assert draws.random().shape == (rows,)
    assert len(np.unique(uniform)) == uniform.size


def test_augment_of_a_single_feature(make: Make) -> None:
    columns = some_rows(6)
    partition = make([columns[1], columns[2]])
    batch_spec = BatchSpec(
        num_features=1, num_labels=1, augment=lambda photo, rng: photo[:, ::-1], seed=1
    )
    batch = training_batch(batch_spec, partition, np.arange(6), 0, 0)
    (photo, label) = partition.gather(np.arange(6))
    assert isinstance(photo, np.ndarray)
    assert (batch.inputs[0].dtype, batch.weights) == (np.uint8, None)
    np.testing.assert_array_equal(batch.inputs[0], photo[:, :, ::-1])
    np.testing.assert_array_equal(batch.targets[0], label)


@pytest.mark.parametrize(
    ("augment", "text"),
    [
        (lambda a, b: (a, b), "augment raised TypeError"),
        (lambda a, b, rng: a, "augment returned 1 values for 2 features"),
        (lambda a, b, rng: (a, "x"), "augment returned a str, which is not an array of numbers"),
        (lambda a, b, rng: (a, np.ma.masked_less(b, 200)), "augment returned a masked value"),
        (lambda a, b, rng: (a, b[:, : 1 + rng.integers(2)]), "augment returned an array of shape"),
        (Batched(lambda a, b, rng: (a, b)), "rows of equal length, and a batch has some of"),
        (
            lambda a, b, rng: RowDraws(0, np.arange(2)).normal(0, 1, (2, 3)),
            r"\(0, 1, \(2, 3\)\) are no lengths: give those of one row",
        ),
    ],
)
def test_augment_that_fails(make: Make, augment: Any, text: str) -> None:
    partition = make(some_rows(30))
    with pytest.raises(ParameterError, match=text):
        training_batch(replace(ASSEMBLY, augment=augment), partition, np.arange(30), 0, 0)


# Preview


def test_the_preview_has_the_longest_row_and_extreme_words(make: Make, tmp_path: Path) -> None:
    config = SlabConfig.new(str(tmp_path), "preview")
    handles = []
    for seed, special in ((1, [500]), (2, [0] * 44)):
        writer = PartitionWriter(config)
        columns = some_rows(20, seed)
        words = columns[0]
        assert isinstance(words, Ragged)
        columns[0] = Ragged.of([*list(words)[:-1], np.array(special)], words.padding)
        writer.add(NAMES, columns)
        handles.append(writer.finish())
    preview = Preview.of(handles)
    fields, more = preview.join([preview.read(m, handles[m]) for m in preview.rows])
    words = fields[0]
    assert isinstance(words, Ragged)
    assert words.lengths.max() == 44
    assert words.values.max() == 500
    assert [row.tolist() for row in more[0]][: len(words)] == [row.tolist() for row in words]
    assert len(more[0]) == len(words) + preview.more
    assert preview.more > 10
    before = [row.tolist() for row in words]
    batch = preview_batch(ASSEMBLY, fields)
    assert [len(array) for array in batch.inputs] == [len(words)] * 3
    tried = preview_batch(replace(ASSEMBLY, augment=jitter), fields, augment=True)
    assert tried.inputs[2].dtype == np.float32
    assert [row.tolist() for row in words] == before
    np.testing.assert_array_equal(preview_batch(ASSEMBLY, fields).inputs[2], batch.inputs[2])
    close_partitions()
    remove_root(config)

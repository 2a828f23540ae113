"""A partition of samples in slabs: what was written is gathered again, in canonical order."""

from __future__ import annotations

import errno
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdl.data import partition as module
from sparkdl.data.partition import (
    Extreme,
    Field,
    PartitionWriter,
    SampleHandle,
    close_partitions,
    open_partition,
)
from sparkdl.data.ragged import Padding, Ragged, Rows
from sparkdl.data.schema import SAME_SHAPE, Problem, RowProblem
from sparkdl.errors import SlabFullError, StaleReferenceError
from sparkdl.slab.root import Root, SlabConfig, open_root, remove_root

NAMES = ["x", "n", "flag"]
Columns = list[np.ndarray]


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[SlabConfig]:
    config = SlabConfig.new(str(tmp_path), "test")
    yield config
    close_partitions()
    remove_root(config)


def some_rows(count: int, seed: int = 0) -> Columns:
    random = np.random.default_rng(seed)
    return [
        random.normal(size=(count, 2, 3)).astype(np.float32),
        random.integers(-(2**40), 2**40, count),
        random.integers(0, 2, count).astype(bool),
    ]


def write(
    slab: SlabConfig, columns: Columns, cuts: list[int] | None = None, names: list[str] = NAMES
) -> SampleHandle:
    """Write ``columns`` in several adds, cut at ``cuts``."""
    writer = PartitionWriter(slab)
    parts = zip(*[np.split(column, cuts or []) for column in columns], strict=True)
    for part in parts:
        writer.add(names, list(part))
    return writer.finish()


def all_rows(handle: SampleHandle) -> Columns:
    return open_partition(handle).gather(np.arange(handle.num_rows))


def as_set(columns: Columns) -> list[bytes]:
    return sorted(b"".join(c[i].tobytes() for c in columns) for i in range(len(columns[0])))


def same(found: Columns, expected: Columns) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_what_is_written_is_read(slab: SlabConfig) -> None:
    columns = some_rows(50)
    handle = write(slab, columns)
    assert handle.num_rows == 50
    assert handle.fields == (
        Field("x", "float32", (2, 3)),
        Field("n", "int64", ()),
        Field("flag", "bool", ()),
    )
    assert len(handle.paths) == 1
    found = all_rows(handle)
    assert [c.dtype for c in found] == [c.dtype for c in columns]
    assert as_set(found) == as_set(columns)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3)])
def test_each_kind_of_field(slab: SlabConfig, dtype: str, shape: tuple[int, ...]) -> None:
    column = (np.arange(7 * int(np.prod(shape))) % 100).astype(dtype).reshape(7, *shape)
    handle = write(slab, [column], names=["x"])
    order = open_partition(handle).order
    same(all_rows(handle), [column[order]])


@pytest.mark.parametrize("chunk_bytes", [1, 500, 1 << 20])
def test_gather_is_numpy_indexing_in_canonical_order(
    slab: SlabConfig, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files there are. The places in the files are those of arrival."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    columns = some_rows(60)
    handle = write(slab, columns, cuts=[10, 20, 21, 40])
    assert len(handle.paths) == {1: 5, 500: 3, 1 << 20: 1}[chunk_bytes]
    mapped = open_partition(handle)
    assert sorted(mapped.order.tolist()) == list(range(60))
    canonical = [column[mapped.order] for column in columns]
    for rows in ([], [0], [59, 0, 30, 30], range(60), np.random.default_rng(1).permutation(60)):
        chosen = np.array(rows, dtype=np.int64)
        same(mapped.gather(chosen), [column[chosen] for column in canonical])


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(1, 40), st.integers(0, 10**6), st.lists(st.integers(0, 40), max_size=4))
def test_the_order_of_arrival_leaves_no_trace(
    slab: SlabConfig, rows: int, seed: int, cuts: list[int]
) -> None:
    """Equal rows among them; cut into any adds, arrived in any order."""
    kinds = np.random.default_rng(seed).integers(0, 5, rows)
    columns = [column[kinds] for column in some_rows(5)]
    arrival = np.random.default_rng(seed + 1).permutation(rows)
    one = write(slab, columns)
    other = write(slab, [column[arrival] for column in columns], sorted(cuts))
    assert one.checksum == other.checksum
    same(all_rows(one), all_rows(other))


def test_the_checksum_tells_of_another_row(slab: SlabConfig) -> None:
    columns = some_rows(20)
    changed = [column.copy() for column in columns]
    changed[0][3, 1, 2] += 1
    assert write(slab, columns).checksum != write(slab, changed).checksum


def test_extremes_of_integer_fields(slab: SlabConfig) -> None:
    """Across adds, and with the row's number in canonical order."""
    columns = [
        np.array([[3, 4], [9, 1], [5, 5], [-7, 2]], np.int16),
        np.array([0.5, 9.5, -9.5, 1.5], np.float32),
        np.array([10, 20, 30, 5]),
    ]
    handle = write(slab, columns, cuts=[1, 3], names=["a", "b", "c"])
    rows = all_rows(handle)
    found = {(e.field, e.sign): e.value for e in handle.extremes}
    assert found == {(0, -1): -7, (0, 1): 9, (2, -1): 5, (2, 1): 30}
    for extreme in handle.extremes:
        assert extreme.value in rows[extreme.field][extreme.row].reshape(-1).tolist()


def test_extremes_compare_by_their_sign() -> None:
    assert Extreme(0, 1, 5, 0).exceeds(4)
    assert not Extreme(0, 1, 5, 0).exceeds(5)
    assert Extreme(0, -1, 5, 0).exceeds(6)
    assert not Extreme(0, -1, 5, 0).exceeds(4)


def test_an_empty_partition(slab: SlabConfig) -> None:
    writer = PartitionWriter(slab)
    writer.add(["x"], [np.zeros((0, 3), np.float32)])
    handle = writer.finish()
    assert (handle.num_rows, handle.paths, handle.fields, handle.checksum) == (0, (), (), 0)
    assert len(open_partition(handle).order) == 0


def test_a_handle_is_small_and_travels(slab: SlabConfig) -> None:
    handle = write(slab, some_rows(1000))
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert len(pickle.dumps(handle)) < 2000


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (np.zeros((2, 3), np.float32), "is float32[3] where row 0 is float32[2]"),
        (np.zeros(2, np.float32), "is float32 where row 0 is float32[2]"),
        (np.zeros((2, 2), np.int64), "is int64[2] where row 0 is float32[2]"),
    ],
)
def test_rows_of_another_shape_are_a_mistake(
    slab: SlabConfig, second: np.ndarray, text: str
) -> None:
    writer = PartitionWriter(slab)
    writer.add(["x"], [np.zeros((5, 2), np.float32)])
    with pytest.raises(RowProblem) as caught:
        writer.add(["x"], [second])
    assert caught.value.problem == Problem("x", 5, text, SAME_SHAPE)


def test_a_failed_partition_leaves_no_file(
    slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    writer = PartitionWriter(slab)
    writer.add(["x"], [np.zeros(3)])
    assert len(sample_files(slab)) == 1
    problem = Problem("x", 3, "is null", "Drop it.")
    handle = writer.fail(problem)
    assert sample_files(slab) == []
    assert handle.problem == problem
    assert (handle.num_rows, handle.paths) == (0, ())


def sample_files(slab: SlabConfig) -> list[str]:
    root = open_root(slab)
    assert root is not None
    return [path.name for base in root.directories for path in base.glob("samples-*")]


# Two directories


@pytest.fixture
def two_directories(slab: SlabConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root with a second directory, as "auto" makes it: memory first, then a disk."""
    first = open_root(slab, create=True)
    assert first is not None
    second = tmp_path / "disk"
    second.mkdir()
    root = Root((first.directories[0], second), first.token)
    monkeypatch.setattr(module, "open_root", lambda config, create=False: root)
    return root


class Full:
    """Stands in for ``pa.OSFile``: some directories have no room left, noticed in mid-file."""

    def __init__(self, full: list[Path], error: int = errno.ENOSPC) -> None:
        self.full, self.error, self.real = full, error, pa.OSFile
        self.refused = 0

    def __call__(self, path: str, mode: str) -> Any:
        if Path(path).parent in self.full:
            Path(path).write_bytes(b"half a file")
            self.refused += 1
            raise OSError(self.error, "refused by the test", path)
        return self.real(path, mode)


def test_a_full_directory_gives_way_to_the_next(
    slab: SlabConfig, two_directories: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_directories.directories
    full = Full([first])
    monkeypatch.setattr(module.pa, "OSFile", full)
    columns = some_rows(10)
    handle = write(slab, columns)
    assert full.refused == 1
    assert [Path(path).parent for path in handle.paths] == [second]
    assert Path(handle.order_path).parent == first
    assert not list(first.glob("*.arrow"))
    same(all_rows(handle), [column[open_partition(handle).order] for column in columns])


def test_no_room_anywhere_says_so(
    slab: SlabConfig, two_directories: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_directories.directories
    monkeypatch.setattr(module.pa, "OSFile", Full([first, second]))
    with pytest.raises(SlabFullError) as caught:
        write(slab, some_rows(1234))
    assert str(caught.value) == (
        f"no room for the samples in {first}, {second} after row 1,234. Free space there, or point "
        "spark.sparkdl.slab.dir at a larger directory."
    )
    assert not [*first.glob("samples-*"), *second.glob("samples-*")]


def test_another_error_is_not_taken_for_a_full_directory(
    slab: SlabConfig, two_directories: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full([two_directories.directories[0]], errno.EIO)
    monkeypatch.setattr(module.pa, "OSFile", full)
    with pytest.raises(OSError, match="refused by the test"):
        write(slab, some_rows(3))
    assert full.refused == 1


# Mappings


@pytest.mark.parametrize("which", ["samples", "order"])
def test_a_deleted_file_is_a_stale_reference(slab: SlabConfig, which: str) -> None:
    handle = write(slab, some_rows(5))
    path = handle.paths[0] if which == "samples" else handle.order_path
    Path(path).unlink()
    with pytest.raises(StaleReferenceError) as caught:
        open_partition(handle)
    assert str(caught.value) == f"sample slab {path} was deleted"


def test_a_mapping_outlives_its_files(slab: SlabConfig) -> None:
    """A task that reads while the run is cleaned up reads to the end."""
    columns = some_rows(5)
    mapped = open_partition(write(slab, columns))
    remove_root(slab)
    same(mapped.gather(np.arange(5)), [column[mapped.order] for column in columns])


def test_a_partition_is_mapped_once(slab: SlabConfig) -> None:
    handle = write(slab, some_rows(5))
    mapped = open_partition(handle)
    assert open_partition(pickle.loads(pickle.dumps(handle))) is mapped
    close_partitions()
    assert open_partition(handle) is not mapped


def test_mapping_copies_nothing(slab: SlabConfig) -> None:
    """Every column lies in the mapped file itself."""
    handle = write(slab, some_rows(5))
    (chunk,) = open_partition(handle).chunks
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in maps if line[-1] == handle.paths[0]]
    for column in chunk:
        address = column.__array_interface__["data"][0]
        assert any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


@pytest.mark.parametrize(
    ("field", "shown"),
    [(Field("x", "float32", ()), "float32"), (Field("x", "int64", (2, 3)), "int64[2, 3]")],
)
def test_a_field_shows_its_type_and_shape(field: Field, shown: str) -> None:
    assert str(field) == shown


# Rows of varying length


def ragged_rows(count: int, seed: int = 0) -> list[Rows]:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 6, count)
    return [
        Ragged.of([random.integers(0, 9, n).astype(np.int32) for n in lengths], Padding(value=-1)),
        random.random(count),
        Ragged.of([random.random((n, 2)).astype(np.float32) for n in lengths]),
        Ragged.of([random.random(n) > 0.5 for n in lengths]),
    ]


def listed(columns: list[Rows]) -> list[list[Any]]:
    return [[row.tolist() for row in column] for column in columns]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_ragged_rows_are_gathered(
    slab: SlabConfig, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    columns = ragged_rows(60)
    writer = PartitionWriter(slab)
    for start, stop in ((0, 20), (20, 21), (21, 60)):
        writer.add(["a", "b", "c", "d"], [column[start:stop] for column in columns])
    handle = writer.finish()
    assert len(handle.paths) == (3 if chunk_bytes == 1 else 1)
    assert handle.fields == (
        Field("a", "int32", (), Padding(value=-1)),
        Field("b", "float64", ()),
        Field("c", "float32", (2,), Padding()),
        Field("d", "bool", (), Padding()),
    )
    mapped = open_partition(handle)
    for rows in ([], [0], [59, 0, 30, 30], range(60), np.random.default_rng(1).permutation(60)):
        chosen = np.array(rows, dtype=np.int64)
        found = mapped.gather(chosen)
        expected = [column[mapped.order[chosen]] for column in columns]
        assert listed(found) == listed(expected)
        assert [c.dtype for c in found] == [c.dtype for c in columns]
    lengths = mapped.lengths()
    assert lengths is not None
    ragged = [column for column in mapped.gather(np.arange(60)) if isinstance(column, Ragged)]
    assert lengths.tolist() == sum(column.lengths for column in ragged).tolist()  # type: ignore[union-attr]


def test_the_arrival_of_ragged_rows_leaves_no_trace(slab: SlabConfig) -> None:
    columns = [column[np.arange(40) % 15] for column in ragged_rows(15)]
    arrival = np.random.default_rng(1).permutation(40)
    handles = []
    for order in (np.arange(40), arrival):
        writer = PartitionWriter(slab)
        writer.add(["a", "b", "c", "d"], [column[order] for column in columns])
        handles.append(writer.finish())
    assert handles[0].checksum == handles[1].checksum
    one, other = (listed(open_partition(h).gather(np.arange(40))) for h in handles)
    assert one == other


def test_extremes_of_ragged_fields(slab: SlabConfig) -> None:
    writer = PartitionWriter(slab)
    for rows in ([[3], [1, 7, 2]], [[-4, 5], [2]]):
        writer.add(["a"], [Ragged.of([np.array(row) for row in rows])])
    handle = writer.finish()
    rows = open_partition(handle).gather(np.arange(4))[0]
    found = {(e.sign, e.of_length): (e.value, e.row) for e in handle.extremes}
    everything = [row.tolist() for row in rows]
    assert found[1, False] == (7, everything.index([1, 7, 2]))
    assert found[-1, False] == (-4, everything.index([-4, 5]))
    assert found[1, True] == (3, everything.index([1, 7, 2]))
    assert found[-1, True][0] == 1


def test_a_ragged_field_shows_its_type() -> None:
    assert str(Field("x", "int64", (), Padding())) == "int64[any]"
    assert str(Field("x", "float32", (3,), Padding())) == "float32[any, 3]"


# Larger than memory


def test_a_partition_is_never_held_as_a_whole(
    slab: SlabConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB written and read in pieces: at no time is more than a few chunks of 1 MB allocated."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 20)
    random = np.random.default_rng(0)
    base = random.random((256, 128))
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        writer = PartitionWriter(slab)
        for i in range(256):
            writer.add(["x", "tie"], [base + i, np.zeros(256, np.int8)])
        handle = writer.finish()
        assert handle.num_rows == 65536
        mapped = open_partition(handle)
        total = 0.0
        for start in range(0, 65536, 4096):
            rows = np.arange(start, start + 256)
            x = mapped.gather(rows)[0]
            assert isinstance(x, np.ndarray)
            total += float(x.sum())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(Path(path).stat().st_size for path in handle.paths) > 64 << 20
    assert peak < 10 << 20
    assert pa.total_allocated_bytes() - arrow_before < 1 << 20
    assert total > 0


def test_equal_rows_without_end(slab: SlabConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows tie: their contents are compared piece by piece."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 14)
    writer = PartitionWriter(slab)
    for _ in range(20):
        writer.add(["x"], [np.ones((500, 16))])
    tracemalloc.start()
    try:
        handle = writer.finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(open_partition(handle).order.tolist()) == list(range(10000))
    assert peak < 1 << 20

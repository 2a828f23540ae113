"""A partition of samples in slabs: what was written is gathered again, in canonical order."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import pickle
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistakes import message_of

from sparkdl import Masked, Sparse
from sparkdl import Sequence as Varying
from sparkdl.data import partition_reader, partition_writer
from sparkdl.data.arrow_tasks import WriteDataFrame
from sparkdl.data.columns.base import Column
from sparkdl.data.equal_rows import SpreadRows
from sparkdl.data.fields import ReadOtherwise, check_handles
from sparkdl.data.partition_reader import close_partitions, open_partition, segment_files
from sparkdl.data.partition_writer import PartitionWriter, SampleHandle, join_partition
from sparkdl.data.preview import Preview
from sparkdl.data.ragged import Padding, Ragged, Rows
from sparkdl.data.records import WriteRecords
from sparkdl.data.row_errors import SAME_SHAPE, SAME_TYPE, BadRow, Handling, RowError
from sparkdl.errors import DataError, SlabFullError, StaleReferenceError, TrainingError
from sparkdl.slab.root import Root, SlabConfig, open_root, remove_root
from sparkdl.train.placed_samples import MOST_READINGS, read_again

CHOSEN = ([], [0], [59, 0, 30, 30], range(60), np.random.default_rng(1).permutation(60))
NAMES = ["x", "n", "flag", "words", "y", "track", "flags", "texts"]
NESTED = Padding(items=Padding())


def some_rows(count: int) -> list[Rows]:
    """Columns of arrays and of rows of varying length."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 6, count)
    texts = [
        Ragged.of([random.integers(0, 9, m) for m in [*random.integers(0, 4, n), 0]])[:n]
        for n in lengths
    ]
    return [
        random.normal(size=(count, 2, 3)).astype(np.float32),
        random.integers(-(2**40), 2**40, count),
        random.integers(0, 2, count).astype(bool),
        Ragged.of([random.integers(0, 9, n).astype(np.int32) for n in lengths], Padding(value=-1)),
        random.random(count),
        Ragged.of([random.random((n, 2)).astype(np.float32) for n in lengths]),
        Ragged.of([random.random(n) > 0.5 for n in lengths]),
        Ragged.of(texts, NESTED),
    ]


def write(slab: SlabConfig, columns: Sequence[Rows], cuts: Sequence[int] = ()) -> SampleHandle:
    """Write ``columns`` in several adds, cut at ``cuts``."""
    writer = PartitionWriter(slab)
    for start, stop in itertools.pairwise([0, *cuts, len(columns[0])]):
        writer.add(NAMES[: len(columns)], [column[start:stop] for column in columns])
    return writer.finish()


def write_parts(
    slab: SlabConfig, columns: list[Rows], cuts: list[int], count: int = 1
) -> list[SampleHandle]:
    """Row i is of partition i modulo ``count``; the rows between two cuts are written by one task."""
    parts = []
    for source, (start, stop) in enumerate(itertools.pairwise([0, *cuts, len(columns[0])])):
        writer = PartitionWriter(slab, source)
        for low, high in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
            of = (np.arange(low, high) % count).astype(np.int32)
            writer.add(NAMES, [column[low:high] for column in columns], of)
        parts.append(list(writer.parts(count)))
    random = np.random.default_rng(0)
    return [
        join_partition(slab, [row[m] for row in random.permutation(parts)]) for m in range(count)
    ]


def all_rows(handle: SampleHandle) -> list[Rows]:
    return open_partition(handle).gather(np.arange(handle.num_rows))


def listed(columns: Sequence[Rows]) -> list[Any]:
    return [(column.dtype, [row.tolist() for row in column]) for column in columns]


@pytest.mark.parametrize("cuts", [[], [20], [10, 20, 21, 40, 40]])
def test_gather_is_numpy_indexing_in_canonical_order(slab: SlabConfig, cuts: list[int]) -> None:
    """However many files there are. The places in the files are those of arrival."""
    columns = some_rows(60)
    (handle,) = write_parts(slab, columns, cuts)
    types = ["float32[2, 3]", "int64", "bool", "int32[any]", "float64", "float32[any, 2]"]
    assert [str(field) for field in handle.fields] == [*types, "bool[any]", "int64[any, any]"]
    rules = [field.padding for field in handle.fields if field.padding]
    assert rules == [Padding(value=-1), *2 * [Padding()], NESTED]
    assert len(handle.segments) == len(set(cuts)) + 1
    mapped = open_partition(handle)
    assert sorted(mapped.order.tolist()) == list(range(60))
    for rows in CHOSEN:
        chosen = np.array(rows, dtype=np.int64)
        found = mapped.gather(chosen)
        assert listed(found) == listed([column[mapped.order[chosen]] for column in columns])
    assert listed(all_rows(handle)) == listed(all_rows(write(slab, columns)))
    ragged = [column for column in all_rows(handle) if isinstance(column, Ragged)]
    assert mapped.lengths().tolist() == sum(column.lengths for column in ragged).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_that_stay_make_the_partitions_that_moved_rows_make(
    slab: SlabConfig, count: int
) -> None:
    """Whatever tasks wrote them: same rows, order, checksum and extremes."""
    columns = [column[np.arange(60) % 40] for column in some_rows(40)]
    handles = write_parts(slab, columns, [7, 7, 30], count)
    assert len({handle.checksum for handle in handles}) == count
    for m, handle in enumerate(handles):
        moved = write(slab, [column[m::count] for column in columns])
        assert handle.num_rows == moved.num_rows
        assert (handle.checksum, handle.fields) == (moved.checksum, moved.fields)
        assert listed(all_rows(handle)) == listed(all_rows(moved))
    found = [extremes_of(handle).get((1, False), {}) for handle in handles]
    values = [value for each in found for value in each.values()]
    assert (min(values), max(values)) == (columns[1].min(), columns[1].max())


def extremes_of(handle: SampleHandle) -> dict[tuple[int, bool], dict[int, float]]:
    """The extremes of each field, of values or of lengths, by their sign; each is in its row."""
    found: dict[tuple[int, bool], dict[int, float]] = {}
    for extreme in handle.extremes:
        row = list(all_rows(handle)[extreme.field])[extreme.row]
        values = row.flat[0] if isinstance(row, Ragged) else row.reshape(-1)
        assert extreme.value in ([len(row)] if extreme.of_length else values.tolist())
        found.setdefault((extreme.field, extreme.of_length), {})[extreme.sign] = extreme.value
    return found


def test_parts_of_different_shapes_are_a_mistake(slab: SlabConfig) -> None:
    parts = []
    for source, shape in enumerate(((0, 2), (3, 2), (3, 4))):
        writer = PartitionWriter(slab, source)
        writer.add(["x"], [np.zeros(shape, np.float32)], np.zeros(shape[0], np.int32))
        parts += writer.parts(1)
    text = "is float32[4] where row 0 of partition 1 is float32[2]"
    assert join_partition(slab, parts[::-1]).problem == BadRow("x", 0, text, SAME_SHAPE, 2)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(1, 40), st.integers(0, 10**6), st.lists(st.integers(0, 40), max_size=4))
def test_the_order_of_arrival_leaves_no_trace(
    slab: SlabConfig, rows: int, seed: int, cuts: list[int]
) -> None:
    """Equal rows and ragged ones among them; cut into any adds, arrived in any order."""
    kinds = np.random.default_rng(seed).integers(0, 5, rows)
    arrival = kinds[np.random.default_rng(seed + 1).permutation(rows)]
    columns, ends = some_rows(5), sorted({min(cut, rows) for cut in cuts})
    handles = [
        write(slab, [column[kinds] for column in columns]),
        write(slab, [column[arrival] for column in columns], ends),
    ]
    assert handles[0].checksum == handles[1].checksum
    assert listed(all_rows(handles[0])) == listed(all_rows(handles[1]))


def test_extremes_of_whole_numbers_and_of_lengths(slab: SlabConfig) -> None:
    """Across adds, and with the row's number in canonical order."""
    columns = [
        np.array([[3, 4], [9, 1], [5, 5], [-7, 2]], np.int16),
        np.array([0.5, 9.5, -9.5, 1.5], np.float32),
        np.array([10, 20, 30, 5]),
        Ragged.of([np.array(row) for row in ([3], [1, 7, 2], [-4, 5], [2])]),
    ]
    assert extremes_of(write(slab, columns, cuts=[1, 3])) == {
        (0, False): {-1: -7, 1: 9},
        (2, False): {-1: 5, 1: 30},
        (3, False): {-1: -4, 1: 7},
        (3, True): {-1: 1, 1: 3},
    }


def test_an_empty_partition(slab: SlabConfig) -> None:
    writer = PartitionWriter(slab)
    writer.add(["x"], [np.zeros((0, 3), np.float32)])
    handle = writer.finish()
    assert (handle.num_rows, handle.segments, handle.fields) == (0, (), ())
    assert handle.checksum == 0
    assert len(open_partition(handle).order) == 0


@pytest.mark.parametrize(
    ("second", "text", "remedy"),
    [
        (np.zeros((2, 3), np.float32), "is float32[3] where row 0 is float32[2]", SAME_SHAPE),
        (np.zeros(2, np.float32), "is float32 where row 0 is float32[2]", SAME_SHAPE),
        (np.zeros((2, 2), np.int64), "is int64[2] where row 0 is float32[2]", SAME_TYPE),
    ],
)
def test_rows_of_another_shape_are_a_mistake(
    slab: SlabConfig, second: np.ndarray, text: str, remedy: str
) -> None:
    writer = PartitionWriter(slab)
    writer.add(["x"], [np.zeros((5, 2), np.float32)])
    with pytest.raises(RowError) as caught:
        writer.add(["x"], [second])
    assert caught.value.problem == BadRow("x", 5, text, remedy)


def test_a_failed_partition_leaves_no_file(slab: SlabConfig) -> None:
    writer = PartitionWriter(slab)
    writer.add(["x"], [np.zeros(3)])
    assert len(sample_files(slab)) == 1
    problem = BadRow("x", 3, "is null", "Drop it.")
    handle = writer.fail(problem)
    assert sample_files(slab) == []
    assert handle.problem == problem
    assert (handle.num_rows, handle.segments) == (0, ())
    part = writer.failed_part(problem)
    assert join_partition(slab, [part]).problem == problem


def sample_files(slab: SlabConfig) -> list[str]:
    root = open_root(slab)
    return [path.name for base in root.directories for path in base.glob("samples-*")]


# Two directories


@pytest.fixture
def two_directories(slab: SlabConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root with a second directory, as "auto" makes it: memory first, then a disk."""
    first = open_root(slab, create=True)
    second = tmp_path / "disk"
    second.mkdir()
    root = Root((first.directories[0], second), first.node_id)
    monkeypatch.setattr(partition_writer, "open_root", lambda config, create=False: root)
    return root


class Full:
    """Stands in for ``open``: some directories have so much room left, noticed in mid-file."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        full: list[Path],
        room: int = 50,
        error: int = errno.ENOSPC,
    ) -> None:
        self.full, self.room, self.error = full, room, error
        self.refused = 0
        for module in (partition_reader, partition_writer):
            monkeypatch.setattr(module, "open", self, raising=False)

    def __call__(self, path: str | Path, mode: str, **options: Any) -> Any:
        file = open(path, mode, **options)  # noqa: SIM115
        return Limited(file, self) if Path(path).parent in self.full else file


class Limited:
    def __init__(self, file: Any, limit: Full) -> None:
        self._file, self._limit = file, limit

    def write(self, data: Any) -> int:
        if self._limit.room == 0:
            self._limit.refused += 1
            raise OSError(self._limit.error, "refused by the test")
        written = self._file.write(data[: self._limit.room])
        self._limit.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Limited:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._file.close()


@pytest.mark.parametrize("room", [0, 1, 24, 24 * 10 + 80 + 5, 5 * (24 + 9) + 30, 1000])
def test_a_full_directory_gives_way_to_the_next(
    slab: SlabConfig, two_directories: Root, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """In the middle of any field, of the first rows or of later ones: those go elsewhere whole."""
    first, second = two_directories.directories
    full = Full(monkeypatch, [first], room)
    columns = some_rows(30)[:4]
    handle = write(slab, columns, cuts=[10, 20])
    assert full.refused >= 1
    folders = [Path(segment.path).parent for segment in handle.segments]
    assert folders == ([first] if room == 1000 else []) + [second]
    assert sum(segment.num_rows for segment in handle.segments) == 30
    left = [path for path in first.glob("samples-*") if path.suffix != ".order"]
    assert len(left) == (5 if room == 1000 else 0)
    mapped = open_partition(handle)
    assert listed(mapped.gather(np.arange(30))) == listed([c[mapped.order] for c in columns])


def test_no_room_anywhere_says_so(
    slab: SlabConfig, two_directories: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_directories.directories
    Full(monkeypatch, [first, second])
    assert message_of(SlabFullError, write, slab, some_rows(1234)) == (
        f"there is not enough room for the samples in {first}, {second} after row 1,234. Free "
        "space there, or point spark.sparkdl.slab.dir at a larger directory."
    )
    assert not [*first.glob("samples-*"), *second.glob("samples-*")]


def test_another_error_is_not_taken_for_a_full_directory(
    slab: SlabConfig, two_directories: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(monkeypatch, [two_directories.directories[0]], 50, errno.EIO)
    with pytest.raises(OSError, match="refused by the test"):
        write(slab, some_rows(3))
    assert full.refused == 1


# Mappings


@pytest.mark.parametrize("which", ["samples", "order"])
def test_a_deleted_file_is_a_stale_reference(slab: SlabConfig, which: str) -> None:
    handle = write(slab, some_rows(5))
    path = handle.order_path
    if which == "samples":
        path = segment_files(handle.segments[0], handle.fields)[0]
    Path(path).unlink()
    assert (
        message_of(StaleReferenceError, open_partition, handle) == f"sample slab {path} was deleted"
    )


def test_a_mapping_outlives_its_files(slab: SlabConfig) -> None:
    """A task that reads while the run is cleaned up reads to the end."""
    columns = some_rows(5)
    mapped = open_partition(write(slab, columns))
    remove_root(slab)
    found = mapped.gather(np.arange(5))
    assert listed(found) == listed([column[mapped.order] for column in columns])


def test_a_partition_is_mapped_once(slab: SlabConfig) -> None:
    handle = write(slab, some_rows(1000))
    assert len(pickle.dumps(handle)) < 2000  # it travels with tasks
    mapped = open_partition(handle)
    assert open_partition(pickle.loads(pickle.dumps(handle))) is mapped
    close_partitions()
    assert open_partition(handle) is not mapped


@pytest.mark.linux
def test_mapping_copies_nothing(slab: SlabConfig) -> None:
    """Every column lies in the mapped file itself."""
    handle = write(slab, some_rows(5)[:3])
    mapped = open_partition(handle)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    names = segment_files(handle.segments[0], handle.fields)
    for column, name in zip(mapped.columns, names, strict=True):
        (start, stop), *_ = [line[0].split("-") for line in maps if line[-1] == name]
        address = column.values.arrays[0].ctypes.data
        assert int(start, 16) <= address < int(stop, 16)


# Larger than memory


@contextlib.contextmanager
def allocated() -> Iterator[list[int]]:
    """Yield a list that then gets the bytes allocated at the end, and the most at any time."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found += tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_a_partition_is_never_held_as_a_whole(slab: SlabConfig) -> None:
    """64 MB written and read in pieces: at no time is more than a few MB allocated."""
    base = np.random.default_rng(0).random((256, 128))
    with allocated() as held:
        writer = PartitionWriter(slab)
        for i in range(256):
            writer.add(["x", "tie"], [base + i, np.zeros(256, np.int8)])
        handle = writer.finish()
        mapped = open_partition(handle)
        for start in range(0, 65536, 4096):
            assert mapped.gather(np.arange(start, start + 256))[0].shape == (256, 128)
    (x_file, _) = segment_files(handle.segments[0], handle.fields)
    assert Path(x_file).stat().st_size == 64 << 20
    assert held[1] < 10 << 20


def test_large_records_are_held_a_few_at_a_time(slab: SlabConfig) -> None:
    """64 records of 1 MB: 16 of them wait, and once more while they are joined."""
    records = ((np.full((512, 512), i, np.float32), i) for i in range(64))
    with allocated() as held:
        (frame,) = WriteRecords(slab, True, "float32")(0, records)
    x, label = open_partition(pickle.loads(frame)).gather(np.arange(64))
    assert sorted(label) == list(range(64))
    assert (np.asarray(x) == np.asarray(label)[:, None, None]).all()
    assert held[1] < 40 << 20


def test_equal_rows_without_end(slab: SlabConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows tie: their contents are compared piece by piece."""
    monkeypatch.setattr(partition_writer, "COMPARE_BYTES", 1 << 14)
    writer = PartitionWriter(slab)
    for _ in range(20):
        writer.add(["x"], [np.ones((500, 16))])
    with allocated() as held:
        handle = writer.finish()
    assert sorted(open_partition(handle).order.tolist()) == list(range(10000))
    assert held[1] < 1 << 20


def test_equal_rows_that_are_others_when_they_are_spread(slab: SlabConfig) -> None:
    def handle(copies: int) -> SampleHandle:
        writer = PartitionWriter(slab)
        writer.add(["x"], [np.ones((copies, 2))])
        return writer.finish()

    handles = [handle(400), handle(0)]
    task = SpreadRows.of(slab, handles, lambda _, work, homes: [work(m, handles[m]) for m in homes])
    assert task is not None
    assert task.changed(0, handle(400)).num_rows == 200
    with pytest.raises(TrainingError, match="partition 0 was computed again and holds other rows"):
        task.changed(0, handle(399))


def test_batches_are_let_go_of_while_rows_are_divided(slab: SlabConfig) -> None:
    """Of a partition that is larger than memory no more is held than its rows' partitions."""
    batch = pa.RecordBatch.from_pydict({"x": np.ones(100_000), "to": np.zeros(100_000, np.int32)})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        for _ in range(10):
            stream.write_batch(batch)
    sink.seek(0)
    writer = PartitionWriter(slab)
    with allocated() as held:
        WriteDataFrame(slab, (Column("x", "float64"),)).write(pa.ipc.open_stream(sink), writer)
    rows = sum(map(len, writer._partitions))
    assert rows == writer.num_rows == 1_000_000
    assert held[0] < 14 * rows  # 8 of them are hashes, 4 partitions


VECTOR = pa.struct(
    [
        ("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)  # fmt: skip


def read_as(
    slab: SlabConfig, column: Column, batches: Sequence[pa.Array], way: str = "error"
) -> SampleHandle:
    """Batches of a column beside a number, written by a task."""
    writer, names, row = PartitionWriter(slab), ["n", "x"], 0
    task = WriteDataFrame(slab, (Column("n", "int64"), column), Handling(way))
    try:
        for batch in batches:
            numbers = pa.array(range(row, row + len(batch)), pa.int64())
            task.write([pa.RecordBatch.from_arrays([numbers, batch], names)], writer)
            row += len(batch)
        return writer.finish()
    except RowError as error:
        return writer.fail(error.problem)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_vectors_are_stored_without_zeros_in_the_order_of_dense_ones(
    slab: SlabConfig, dtype: str
) -> None:
    size, random = 1 << 14, np.random.default_rng(4)
    entries = [
        {int(i): float(random.normal()) for i in sorted(random.choice(size, n, replace=False))}
        for n in random.integers(0, 6, 30)
    ]
    made = [
        {"type": 0, "size": size, "indices": [*row], "values": [*row.values()]} for row in entries
    ]
    of_zeros = {"type": 1, "size": None, "indices": None, "values": [0.0] * size}
    column = Column("x", dtype, 1, vector=True)
    array = pa.array([*made, of_zeros], VECTOR)
    dense = read_as(slab, column, [array])
    for way in ("error", "skip"):
        sparse = read_as(slab, replace(column, adapts=True), [array[:20], array[20:]], way)
        assert (sparse.num_rows, sparse.checksum) == (31, dense.checksum)
        assert [(one.name, one.spec, one.problem) for one in sparse.adapted] == [
            ("x", Sparse(size), None)
        ]
        (numbers, found), (wanted, vectors) = all_rows(sparse), all_rows(dense)
        assert numbers.tolist() == wanted.tolist()
        assert isinstance(found, Ragged)
        for row, vector in zip(found, vectors, strict=True):
            again = np.zeros(size, dtype)
            again[row[:, 0].astype(int)] = row[:, 1]
            np.testing.assert_array_equal(again, vector)
        assert found.nbytes < 31 * 6 * 16 + 8 * 32


def test_a_label_that_is_missing_late_is_noted_and_tried(slab: SlabConfig) -> None:
    column = Column("x", "float32", label=True, adapts=True)
    batches = [pa.array(range(90), pa.float64()), pa.array([7.0, None, float("nan"), 8.0])]
    handle = read_as(slab, column, batches)
    (note,) = handle.adapted
    assert note.spec == Masked()
    assert note.problem is not None
    assert (note.problem.row, note.problem.text) == (91, "is null")
    assert [str(field) for field in handle.fields] == ["int64", "float32"]
    preview = Preview.of([handle])
    rows = preview.read(0, handle)[1]
    assert np.isnan(rows[: len(rows) - preview.more]).sum() == 1
    assert read_as(slab, replace(column, adapts=False), batches).problem == note.problem
    assert read_as(slab, replace(column, adapts=False), batches, "skip").num_rows == 92


def test_a_column_that_asks_for_another_form_each_time_is_an_error() -> None:
    columns: Any = {}
    for reading in range(1, MOST_READINGS):
        asked = ReadOtherwise.of("is longer.", "x", Varying(padding=reading))
        columns = read_again(columns, asked, reading)
        assert columns == {"x": Varying(padding=reading)}
    with pytest.raises(DataError, match=r"is longer\. Give columns="):
        read_again(columns, asked, MOST_READINGS)


def test_lists_that_vary_after_others_are_to_be_read_again(slab: SlabConfig) -> None:
    """In later rows, in another task, or in another partition."""
    column = Column("x", "float64", 2, spec=Varying(), adapts=True)
    same, vary = pa.array([[[1.0, 2.0]], []]), pa.array([[[1.0], [2.0, 3.0]]])
    handles = [read_as(slab, column, one) for one in ([same], [vary], [same, vary], [vary, same])]
    assert [handle.num_rows for handle in handles] == [2, 1, 0, 3]
    wanted = {"x": Varying(Varying())}
    for some in ([handles[2]], handles[:2], handles[1::-1]):
        with pytest.raises(ReadOtherwise) as caught:
            check_handles(some, "column")
        assert pickle.loads(pickle.dumps(caught.value)).specs == wanted
    check_handles([handles[1], handles[3]], "column")
    assert handles[1].fields == handles[3].fields
    again = [read_as(slab, replace(column, spec=wanted["x"]), one) for one in ([same], [vary])]
    check_handles(again, "column")
    assert [handle.adapted for handle in again] == [(), ()]
    one, other = PartitionWriter(slab, 0), PartitionWriter(slab, 1)
    task = WriteDataFrame(slab, (column,))
    for writer, rows in ((one, same), (other, vary)):
        task.write(
            [pa.RecordBatch.from_arrays([rows, pa.array([0] * len(rows))], ["x", "p"])], writer
        )
    joined = join_partition(slab, [*one.parts(1), *other.parts(1)])
    assert joined.problem is not None
    assert joined.problem.spec == wanted["x"]


@pytest.mark.linux
def test_what_has_been_deleted_is_let_go_of(tmp_path: Path) -> None:
    """As by a worker that goes from fit to fit: memory that is mapped is not free."""
    handles, configs = [], [SlabConfig.new(str(tmp_path), name) for name in "abc"]
    for config in configs:
        handles.append(write(config, some_rows(5)))
        open_partition(handles[-1])
        if len(handles) < len(configs):
            remove_root(config)
    mapped = Path("/proc/self/maps").read_text()
    assert [config.name in mapped for config in configs] == [False, False, True]
    assert open_partition(handles[-1]).gather(np.arange(5))[0].shape == (5, 2, 3)
    close_partitions()
    remove_root(configs[-1])

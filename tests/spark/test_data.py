"""Every kind of data becomes the samples it should, however it is split and whatever is asked."""

from __future__ import annotations

import decimal
import functools
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import innards
import numpy as np
import pyarrow as pa
import pytest
import torch
from launch import in_turn, soak_but
from pyspark import StorageLevel, cloudpickle
from pyspark.ml.linalg import Matrices, Vectors
from pyspark.sql import Row, functions
from pyspark.sql.types import DoubleType, StructField, StructType, UserDefinedType
from sample_reader import Reader, same
from torch import nn

import sparkdl
from sparkdl.data import samples as module
from sparkdl.data.arrow_tasks import _with_zeros, bad_rows
from sparkdl.data.columns.base import Column
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import open_partition
from sparkdl.data.records import Sample
from sparkdl.data.samples import SampleSet, Source, check_handles, materialize, materialize_here
from sparkdl.spark.executors import own_properties
from sparkdl.spark.frames import map_frames

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def reader(spark: Any) -> Iterator[Reader]:
    reader = Reader(spark)
    yield reader
    reader.close()


def sorted_rows(array: np.ndarray) -> list[Any]:
    return sorted(array.tolist())


COLUMNS = [
    ("tinyint", [1, -2, 3], "int8", ()),
    ("smallint", [1, -2, 3], "int16", ()),
    ("int", [1, -2, 3], "int32", ()),
    ("bigint", [1, -2, 2**60], "int64", ()),
    ("float", [0.5, -2.0, 3.0], "float32", ()),
    ("double", [0.5, -2.0, 3.0], "float32", ()),
    ("decimal(9,2)", [decimal.Decimal(v) for v in ("0.25", "-2.00", "3.50")], "float32", ()),
    ("decimal(38,18)", [decimal.Decimal(v) for v in ("0.25", "-2.00", "3.50")], "float32", ()),
    ("boolean", [True, False, True], "bool", ()),
    ("array<double>", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32", (2,)),
    ("array<bigint>", [[1, 2], [3, 4], [5, 6]], "int64", (2,)),
    ("array<boolean>", [[True, False], [True, True], [False, False]], "bool", (2,)),
    (
        "array<decimal(9,2)>",
        [[decimal.Decimal("0.25")], [decimal.Decimal("1")], [decimal.Decimal("2")]],
        "float32",
        (1,),
    ),
    ("array<array<float>>", [[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], "float32", (1, 2)),
    (
        "array<array<array<tinyint>>>",
        [[[[i, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 1], [2, 3]]] for i in range(3)],
        "int8",
        (3, 2, 2),
    ),
]


@pytest.mark.parametrize("here", [False, True], ids=["tasks", "here"])
def test_a_column_becomes_its_tensor(reader: Reader, here: bool) -> None:
    """All kinds at once, as several inputs and several labels."""
    schema = ", ".join(f"c{n} {kind}" for n, (kind, *_) in enumerate(COLUMNS))
    data = reader.spark.createDataFrame(
        list(zip(*[values for _, values, _, _ in COLUMNS], strict=True)), schema
    )
    names = data.columns
    samples = reader.samples(data, names[:9], names[9:], here=here)
    assert samples.num_features == 9
    assert sum(samples.counts) == 3
    assert [(f.dtype, f.shape) for f in samples.fields] == [(d, s) for _, _, d, s in COLUMNS]
    for (_, values, dtype, _), found in zip(COLUMNS, reader.rows(samples), strict=True):
        assert sorted_rows(found) == sorted_rows(np.array(values, dtype=dtype))


def test_float64_models_get_float64(reader: Reader) -> None:
    data = reader.spark.createDataFrame([(1 / 3, Vectors.dense([1 / 3]))] * 2, ["x", "v"])
    x, v = reader.rows(reader.samples(data, ["x"], ["v"], dtype="float64", here=True))
    assert x.dtype == v.dtype == np.float64
    assert (x == 1 / 3).all()
    assert (v == 1 / 3).all()


def test_no_label(reader: Reader) -> None:
    data = reader.spark.createDataFrame([(1.0,), (2.0,)], "x double")
    samples = reader.samples(data, ["x"], [])
    assert (len(samples.fields), samples.num_features) == (1, 1)


NAMES = ["a.b", "with space", "größe", "数", "a`b", "select", "c0", "a,b(c)"]


def test_any_column_name(reader: Reader) -> None:
    data = reader.spark.createDataFrame([(float(i),) * len(NAMES) for i in range(4)], NAMES)
    samples = reader.samples(data, NAMES[:-1], NAMES[-1:], replicas=3)
    assert [field.name for field in samples.fields] == NAMES
    for column in reader.rows(samples):
        assert sorted_rows(column) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("here", [False, True], ids=["tasks", "here"])
def test_one_column_as_input_and_label(reader: Reader, here: bool) -> None:
    data = reader.spark.createDataFrame([([float(i), 1.0],) for i in range(5)], "x array<float>")
    first, second, label = reader.rows(reader.samples(data, ["x", "x"], ["x"], 3, here=here))
    np.testing.assert_array_equal(first, label)
    np.testing.assert_array_equal(second, label)
    assert len(label) == 5


class Point:
    def __init__(self, x: float, y: float) -> None:
        self.x, self.y = x, y


class PointUDT(UserDefinedType):
    @classmethod
    def sqlType(cls) -> StructType:
        return StructType([StructField("x", DoubleType()), StructField("y", DoubleType())])

    @classmethod
    def module(cls) -> str:
        return "test_data"

    def serialize(self, obj: Point) -> tuple[float, float]:
        return (obj.x, obj.y)

    def deserialize(self, datum: Any) -> Point:
        return Point(*datum)


Point.__UDT__ = PointUDT()  # type: ignore[attr-defined]


def test_a_udt_column_beside_and_a_udt_column_used(reader: Reader) -> None:
    points = StructType([StructField("p", PointUDT()), StructField("x", DoubleType())])
    data = reader.spark.createDataFrame([(Point(1.0, 2.0), 3.0)] * 2, points)
    assert reader.rows(reader.samples(data, ["x"], []))[0].tolist() == [3.0, 3.0]
    with pytest.raises(sparkdl.DataError, match='feature column "p" is of type'):
        reader.samples(data, ["p"], [])


# Partitions.


def numbers(spark: Any, partitions: int = 2, count: int = 40) -> Any:
    return spark.range(0, count, 1, partitions).selectExpr(
        "array(cast(id as double), sin(id)) as features", "cast(id % 3 as int) as label"
    )


SPLITS: dict[str, Callable[[Any], Any]] = {
    "one partition": lambda df: df.coalesce(1),
    "as many as replicas": lambda df: df.coalesce(3),
    "seven partitions": lambda df: df.repartition(7),
    "sorted backwards": lambda df: df.orderBy(functions.desc("features")),
    "union of halves": lambda df: df.filter("label > 0").union(df.filter("label = 0")),
    "cached": lambda df: df.repartition(5).cache(),
    "an upstream shuffle": lambda df: df.groupBy("features").agg(
        functions.max("label").alias("label")
    ),
    "through a join": lambda df: df.join(df.select("features").distinct(), "features"),
    "other columns between": lambda df: df.select(
        "label", functions.rand(1).alias("r"), "features"
    ),
}


@pytest.fixture(scope="module")
def reference(spark: Any) -> Iterator[SampleSet]:
    reader = Reader(spark)
    yield reader.samples(numbers(spark, 5), replicas=3)
    reader.close()


@pytest.mark.parametrize(
    "split",
    soak_but(
        ["one partition", "seven partitions", "an upstream shuffle", "through a join"], SPLITS
    ),
)
def test_redistributed_rows_do_not_remember_their_split(
    reader: Reader, reference: SampleSet, split: str
) -> None:
    data = SPLITS[split](numbers(reader.spark, 4))
    samples = reader.samples(data, replicas=3)
    data.unpersist()
    assert same(samples, reference)
    assert sum(samples.counts) == 40
    for found, expected in zip(reader.rows(samples), reader.rows(reference), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("cached", "adaptive"), in_turn([False, True], ["true", "false"]))
def test_partitions_of_a_shuffle_are_none(
    reader: Reader, reference: SampleSet, adaptive: str, cached: bool
) -> None:
    rows = [(row.features, row.label) for row in numbers(reader.spark, 3).collect()]
    made = reader.spark.createDataFrame(
        records(reader, rows, 3), "features array<double>, label int"
    )
    before = reader.spark.conf.get("spark.sql.adaptive.enabled")
    reader.spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        data = made.repartition(3)
        assert same(reader.samples(data.cache() if cached else data, replicas=3), reference)
        data.unpersist()
    finally:
        reader.spark.conf.set("spark.sql.adaptive.enabled", before)


@pytest.mark.parametrize(
    ("kind", "here"), in_turn(["RDD", "DataFrame", "cached", "cached table"], [False, True])
)
def test_partitions_of_an_rdd_are_kept_where_their_number_fits(
    reader: Reader, kind: str, here: bool, request: pytest.FixtureRequest
) -> None:
    data = records(reader, [([float(i)], 0) for i in range(40)], 3)
    if kind != "RDD":
        data = reader.spark.createDataFrame(data, "features array<float>, label int")
        if kind == "cached table":
            data.createOrReplaceTempView("kept")
            reader.spark.catalog.cacheTable("kept")
            request.addfinalizer(lambda: reader.spark.catalog.uncacheTable("kept"))
            data = reader.spark.table("kept")
        elif kind == "cached":
            request.addfinalizer(data.cache().unpersist)
        data = data.withColumn("label", data.label + 1)
    samples = reader.samples(data, replicas=3, here=here)
    kept = [
        sorted_rows(open_partition(h).gather(np.arange(h.num_rows))[0][:, 0])
        for h in samples.handles
    ]
    assert kept == [
        [float(i) for i in range(start, stop)] for start, stop in ((0, 13), (13, 26), (26, 40))
    ]


def test_the_order_inside_a_partition_does_not_count(reader: Reader) -> None:
    data = numbers(reader.spark, 2)
    backwards = data.sortWithinPartitions(functions.desc("features"))
    one, other = reader.samples(data), reader.samples(backwards)
    assert same(one, other)
    for left, right in zip(reader.rows(one), reader.rows(other), strict=True):
        np.testing.assert_array_equal(left, right)


def test_uneven_and_empty_partitions(reader: Reader) -> None:
    values = [([float(i), math.sin(i)], i % 3) for i in range(40)]
    data = records(reader, values, 4).filter(lambda v: v[0][0] < 12 or v[0][0] == 33)
    samples = reader.samples(data, replicas=4)
    assert samples.counts == (10, 2, 0, 1)
    assert samples.handles[2].fields == ()
    assert sorted_rows(reader.rows(samples)[0][:, 0]) == [*map(float, range(12)), 33.0]
    trainer = sparkdl.Trainer(
        model=lambda: nn.Linear(2, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        replicas=4,
        batch_size=5,
        stop=sparkdl.max_epoch(1),
    )
    assert sum(e["samples"] for e in trainer.fit(data).history.epochs()) == 13


def test_more_replicas_than_rows(reader: Reader) -> None:
    samples = reader.samples(numbers(reader.spark, 2, count=2), replicas=5)
    assert len(samples.counts) == 5
    assert sum(samples.counts) == 2


EQUAL = {
    "one kind": (["1"], [400]),
    "two kinds": (["id % 2"], [200, 200]),
    "more kinds than replicas": (["id % 7"], [57] * 6 + [58]),
    "fewer copies than replicas": (["id"], [2]),
    "one among different rows": (["id", "0", "id + 1000"], [401]),
}
"""The values of some rows each, and how many copies the rows have that are spread."""


@pytest.mark.parametrize(("kind", "form"), in_turn(EQUAL, ["table", "records"]))
def test_equal_rows_are_spread_evenly(
    reader: Reader, kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes the rows, and however they were split, each replica has its share of them."""
    values, copies = EQUAL[kind]
    count, replicas = (3, 4) if copies == [2] else (400, 4)
    tables = [
        reader.spark.range(count).selectExpr(
            f"array(float({value}), 1F) features",
            "array_repeat(7, int(1 + id * 0)) tokens",
            "3L label",
        )
        for value in values
    ]
    data = functools.reduce(lambda one, other: one.union(other), tables)
    if copies == [2]:
        data = data.union(data)
    columns = {} if form == "records" else {"tokens": sparkdl.Sequence(padding=-1)}
    names = ("features",) if form == "records" else ("features", "tokens")

    def placed(make: Callable[..., SampleSet], parts: int) -> SampleSet:
        rows: Any = data.repartition(parts)
        if form == "records":
            rows = rows.rdd.map(lambda row: (row.features, row.label))
        source = Source(rows, names, ("label",), replicas, "float32", reader.slab, columns)
        return make(source)

    stay = placed(lambda source: materialize(source, reader.persist), 3)
    here = placed(materialize_here, 5)
    monkeypatch.setattr(module, "is_local", lambda context: False)
    move = placed(lambda source: materialize(source, reader.persist), 2)
    assert same(stay, here)
    assert same(stay, move)
    assert sum(stay.counts) == data.count()
    found: dict[float, list[int]] = {}
    for number, handle in enumerate(stay.handles):
        for samples in (here, move):
            assert contents(samples.handles[number]) == contents(handle)
        for row in contents(handle)[0]:
            found.setdefault(row[0], [0] * replicas)[number] += 1
    for each in found.values():
        if sum(each) in copies:
            assert max(each) - min(each) <= 1
    assert max(stay.counts) <= 1.3 * sum(stay.counts) / replicas + 2
    integers = [e for h in stay.handles for e in h.extremes if not e.of_length]
    assert {(e.field, e.value) for e in integers} >= {(len(names), 3)}


def contents(handle: SampleHandle) -> list[list[Any]]:
    """The rows of a partition in order, a list for each field."""
    gathered = open_partition(handle).gather(np.arange(handle.num_rows)) if handle.num_rows else []
    return [[row.tolist() for row in rows] for rows in gathered] or [[]]


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_local_engine_sees_the_same_partitions(reader: Reader, replicas: int) -> None:
    data = numbers(reader.spark, 2)
    there = reader.samples(data, replicas=replicas)
    here = reader.samples(data, replicas=replicas, here=True)
    assert same(there, here)
    for left, right in zip(reader.rows(there), reader.rows(here), strict=True):
        np.testing.assert_array_equal(left, right)
    for left, right in zip(there.preview, here.preview, strict=True):
        assert isinstance(left, np.ndarray)
        assert isinstance(right, np.ndarray)
        np.testing.assert_array_equal(left[:2], right[:2])  # then any rows with extreme values
        if left.dtype.kind == "i":
            assert (left.min(), left.max()) == (right.min(), right.max()) == (0, 2)


def test_the_local_engine_has_few_files_of_many_partitions(reader: Reader) -> None:
    """A file that is mapped holds a descriptor, of which a process has 1,024 as a rule."""
    data = numbers(reader.spark, 60, count=240)
    there = reader.samples(data)
    highest = max(map(int, os.listdir("/dev/fd")))
    held = [os.dup(0)]  # no number below the highest is free, whatever tests before left open
    while held[-1] <= highest:
        held.append(os.dup(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 60, hard))
    try:
        here = reader.samples(data, here=True)
        rows = reader.rows(here)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            os.close(file)
    assert same(there, here)
    for left, right in zip(reader.rows(there), rows, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("replicas", soak_but([3], [3, 7]))
def test_rows_that_stay_and_rows_that_move_make_the_same_partitions(
    reader: Reader, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node rows stay where they are read; in a cluster a shuffle takes them along."""
    data = reader.spark.range(500).selectExpr(
        "array(float(id), float(-0.0), float(id % 7)) AS features",
        "decimal(id) / 3 AS other",
        "id % 5 = 0 AS flag",
        "sequence(0, id % 4) AS tokens",
        "map(id, 1.5) AS odd",
        "id AS label",
    )
    data = data.union(data.limit(50)).repartition(5)  # some rows twice
    columns = {"tokens": sparkdl.Sequence(), "odd": sparkdl.Convert(first_key)}
    names = ("features", "other", "flag", "tokens", "odd")
    source = Source(data, names, ("label",), replicas, "float32", reader.slab, columns)
    stay = materialize(source, reader.persist)
    monkeypatch.setattr(module, "is_local", lambda context: False)
    move = materialize(source, reader.persist)
    assert same(stay, move)
    assert sum(stay.counts) == 550
    files = {segment for handle in stay.handles for segment in handle.segments}
    assert len(files) == 5  # one for each partition of the source, all partitions in each
    for one, other in zip(stay.handles, move.handles, strict=True):
        rows = np.arange(one.num_rows)
        found, expected = (open_partition(h).gather(rows) for h in (one, other))
        assert [[r.tolist() for r in c] for c in found] == [
            [r.tolist() for r in c] for c in expected
        ]


def first_key(value: Any) -> float:
    return float(value[0][0])


@pytest.mark.parametrize(
    "kind", ["redistributed", "equal rows", "kept", "records", "upstream shuffle"]
)
def test_a_lost_partition_is_computed_again(reader: Reader, kind: str) -> None:
    data = {
        "redistributed": lambda: numbers(reader.spark, 4),
        "equal rows": lambda: numbers(reader.spark, 4).selectExpr("array(1F) features", "label"),
        "kept": lambda: reader.spark.createDataFrame(numbers(reader.spark, 3).rdd),
        "records": lambda: numbers(reader.spark, 4).rdd.map(lambda r: (list(r[0]), r[1])),
        "upstream shuffle": lambda: (
            numbers(reader.spark, 4)
            .groupBy("features")
            .max()
            .select("features", functions.col("max(label)").alias("label"))
        ),
    }[kind]()
    samples = reader.samples(data, replicas=3)
    before = reader.rows(samples)
    assert samples.rdd is not None
    samples.rdd.unpersist(blocking=True)
    samples.rdd.persist(StorageLevel.MEMORY_AND_DISK)
    again = [handle_of(frame) for frame in samples.rdd.collect()]
    check_handles(again, "column")
    assert [h.checksum for h in again] == [h.checksum for h in samples.handles]
    assert {s for h in again for s in h.segments}.isdisjoint(
        s for h in samples.handles for s in h.segments
    )
    after = reader.rows(SampleSet(None, tuple(again), samples.fields, 1, []))
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    "kind",
    soak_but(
        ["redistributed", "a table of them"],
        ["kept", "redistributed", "a table of them", "in a cluster"],
    ),
)
def test_a_shuffle_of_the_user_stays(
    reader: Reader, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of another thread may be reading it, and would find it empty."""
    context = reader.context
    values = context.parallelize([([float(i)], i % 3) for i in range(40)], 4).repartition(3)
    assert values.count() == 40
    data, before = values, set(innards.files(context, "shuffle"))
    if kind in ("a table of them", "in a cluster"):
        data = reader.spark.createDataFrame(values, "features array<float>, label long")
        monkeypatch.setattr(module, "is_local", lambda context: kind == "a table of them")
    samples = reader.samples(data, replicas=3 if kind == "kept" else 2)
    assert sum(samples.counts) == 40
    assert innards.eventually(lambda: before.issuperset(innards.files(context, "shuffle")))
    jobs = context.statusTracker()
    with own_properties(context):
        context.setJobGroup(f"again, {kind}", "")
        assert values.count() == 40
    (job,) = jobs.getJobIdsForGroup(f"again, {kind}")
    stages = [jobs.getStageInfo(stage) for stage in jobs.getJobInfo(job).stageIds]
    assert sorted(stage.numCompletedTasks if stage else 0 for stage in stages) == [0, 3]


def handle_of(frame: bytes) -> Any:
    import pickle

    return pickle.loads(frame)


def test_the_rdd_holds_one_small_frame_a_partition(reader: Reader) -> None:
    samples = reader.samples(numbers(reader.spark, 3, count=3000), replicas=3)
    assert samples.rdd is not None
    sizes = map_frames(samples.rdd, frame_sizes).collect()
    assert len(sizes) == 3
    assert max(int(size) for size in sizes) < 2000


def frame_sizes(partition: int, frames: Any) -> Iterator[bytes]:
    yield b",".join(str(len(frame)).encode() for frame in frames)


# RDDs.


def records(reader: Reader, values: list[Any], partitions: int = 2) -> Any:
    return reader.context.parallelize(values, partitions)


class Reversed(NamedTuple):
    """A record whose label comes first."""

    label: int
    features: list[float]


PAIRS = {
    "lists": [([1.0, float(i)], i % 3) for i in range(20)],
    "arrays": [(np.array([1.0, float(i)]), np.int64(i % 3)) for i in range(20)],
    "float32 arrays": [(np.array([1.0, i], dtype=np.float32), i % 3) for i in range(20)],
    "tensors": [(torch.tensor([1.0, float(i)]), torch.tensor(i % 3)) for i in range(20)],
    "vectors": [(Vectors.dense([1.0, float(i)]), i % 3) for i in range(20)],
    "rows": [Row(label=i % 3, features=[1.0, float(i)]) for i in range(20)],
    "rows with more": [Row(id=i, label=i % 3, features=[1.0, float(i)]) for i in range(20)],
    "named tuples": [Reversed(i % 3, [1.0, float(i)]) for i in range(20)],
    "mappings": [{"label": i % 3, "features": [1.0, float(i)]} for i in range(20)],
    "samples": [Sample([1.0, float(i)], i % 3) for i in range(20)],
    "samples of tensors": [Sample(torch.tensor([1.0, float(i)]), i % 3) for i in range(20)],
}


@pytest.fixture(scope="module")
def of_lists(spark: Any) -> Iterator[tuple[SampleSet, SampleSet]]:
    """The samples of lists in two partitions, and of one partition that was redistributed."""
    reader = Reader(spark)
    yield (
        reader.samples(records(reader, PAIRS["lists"]), here=True),
        reader.samples(records(reader, PAIRS["lists"], 1), replicas=3, here=True),
    )
    reader.close()


@pytest.mark.parametrize("values", PAIRS.values(), ids=PAIRS)
def test_records_become_the_same_samples(
    reader: Reader, of_lists: tuple[SampleSet, SampleSet], values: list[Any]
) -> None:
    """Redistributed ones do not remember their split, nor what they were made of: the content decides,
    not a pickle, which may hold an address."""
    expected, redistributed = of_lists
    samples = reader.samples(records(reader, values))
    assert same(samples, expected)
    assert [(f.name, f.dtype, f.shape) for f in samples.fields] == [
        ("features", "float32", (2,)),
        ("label", "int64", ()),
    ]
    for left, right in zip(reader.rows(samples), reader.rows(expected), strict=True):
        np.testing.assert_array_equal(left, right)

    samples = reader.samples(records(reader, values[::-1], 4), replicas=3, here=True)
    assert same(samples, redistributed)
    assert min(samples.counts) > 0


def test_records_with_several_inputs_and_labels(reader: Reader) -> None:
    values = [
        Sample(([float(i), 1.0], torch.tensor(i), Matrices.dense(1, 2, [1.0, 2.0])), (i % 2, 0.5))
        for i in range(4)
    ]
    samples = reader.samples(records(reader, values))
    assert samples.num_features == 3
    assert [(f.name, f.dtype, f.shape) for f in samples.fields] == [
        ("features[0]", "float32", (2,)),
        ("features[1]", "int64", ()),
        ("features[2]", "float32", (1, 2)),
        ("label[0]", "int64", ()),
        ("label[1]", "float32", ()),
    ]


def test_records_without_a_label(reader: Reader) -> None:
    bare = reader.samples(records(reader, [[1.0, 2.0]] * 4), label=())
    for one in (Sample([1.0, 2.0]), Row(label=3, features=[1.0, 2.0]), Row(x=[1.0, 2.0])):
        assert same(bare, reader.samples(records(reader, [one] * 4), label=()))
    assert [field.name for field in bare.fields] == ["features"]


def test_a_dataframe_and_its_records_agree(reader: Reader) -> None:
    data = numbers(reader.spark, 2).withColumn("label", functions.col("label").cast("long"))
    frame = reader.samples(data, replicas=1)
    rdd = reader.samples(data.rdd.map(lambda row: (row.features, row.label)), replicas=1)
    assert [h.checksum for h in frame.handles] == [h.checksum for h in rdd.handles]
    some = data.select(functions.col("label").alias("b"), functions.col("features").alias("a"))
    several = reader.samples(some.rdd, ("a", "b"), ("b",), replicas=1)
    assert [h.checksum for h in several.handles] == [
        h.checksum for h in reader.samples(some, ("a", "b"), ("b",), replicas=1).handles
    ]


# What the model is tried on.


def test_the_preview_has_the_extreme_integers(reader: Reader) -> None:
    data = reader.spark.range(0, 1000, 1, 4).selectExpr(
        "float(id) as x",
        "array(int(0), int(id = 777) * 9 - int(id = 3) * 5) as words",
        "int(id % 3) + int(id = 501) * 40 as label",
    )
    for here in (False, True):
        samples = reader.samples(data, ["x", "words"], ["label"], replicas=4, here=here)
        _, words, label = samples.preview
        assert (words.min(), words.max()) == (-5, 9)
        assert (label.min(), label.max()) == (0, 40)
        assert len(label) <= 6


def test_the_preview_of_one_row_repeats_it(reader: Reader) -> None:
    samples = reader.samples(numbers(reader.spark, 1, count=1), replicas=1, here=True)
    assert [len(array) for array in samples.preview] == [2, 2]


def _fit(data: Any, engine: str = "local", **how: Any) -> sparkdl.TrainedModel:
    how = {"replicas": 2, "key": "id", "handle_invalid": "skip", **how}
    return sparkdl.Trainer(
        model=functools.partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        batch_size=10,
        engine=engine,
        stop=sparkdl.max_epoch(2),
        **how,
    ).fit(data)


BAD_ROWS = {3: ("features", "is null"), 11: ("features", "holds NaN"), 20: ("label", "is null")}
PARTLY_BAD = "IF(id = 3, NULL, array(id / 40f, IF(id = 11, float('NaN'), 1f))) AS features"


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_rows_that_cannot_be_read_are_left_out(spark: Any, engine: str, caplog: Any) -> None:
    """The fit is that of the other rows, bit by bit; the log and the history tell of them."""
    data = spark.range(40).selectExpr(
        "id", PARTLY_BAD, "IF(id = 20, NULL, array(id / 40f)) AS label"
    )
    good = data.where("id NOT IN (3, 11, 20)")
    validation = sparkdl.Validation(data.where("id > 15"))
    left_out = _fit(data, engine, validation=validation)
    other = _fit(good, engine)
    assert torch.equal(left_out.module.weight, other.module.weight)
    found = left_out.history.invalid
    assert {role: (one["count"], one["rows"]) for role, one in found.items()} == {
        "training": (3, 40), "validation": (1, 24)
    }  # fmt: skip
    told = {int(row["key"]): (row["column"], row["reason"]) for row in found["training"]["first"]}
    assert told == BAD_ROWS
    told_in_log = "\n".join(caplog.messages)
    assert "3 of 40 rows cannot be read, and are left out: " in told_in_log
    longer = data.withColumn("features", functions.expr("IF(id = 5, array(1f, 2f, 3f), features)"))
    for rows, usable in ((longer, good.where("id != 5")), (data, good)):
        scored = [left_out.evaluate(some, ["mae"], 7, None, "skip") for some in (rows, usable)]
        assert scored[0] == pytest.approx(scored[1])
    reasons = [f'column "{name}" {text} (1)' for name, text in BAD_ROWS.values()]
    told_in_log = "\n".join(caplog.messages)
    assert f"3 rows cannot be read: {', '.join(reasons)}." in told_in_log
    assert sparkdl.History.from_bytes(left_out.history.to_bytes()).invalid == found
    assert other.history.invalid == {}
    records = data.rdd.repartition(2)
    by_record = _fit(records, engine, features=["features"], label=["label"])
    assert {row["key"] for row in by_record.history.invalid["training"]["first"]} == {
        "3",
        "11",
        "20",
    }
    with pytest.raises(
        sparkdl.DataError, match=r'none of the 1 rows .*: 3, column "features": is null'
    ):
        _fit(data.where("id = 3"), engine)
    with pytest.raises(sparkdl.DataError, match=r'the key column "ID2" is missing'):
        _fit(data, engine, key="ID2")


def test_rows_that_cannot_be_read_are_zeros(spark: Any) -> None:
    """Arrays, and sequences of one element; a label has no such stand-in."""
    data = spark.range(30).selectExpr(
        "id", "IF(id = 3, NULL, array(id / 40f, 1f)) AS features", "array(id / 40f) AS label"
    )
    zeros = data.withColumn("features", functions.expr("coalesce(features, array(0f, 0f))"))
    how: dict[str, Any] = {"replicas": 1}
    kept, other = _fit(data, handle_invalid="keep", **how), _fit(zeros, **how)
    assert torch.equal(kept.module.weight, other.module.weight)
    assert (
        kept.history.invalid["training"]["count"],
        kept.history.invalid["training"]["rows"],
    ) == (1, 30)
    bad_label = data.withColumn("label", functions.expr("IF(id = 4, NULL, label)"))
    with pytest.raises(
        sparkdl.DataError, match=r'column "label", row 4 .*use handle_invalid="skip"'
    ):
        _fit(bad_label, handle_invalid="keep", **how)
    with pytest.raises(sparkdl.DataError, match='"keep" is for DataFrames'):
        _fit(data.rdd, handle_invalid="keep", **how)


def test_sequences_that_cannot_be_read_are_one_zero() -> None:
    column = Column("ids", "int64", 1, spec=sparkdl.Sequence())
    array = pa.array([[1, 2], None, [3]], pa.list_(pa.int64()))
    assert dict(bad_rows(array, column)).keys() == {1}
    found = _with_zeros(array, column, {1: "is null"}, None, 0)
    assert [row.tolist() for row in found] == [[1, 2], [0], [3]]

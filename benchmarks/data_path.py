"""How fast samples get into the slabs and mini-batches out of them, each beside its baseline.

    python benchmarks/data_path.py [--rows 1000000] [--rounds 5] [--only ingest,gather,transform]

*Ingest*: a DataFrame of ``--rows`` rows of array<float> (100 values) and a label, read from Parquet
(8 files, uncompressed random floats), becomes the sample RDD of 2 replicas in ``local[2]``. Beside
it, in turns in the same session: Spark writing that DataFrame as Parquet, and a bare ``mapInArrow``
that writes an Arrow file a partition into /dev/shm. One round warms up; medians of the others,
seconds, and seconds of all processors' time, which says more where the machine is busy.

*Gather*: mini-batches of random rows out of the mapped files of a partition, for several sizes of
rows, batches and files; beside it a copy of as many rows that
lie side by side. GB/s.

*Transform*: predictions of a linear model for the same DataFrame, dropped; and the bare scan.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from torch import nn
from usage import cpu_seconds

import sparkdl
from sparkdl.data.partition_reader import open_partition
from sparkdl.data.partition_writer import PartitionWriter, join_partition
from sparkdl.data.samples import Source, materialize
from sparkdl.slab.root import SlabConfig, remove_root

WIDTH = 100
FILES = 8


def random_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Task: a row of random floats, and a class, for each number."""
    for batch in batches:
        numbers = batch.column(0).to_numpy()
        draw = np.random.default_rng(int(numbers[0]))
        values = draw.random(len(numbers) * WIDTH, dtype=np.float32)
        offsets = np.arange(0, len(values) + 1, WIDTH, dtype=np.int32)
        yield pa.RecordBatch.from_arrays(
            [pa.ListArray.from_arrays(offsets, pa.array(values)), pa.array(numbers % 10)],
            names=["features", "label"],
        )


def write_bare(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Task: the least that any ingest must do."""
    path = f"/dev/shm/data-path-{secrets.token_hex(8)}.arrow"
    writer, rows = None, 0
    with pa.OSFile(path, "wb") as sink:
        for batch in batches:
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
        if writer:
            writer.close()
    os.unlink(path)
    yield pa.RecordBatch.from_pydict({"rows": [rows]})


def ingest(data: DataFrame) -> int:
    """As a fit does it; the rows."""
    context = data.sparkSession.sparkContext
    slab, rdds = SlabConfig.new("/dev/shm", context.applicationId), []

    def persist(rdd):
        rdds.append(rdd.persist(StorageLevel.MEMORY_AND_DISK))
        return rdd

    try:
        samples = materialize(Source(data, ("features",), ("label",), 2, "float32", slab), persist)
        return sum(samples.counts)
    finally:
        for rdd in rdds:
            rdd.unpersist()
        remove_root(slab)


def bare(data: DataFrame) -> int:
    return sum(row[0] for row in data.mapInArrow(write_bare, "rows long").collect())


def as_parquet(folder: str) -> Callable[[DataFrame], int]:
    def write(data: DataFrame) -> int:
        data.write.mode("overwrite").parquet(f"{folder}/copy")
        return -1

    return write


def scan(data: DataFrame) -> int:
    data.write.format("noop").mode("overwrite").save()
    return -1


def in_turns(
    legs: dict[str, Callable[[DataFrame], int]], data: DataFrame, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of each leg, and of processor time."""
    rows, found = data.count(), {name: [] for name in legs}
    for _ in range(rounds + 1):
        for name, leg in legs.items():
            started, busy = time.perf_counter(), cpu_seconds()
            assert leg(data) in (rows, -1)
            found[name].append((time.perf_counter() - started, cpu_seconds() - busy))
    return {
        name: (statistics.median(s for s, _ in some[1:]), statistics.median(c for _, c in some[1:]))
        for name, some in found.items()
    }


def measure_ingest(data: DataFrame, folder: str, rounds: int) -> None:
    legs = {"ingest": ingest, "write Parquet": as_parquet(folder), "bare mapInArrow": bare}
    found = in_turns(legs, data, rounds)
    print(f"\n{data.rdd.getNumPartitions()} partitions are read")
    whole, all_busy = found["write Parquet"]
    for name, (seconds, busy) in found.items():
        print(
            f"{name:>16}: {seconds:6.2f} s, {seconds / whole:5.2f} x write Parquet; "
            f"processors {busy:6.2f} s, {busy / all_busy:5.2f} x"
        )


def measure_transform(data: DataFrame, rounds: int) -> None:
    spark = data.sparkSession
    trained = sparkdl.Trainer(
        model=lambda: nn.Linear(WIDTH, 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        batch_size=1000,
        stop=sparkdl.max_iteration(1),
        engine="local",
    ).fit(spark.createDataFrame(data.limit(2000).toArrow()))
    legs = {"transform": lambda frame: scan(trained.transform(frame)), "scan": scan}
    found = in_turns(legs, data, rounds)
    rows = data.count()
    print()
    for name, (seconds, busy) in found.items():
        print(f"{name:>16}: {seconds:6.2f} s, {rows / seconds / 1e6:5.2f} M rows/s; {busy:6.2f} s")


def measure_gather() -> None:
    """One process, files in /dev/shm; about 256 MB of rows."""
    print(f"\n{'row':>9} {'files':>6} {'batch':>6} {'gather':>12} {'copy':>12}   ratio")
    draw = np.random.default_rng(0)
    for width in (10, 100, 3072):
        rows = (256 << 20) // (4 * width)
        values = draw.random((rows, width), dtype=np.float32)
        for files in (1, 4, 16):
            slab = SlabConfig.new("/dev/shm", "data-path")
            parts = []
            for source, part in enumerate(np.array_split(values, files)):
                writer = PartitionWriter(slab, source)
                writer.add(["features"], [part], np.zeros(len(part), np.int32))
                parts += writer.parts(1)
            mapped = open_partition(join_partition(slab, parts))
            for batch in (32, 256, 4096):
                print(_gather(mapped, values, draw, batch))
            remove_root(slab)


def _gather(mapped, values, draw, batch: int) -> str:
    batches = [draw.integers(0, len(values), batch) for _ in range(max(8, 65536 // batch))]
    starts = [int(rows[0]) % (len(values) - batch) for rows in batches]
    target = np.empty_like(values[:batch])
    gathered, copied = [], []
    for _ in range(3):
        started = time.perf_counter()
        for rows in batches:
            mapped.gather(rows)
        middle = time.perf_counter()
        for start in starts:
            np.copyto(target, values[start : start + batch])
        copied.append(time.perf_counter() - middle)
        gathered.append(middle - started)
    nbytes = target.nbytes * len(batches) / 1e9
    speed, copy = nbytes / min(gathered), nbytes / min(copied)
    return (
        f"{values[0].nbytes:>7} B {len(mapped.starts):>6} {batch:>6} {speed:>7.2f} GB/s "
        f"{copy:>7.2f} GB/s   {speed / copy:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="ingest,gather,transform")
    options = parser.parse_args()
    only = options.only.split(",")
    if "gather" in only:
        measure_gather()
    if only == ["gather"]:
        return
    quiet = {"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
    spark: SparkSession = sparkdl.session("local[2]", **quiet, spark_driver_memory="2g")
    folder = tempfile.mkdtemp(prefix="data-path-")
    try:
        made = spark.range(options.rows, numPartitions=FILES)
        rows = made.mapInArrow(random_rows, "features array<float>, label long")
        rows.write.option("compression", "none").parquet(f"{folder}/data")
        size = sum(file.stat().st_size for file in Path(f"{folder}/data").glob("*.parquet"))
        print(f"{options.rows:,} rows, {size / 1e6:.0f} MB of Parquet")
        data = spark.read.parquet(f"{folder}/data")
        if "ingest" in only:
            measure_ingest(data, folder, options.rounds)
        if "transform" in only:
            measure_transform(data, options.rounds)
    finally:
        shutil.rmtree(folder)
        spark.stop()


if __name__ == "__main__":
    main()

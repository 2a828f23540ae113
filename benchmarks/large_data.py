"""A data set that is larger than the memory of any process: what does each process hold?

    python benchmarks/large_data.py [--gigabytes 4] [--limit 2] [--iterations 30] [--folder DIR]

Writes about ``--gigabytes`` GiB of Parquet (random floats, which do not compress) with Spark, and
trains a small perceptron on it in ``local[2]``: through all the data once, to put it into slabs, and
then some iterations of the first epoch. ``--limit`` GiB is the heap of the driver's JVM, which is
the executor too here, and a limit on the private memory of the Python workers and of the driver's
Python that the kernel enforces. Every 0.2 s the resident memory of all of them is read from /proc:
anonymous memory (what a process needs for itself) apart from pages of mapped files, which the kernel
drops when it wants them, and from shared memory.

The slabs lie on disk here (``spark.sparkdl.slab.dir``): /dev/shm would keep all samples in the memory
of the machine, though of no process.

Status 1 where a process exceeds its limit: ``--limit`` for a Python process; for the JVM what a
cluster would grant it, heap and overhead together (10 %, at least 384 MiB).
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from harness import session
from models import mlp
from pyspark.sql import SparkSession
from torch import nn
from usage import KINDS, PARTS, Sampler, stopwatch

import sparkdl

GIB = 1 << 30
WIDTH = 1024
CLASSES = 16
BATCH = 4096
FILES = 16
ROWS_AT_ONCE = 1024


def random_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Task: a row of random floats, and a class, for each number."""
    for batch in batches:
        numbers = batch.column(0).to_numpy()
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            part = numbers[start : start + ROWS_AT_ONCE]
            draw = np.random.default_rng(int(part[0]))
            values = draw.random(len(part) * WIDTH, dtype=np.float32)
            offsets = np.arange(0, len(values) + 1, WIDTH, dtype=np.int32)
            yield pa.RecordBatch.from_arrays(
                [pa.ListArray.from_arrays(offsets, pa.array(values)), pa.array(part % CLASSES)],
                names=["features", "label"],
            )


def write_parquet(spark: SparkSession, path: str, gigabytes: float) -> int:
    """Write the data set; its size on disk in bytes."""
    rows = int(gigabytes * GIB) // (4 * WIDTH)
    data = spark.range(rows, numPartitions=FILES)
    written = data.mapInArrow(random_rows, "features array<float>, label bigint").write
    written.option("compression", "none").option("parquet.enable.dictionary", "false").parquet(path)
    return sum(file.stat().st_size for file in Path(path).glob("*.parquet"))


@dataclass
class Phases(sparkdl.Callback):
    """Tells the sampler when training begins, and notes when each iteration ended."""

    sampler: Sampler
    ends: list[float]

    def on_fit_start(self, trainer, state) -> None:
        self.sampler.phase = "training"

    def on_iteration_end(self, trainer, state) -> None:
        self.ends.append(stopwatch())


def limited_session(folder: Path, limit: float, enforce: bool) -> SparkSession:
    """A session whose heap, and the private memory of whose workers, are limited to ``limit`` GiB."""
    os.environ["PRIVATE_MEMORY"] = str(int(limit * GIB))
    daemon = {"spark.python.daemon.module": "limited_daemon"} if enforce else {}
    return session(
        **{
            "spark.driver.memory": f"{int(limit * 1024)}m",
            "spark.local.dir": str(folder / "spark"),
            "spark.sparkdl.slab.dir": str(folder / "slabs"),
            **daemon,
        }
    )


def table(sampler: Sampler, limits: dict[str, float]) -> str:
    """Peaks in MiB."""
    head = ("process", "phase", "anonymous", "mapped", "shared", "limit")
    rows = [
        (
            kind,
            phase,
            *(f"{peak.get(part, 0) >> 20}" for part in PARTS),
            f"{limits[kind] * 1024:.0f}",
        )
        for (kind, phase), peak in sorted(sampler.peaks.items(), key=lambda item: item[0][0])
    ]
    lines = [f"{'MiB':16}{'':10}" + "".join(f"{name:>11}" for name in head[2:])]
    return "\n".join(
        lines + [f"{row[0]:16}{row[1]:10}" + "".join(f"{v:>11}" for v in row[2:]) for row in rows]
    )


def measure(folder: Path, options: argparse.Namespace) -> int:
    """Make the data, train, and print what was held; the exit status."""
    (folder / "slabs").mkdir()
    sampler = Sampler()
    sampler.start()
    spark = limited_session(folder, options.limit, options.enforce)
    if options.enforce:  # of this process, now that the JVM is out of it
        limit = int(options.limit * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        started = stopwatch()
        path = str(folder / "data.parquet")
        size = write_parquet(spark, path, options.gigabytes)
        print(f"{size / GIB:.2f} GiB of Parquet in {stopwatch() - started:.0f} s", flush=True)
        sampler.phase = "slabs"
        phases = Phases(sampler, [])
        trainer = sparkdl.Trainer(
            model=partial(mlp, WIDTH, 128, CLASSES),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch_size=BATCH,
            stop=sparkdl.max_iteration(options.iterations),
            callbacks=[phases],
        )
        started = stopwatch()
        trained = trainer.fit(spark.read.parquet(path))
    finally:
        sampler.end()
        spark.stop()
    ends = phases.ends
    each = np.median(np.diff(ends)) * 1e3
    print(
        f"samples into slabs, set-up, first iteration: {ends[0] - started:.0f} s; then "
        f"{each:.0f} ms an iteration of {BATCH} rows ({BATCH * 4 * WIDTH >> 20} MiB); "
        f"{len(trained.history)} iterations; {len(sampler.workers)} processes of workers\n"
    )
    overhead = max(0.1 * options.limit, 0.375)
    limits = dict.fromkeys(KINDS, options.limit) | {KINDS[1]: options.limit + overhead}
    print(table(sampler, limits))
    print(
        f"\nprivate memory of Python: {'enforced by RLIMIT_DATA' if options.enforce else 'measured'}"
    )
    over = [kind for kind in KINDS if sampler.peak(kind) > limits[kind] * GIB]
    for kind in over:
        print(f"{kind}: over its limit", file=sys.stderr)
    return 1 if over else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="GiB of Parquet")
    parser.add_argument("--limit", type=float, default=2.0, help="GiB for each process")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--folder", help="where to put a temporary directory: needs 3 x the data")
    parser.add_argument(
        "--measure-only", dest="enforce", action="store_false", help="set no RLIMIT_DATA"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="large-data-", dir=options.folder))
    try:
        return measure(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

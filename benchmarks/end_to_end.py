"""From a DataFrame to its predictions: sparkdl beside TorchDistributor.

    python benchmarks/end_to_end.py [--samples 200000] [--epochs 3] [--batch 1024]
        [--calls 2] [--quick]

A Parquet folder of ``array<float>`` rows (100 wide) is written first. Then sparkdl's two engines and
TorchDistributor, each in a fresh process with a session of its own in ``local[2]``, train a perceptron
on the DataFrame read from there, two replicas or ranks of one thread, Adam, the same epochs and global
batch, and predict every row (into Spark's noop sink). The clock runs from the call to the predictions;
starting the session is left out. Each calls ``--calls`` times in its session, as one does in a
notebook: the first call pays for what a session does once. TorchDistributor runs as in
``distributor.py``, in a barrier stage; its ranks are given the faster way to gather a batch. Medians
of ``--runs`` runs each, in turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import distributor
from harness import (
    RANKS,
    hardware,
    in_fresh_process,
    markdown,
    options,
    session,
    trainer,
    write_json,
)
from models import tabular
from pyspark.sql import DataFrame
from work import Work

import sparkdl


@dataclass
class Began(sparkdl.Callback):
    """When the first iteration began, and when the last had ended."""

    times: list[float] = field(default_factory=list)

    def on_fit_start(self, trainer, state) -> None:
        self.times.append(time.perf_counter())

    def on_fit_end(self, trainer, state) -> None:
        self.times.append(time.perf_counter())


def write_source(work: Work, path: str) -> None:
    spark = session()
    try:
        work.dataframe(spark, 2 * RANKS, work.samples).write.parquet(path)
    finally:
        spark.stop()


Parts = dict[str, float]
"""Seconds of each part of a call."""


def with_sparkdl(
    work: Work, path: str, batch: int, epochs: int, calls: int, engine: str = "shuffle"
) -> list[Parts]:
    """Of each call, one after another in one session."""
    spark = session()
    try:
        data = spark.read.parquet(path)
        return [_fit_and_transform(data, work, batch, epochs, engine) for _ in range(calls)]
    finally:
        spark.stop()


def _fit_and_transform(data: DataFrame, work: Work, batch: int, epochs: int, engine: str) -> Parts:
    clock = Began()
    run = trainer(work, batch, sparkdl.max_epoch(epochs), callbacks=[clock], engine=engine)
    began = time.perf_counter()
    trained = run.fit(data)
    fitted = time.perf_counter()
    trained.transform(data).write.format("noop").mode("overwrite").save()
    ended = time.perf_counter()
    first, last = clock.times
    return {
        "samples into slabs, set-up": first - began,
        "train": last - first,
        "collect the weights": fitted - last,
        "predict": ended - fitted,
        "whole": ended - began,
    }


def with_distributor(work: Work, path: str, batch: int, epochs: int, calls: int) -> list[Parts]:
    """Of each call, one after another in one session."""
    spark = session()
    found = []
    try:
        data = spark.read.parquet(path)
        for _ in range(calls):
            with tempfile.TemporaryDirectory(prefix="distributor-") as folder:
                one = distributor.fit_and_predict(data, work, batch, epochs, RANKS, Path(folder))
                found.append(one)
    finally:
        spark.stop()
    return found


def middle(runs: list[Parts]) -> Parts:
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1024, help="global")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2, help="in one session, one after another")
    given = parser.parse_args()
    if given.quick:
        given.samples, given.epochs, given.runs = 20_000, 1, 1
    work = tabular(batch=given.batch, samples=given.samples)
    print(hardware(), "\n", flush=True)
    both = {
        "sparkdl, shuffle": with_sparkdl,
        "sparkdl, gang": partial(with_sparkdl, engine="gang"),
        "TorchDistributor": with_distributor,
    }
    runs: dict[str, list[list[Parts]]] = {name: [] for name in both}
    asked = (given.batch, given.epochs, given.calls)
    with tempfile.TemporaryDirectory(prefix="end-to-end-") as folder:
        path = f"{folder}/source.parquet"
        in_fresh_process(write_source, work, path)
        for _ in range(given.runs):
            for name, run in both.items():
                runs[name].append(in_fresh_process(run, work, path, *asked))
    print(
        f"{work.name}, {work.samples:,} rows, {given.epochs} epochs of batches of {given.batch}, "
        f"{given.runs} runs each:"
    )
    figures = []
    for call in range(given.calls):
        found = {name: middle([run[call] for run in some]) for name, some in runs.items()}
        whole = found["TorchDistributor"]["whole"]
        rows = [
            (name, part, seconds, seconds / whole)
            for name, parts in found.items()
            for part, seconds in parts.items()
        ]
        print(f"\nCall {call + 1} of a session:\n")
        print(markdown(("", "part", "seconds", "/ TorchDistributor, whole"), rows))
        figures.append(found)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()

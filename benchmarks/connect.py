"""A gang over Spark Connect beside one in a classic session, and beside PySpark's TorchDistributor.

They have the same model, rows, batches and machine.

    python benchmarks/connect.py [--works mlp:256,mlp:1024] [--steps 200] [--rounds 3]

Each in a fresh process and a fresh ``local[2]``, whose workers have torch loaded. "fit" is a fit of as
many steps as is said, in a session that has made one before; "rest" is what is left of it without the
steps: reading the rows, bringing the ranks together, the way back. A step is from the end of one
to the end of the next; medians, the first quarter left out. TorchDistributor runs DDP as in
``distributor.py``, on rows that its ranks read from the same file; it has no validation, no checkpoints
and nothing that comes back but the weights.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from distributor import timed_steps
from harness import (
    HERE,
    hardware,
    in_fresh_process,
    laps,
    markdown,
    options,
    session,
    trainer,
    write_json,
)
from models import WORKS
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from work import NAMES

import sparkdl
from sparkdl.settings import SPARK_SETTINGS


def connected() -> SparkSession:
    """The client's session of a server beside it."""
    os.environ["SPARK_TESTING"] = "1"  # any free port
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    builder = SparkSession.builder.remote("local[2]")
    for key, (value, _) in SPARK_SETTINGS.items():
        builder = builder.config(key, value)
    settings = {"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def gang(name: str, batch: int, steps: int, path: str, remote: bool) -> dict[str, float]:
    """Seconds of a fit and of what is not a step, and milliseconds of a step."""
    work = WORKS[name]
    spark = connected() if remote else session()
    try:
        data = spark.read.parquet(path)
        run = trainer(work, batch, sparkdl.max_iteration(steps), engine="gang")
        for _ in range(2):
            started = time.perf_counter()
            trained = run.fit(data)
            whole = time.perf_counter() - started
        rows = laps(trained.history)
        step = statistics.median(row["whole"] for row in rows[steps // 4 :])
        return {"fit": whole, "rest": whole - sum(row["whole"] for row in rows), "step": step * 1e3}
    finally:
        spark.stop()


def torch_distributor(name: str, batch: int, steps: int, path: str) -> dict[str, float]:
    """The same figures of DDP by TorchDistributor over Spark Connect."""
    spark = connected()
    try:
        os.environ["OMP_NUM_THREADS"] = "1"
        runner = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
        for _ in range(2):
            started = time.perf_counter()
            seconds, _ = runner.run(timed_steps, WORKS[name], path, batch, steps)
            whole = time.perf_counter() - started
        step = statistics.median(seconds[steps // 4 :])
        return {"fit": whole, "rest": whole - sum(seconds), "step": step * 1e3}
    finally:
        spark.stop()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--works", default="mlp:256,mlp:1024")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    steps, rounds = (40, 1) if given.quick else (given.steps, given.rounds)
    print(hardware(), f"2 ranks of one thread, {steps} steps.\n", flush=True)
    found: list[dict[str, Any]] = []
    for item in given.works.split(","):
        name, _, size = item.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows.parquet")
            columns = [list(array) for array in WORKS[name].arrays(WORKS[name].samples)]
            pq.write_table(pa.table(dict(zip(NAMES, columns, strict=True))), path)
            run = name, int(size), steps, path
            kinds = {
                "classic": (gang, *run, False),
                "connect": (gang, *run, True),
                "TorchDistributor": (torch_distributor, *run),
            }
            some: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, call in kinds.items():
                    some[kind].append(in_fresh_process(*call))
        for kind, each in some.items():
            middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
            found.append({"work": item, "session": kind, **middle})
            print(found[-1], flush=True)
    head = ["work", "session", "fit", "rest", "step"]
    print("\n" + markdown(head, ([row[key] for key in head] for row in found)))
    write_json(given.json, found)


if __name__ == "__main__":
    main()

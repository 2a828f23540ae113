"""What an iteration costs as replicas, slices and parameters grow, and what that means for clusters.

    python benchmarks/scaling.py [--largest 256] [--computing 2.0] [--quick] [--json FILE]

A model of 1 KB, one sample a replica, M = N = 2, 4, ... partitions on the two slots of ``local[2]``,
where tasks queue: nearly all of it is scheduling. The stages meet at a shuffle, as between nodes.
Then M = 2, N = 1 and 2 with 4 to 40 MB of parameters. The overhead of an iteration is all of it but
forward and backward of the slowest replica. The formula of ``cost_model.py`` is fitted to some points
and checked against the others ("held out"), with and without a term for the M x N blocks of shuffles.

Driver: processor time of its Python and of its JVM. On ``local[2]`` that JVM is the executor too, so a
second pass on ``local-cluster[1,2,1024]`` tells them apart; the JVM's compilers are left out. Memory:
the JVM's heap in use after a collection, slabs, and the driver's Python, as partitions add to them.

Last, clusters of one replica and one slice a node, under the assumptions that are printed with the
table, and what BigDL's authors published.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bigdl
import pyspark
import scaling_report as report
from cost_model import SQUARE, TERMS, Point, error, fit, slope
from harness import (
    hardware,
    in_fresh_process,
    laps,
    markdown,
    medians,
    options,
    session,
    trainer,
    write_json,
)
from models import squares
from usage import KINDS, cpu_by_kind, resident
from work import Work

import sparkdl

TINY, LARGE = (16, 1), 1000
SETTINGS = {"spark.sparkdl.stages": "shuffle"} | {
    f"spark.{jvm}.extraJavaOptions": "-XX:-UseDynamicNumberOfCompilerThreads"
    for jvm in ("driver", "executor")
}


@dataclass
class Look(sparkdl.Callback):
    """Processor time by kind of process over the iterations from ``first`` on; memory at the last."""

    first: int
    last: int
    slabs: Path | None
    context: Any
    called: float = field(default_factory=time.perf_counter)
    found: dict[str, float] = field(default_factory=dict)
    _before: dict[str, float] = field(default_factory=dict)

    def on_fit_start(self, trainer, state) -> None:
        self.found["set-up, s"] = time.perf_counter() - self.called

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration == self.first:
            self._before = cpu_by_kind()
        elif state.iteration == self.last:
            count = self.last - self.first
            for kind, seconds in cpu_by_kind().items():
                self.found[kind] = (seconds - self._before[kind]) / count
            self._weigh()

    def _weigh(self) -> None:
        self.found["Python"] = resident(os.getpid())["RssAnon"]
        if self.slabs is not None:
            files = [path.stat() for path in self.slabs.rglob("*") if path.is_file()]
            self.found["slabs"] = sum(512 * file.st_blocks for file in files)
        self.context._jvm.java.lang.System.gc()
        machine = self.context._jvm.java.lang.Runtime.getRuntime()
        self.found["heap"] = machine.totalMemory() - machine.freeMemory()


def one_fit(
    spark: Any, work: Work, point: Point, iterations: int, slabs: Path | None
) -> dict[str, Any]:
    """Seconds of overhead, the milliseconds of its parts, and what was looked at."""
    first = max(1, iterations // 3)
    look = Look(first, iterations, slabs, spark.sparkContext)
    run = trainer(
        work,
        point.replicas,
        sparkdl.max_iteration(iterations),
        replicas=point.replicas,
        slices=point.slices,
        callbacks=[look],
    )
    parts = medians(laps(run.fit(work.rdd(spark, point.replicas)).history)[first:])
    return {"point": replace(point, seconds=parts["beyond"] / 1e3), **parts, **look.found}


def tiny_points(largest: int) -> list[int]:
    return [2**power for power in range(1, largest.bit_length())]


def on_local(largest: int, depths: tuple[int, ...], warm: int) -> list[dict[str, Any]]:
    """Every point, on ``local[2]``, after a fit of ``warm`` iterations for the JVM."""
    slabs = Path(tempfile.mkdtemp(prefix="scaling-", dir="/dev/shm"))
    spark = session(**SETTINGS, **{"spark.sparkdl.slab.dir": str(slabs)})
    found = []
    try:
        one_fit(spark, squares(*TINY, batch=2), Point(2, 2, 0.0), warm, None)
        for count in tiny_points(largest):
            work, point = squares(*TINY, batch=count), Point(count, count, 0.001)
            found.append(one_fit(spark, work, point, max(9, min(60, 600 // count)), slabs))
            print(f"M = N = {count}: {found[-1]['whole']:.0f} ms", flush=True)
        for depth in depths:
            for slices in (1, 2):
                work = squares(LARGE, depth, batch=2)
                point = Point(2, slices, 4.0 * depth)
                found.append(one_fit(spark, work, point, 30, slabs))
    finally:
        spark.stop()
        shutil.rmtree(slabs)
    return found


def on_cluster(counts: list[int], warm: int) -> list[dict[str, Any]]:
    """The smaller points where driver and executor are processes of their own."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        os.environ["SPARK_HOME"] = folder  # executors make their folders in it
        for path in Path(pyspark.__file__).parent.iterdir():
            if path.name != "work":
                Path(folder, path.name).symlink_to(path)
        spark = session("local-cluster[1,2,1024]", **SETTINGS)
        try:
            works = {count: squares(*TINY, batch=count) for count in counts}
            one_fit(spark, works[counts[0]], Point(counts[0], counts[0], 0.0), warm, None)
            return [
                one_fit(spark, work, Point(count, count, 0.001), max(12, 300 // count), None)
                for count, work in works.items()
            ]
        finally:
            spark.stop()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--largest", type=int, default=256, help="M = N up to this power of two")
    parser.add_argument("--computing", type=float, default=2.0, help="seconds, for the clusters")
    given = parser.parse_args()
    largest, warm = (8, 30) if given.quick else (given.largest, 200)
    print(hardware(), "\n", flush=True)
    found = in_fresh_process(on_local, largest, (1, 4, 10), warm)
    apart = in_fresh_process(on_cluster, [2, 8] if given.quick else [2, 8, 32], warm)
    points = [row["point"] for row in found]
    known = [point for point in points if not report.held_out(point)]
    others = [point for point in points if report.held_out(point)]
    plain, blocks = fit(known, TERMS), fit(known, TERMS | SQUARE)
    driver = slope([(row["point"].replicas, row[KINDS[0]] + row[KINDS[1]]) for row in apart])
    print("\nAn iteration on local[2]:\n")
    print(report.points(found, [plain, blocks]), "\n")
    print(report.constants([plain, blocks]), "\n")
    print("Processor time of an iteration on local-cluster[1,2,1024], ms:\n")
    print(report.processor(apart))
    print(f"\ndriver: {driver[0] * 1e3:.1f} ms + {driver[1] * 1e3:.2f} ms x M\n")
    print(report.memory(found), "\n")
    off = [error(guess, others) for guess in (plain, blocks)]
    print(
        f"Off at the points held out: {off[0]:.0%}, with M N {off[1]:.0%}; the better one is used.\n"
    )
    print(report.assumed(given.computing), "\n")
    better = plain if off[0] <= off[1] else blocks
    print(report.clusters(better, driver[1], given.computing), "\n")
    print(markdown(("published of BigDL", ""), bigdl.PUBLISHED))
    figures = {"local": found, "local-cluster": apart, "driver": driver}
    figures["constants"] = [found.constants for found in (plain, blocks)]
    write_json(given.json, figures)


if __name__ == "__main__":
    main()

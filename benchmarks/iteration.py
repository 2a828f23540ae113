"""Where an iteration's time goes, by size of the model, beside its baselines.

    python benchmarks/iteration.py [--sizes 0.1,1,10,100] [--iterations 150] [--quick] [--json FILE]

For each size (MB of fp32 parameters, square layers under Adam, global batch 64): an iteration of the
shuffle engine at M = N = 2 by its activities; the same step in one process with all cores; DDP over
Gloo with 2 ranks of one thread, and its parts; and an empty two-stage PySpark job of the same session.
"beyond" is the iteration less forward and backward of the slower replica.
"""

from __future__ import annotations

from typing import Any

import ddp
from baselines import one_process_ms
from empty_jobs import jobs_ms, two_stage_job
from harness import (
    RANKS,
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
from models import work_named

import sparkdl

LAYERS = {0.1: (64, 6), 1.0: (256, 4), 10.0: (512, 10), 100.0: (1000, 25)}
"""MB -> width and depth."""
ACTIVITIES = ("schedule", "data", "fetch", "forward", "backward", "publish", "reduce", "update")


def name(size: float) -> str:
    return "{}x{}".format(*LAYERS[size])


def shuffle(counts: dict[float, int]) -> tuple[dict[float, dict[str, float]], float]:
    """Milliseconds by activity for each size, after a fit that warms the JVM; and of an empty job."""
    spark = session()
    try:
        found = {}
        for size, count in [(min(counts), max(counts.values())), *counts.items()]:
            work = work_named(name(size))
            run = trainer(work, work.batches[0], sparkdl.max_iteration(count + count // 4))
            data = work.rdd(spark, RANKS)
            found[size] = medians(laps(run.fit(data).history)[-count:])
        return found, jobs_ms(spark, two_stage_job, 60)
    finally:
        spark.stop()


def table(
    ours: dict[float, dict[str, float]], single: dict[float, float], double: dict[float, Any]
) -> str:
    parts = next(iter(double.values())).keys()
    head = ("MB", "iteration", *ACTIVITIES, "beyond", "one process", *(f"DDP: {p}" for p in parts))
    rows = [
        (
            *(f"{size:g}", found["whole"], *(found.get(part) for part in ACTIVITIES)),
            *(found["beyond"], single[size], *double[size].values()),
        )
        for size, found in ours.items()
    ]
    return markdown(head, rows)


def ratios(ours: dict[float, dict[str, float]], double: dict[float, Any], empty: float) -> str:
    head = ("MB", "beyond / empty job", "beyond / (3 x all-reduce + empty job)", "iteration / DDP")
    rows = [
        (
            *(f"{size:g}", found["beyond"] / empty),
            found["beyond"] / (3 * double[size]["all-reduce"] + empty),
            found["whole"] / double[size]["step"],
        )
        for size, found in ours.items()
    ]
    return markdown(head, rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", default="0.1,1,10,100", help="MB of parameters")
    parser.add_argument("--iterations", type=int, default=150, help="measured, for small models")
    given = parser.parse_args()
    sizes = [0.1, 10.0] if given.quick else [float(size) for size in given.sizes.split(",")]
    steps = 24 if given.quick else given.iterations
    counts = {size: steps if size < 100 else max(10, steps // 5) for size in sizes}
    print(hardware(), f"M = N = {RANKS}, milliseconds.\n", flush=True)
    parts = ddp.parts_ms([LAYERS[size] for size in sizes], max(10, steps // 5))
    single, double = {}, {}
    for size, found in zip(sizes, parts, strict=True):
        pace = (name(size), 64, counts[size], counts[size] // 4)
        single[size] = one_process_ms(*pace)
        double[size] = {"step": ddp.step_ms(*pace), **found}
    ours, empty = in_fresh_process(shuffle, counts)
    print(table(ours, single, double))
    print(f"\nempty two-stage PySpark job: {empty:.1f} ms\n")
    print(ratios(ours, double, empty))
    write_json(given.json, {"sparkdl": ours, "one": single, "ddp": double, "empty": empty})


if __name__ == "__main__":
    main()

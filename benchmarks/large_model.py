"""What an iteration of a large model costs beside computing: 100 MB of parameters, Adam.

    python benchmarks/large_model.py [--depth 25] [--iterations 40] [--quick] [--json FILE]

25 square layers of 1000 (``--depth``: 4 MB each), global batch 64, M = N = 2 in ``local[2]``. Of each
iteration: the parts that move or update parameters, and both jobs together, which is the iteration less
data, forward and backward. Beside it what DDP does for the same: all-reduce of as many floats and a
step of Adam on all parameters, on both ranks at once; and a copy of the same bytes, by two processes at
once.

Last, the bytes that each part has to touch in theory, and how long that takes at the speed of the
memory copy. P is the bytes of the parameters; all replicas or ranks count, reading and writing apart.
That is a yardstick and no bound: a copy also fetches the lines that it overwrites.
"""

from __future__ import annotations

from typing import Any

import ddp
from baselines import MB, copy_ms
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
from models import squares

import sparkdl

WIDTH = 1000
PARTS = ("fetch", "publish", "reduce", "update", "schedule")
TOUCHED = {
    "fetch": (2 * RANKS, "each replica reads P and writes P"),
    "publish": (2 * RANKS, "each replica reads its gradient and writes it to a slab"),
    "reduce": (RANKS + 1, "the owners read M gradients and write their mean"),
    "update": (
        7,
        "the owners read weights, gradient and two moments, write weights and moments anew",
    ),
    "DDP: all-reduce": (
        6 * RANKS,
        "ring of 2: each half of P is copied into a socket, out of it, added or replaced",
    ),
    "DDP: Adam": (7 * RANKS, "as update, but all of P on each rank"),
}
"""Part -> times P, and why."""


def shuffle(depth: int, iterations: int) -> dict[str, float]:
    """Milliseconds by activity; and of an empty two-stage job of the same session."""
    work = squares(WIDTH, depth)
    spark = session()
    try:
        data = work.rdd(spark, RANKS).persist()
        run = trainer(work, work.batches[0], sparkdl.max_iteration(iterations + iterations // 4))
        found = medians(laps(run.fit(data).history)[-iterations:])
        return {**found, "empty": jobs_ms(spark, two_stage_job, 40)}
    finally:
        spark.stop()


def cost_table(ours: dict[str, float], theirs: dict[str, float], copy: float) -> str:
    default, fused = (theirs["all-reduce"] + theirs[name] for name in ddp.ADAMS)
    parts = sum(ours.get(part, 0.0) for part in PARTS)
    kernels = parts - ours.get("schedule", 0.0)
    head = ("", "ms", "/ DDP, default Adam", "/ DDP, fused Adam", "/ memory copy")
    rows = [
        *((f"sparkdl: {part}", ours.get(part)) for part in PARTS),
        ("sparkdl: these five", parts),
        ("sparkdl: these without schedule", kernels),
        ("sparkdl: both jobs (less data, forward, backward)", ours["jobs"]),
        ("sparkdl: both jobs less an empty job", ours["jobs"] - ours["empty"]),
        ("sparkdl: the iteration", ours["whole"]),
        ("empty two-stage job", ours["empty"]),
        *((f"DDP: {part}", value) for part, value in theirs.items()),
        ("DDP: all-reduce + Adam", default),
        ("DDP: all-reduce + Adam, fused", fused),
        ("memory copy, two at once", copy),
    ]
    return markdown(
        head,
        ((name, v, *((v or 0.0) / base for base in (default, fused, copy))) for name, v in rows),
    )


def bytes_table(
    ours: dict[str, float], theirs: dict[str, float], megabytes: int, copy: float
) -> str:
    """``copy``: ms for ``megabytes``, by each of two processes: 2 x P read and 2 x P written."""
    measured = ours | {"DDP: all-reduce": theirs["all-reduce"], "DDP: Adam": theirs["Adam, fused"]}
    head = ("part", "touches, x P", "MB", "at copying speed, ms", "measured, ms", "why")
    return markdown(
        head,
        (
            (part, times, times * megabytes, copy * times / (2 * RANKS), measured.get(part), why)
            for part, (times, why) in TOUCHED.items()
        ),
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--depth", type=int, default=25, help="layers, 4 MB each")
    parser.add_argument("--iterations", type=int, default=40)
    given = parser.parse_args()
    iterations = 8 if given.quick else given.iterations
    nbytes = 4 * WIDTH * WIDTH * given.depth
    print(hardware(), "\n", flush=True)
    theirs = ddp.parts_ms([(WIDTH, given.depth)], iterations)[0]
    copy = copy_ms(nbytes, RANKS)
    ours: dict[str, Any] = in_fresh_process(shuffle, given.depth, iterations)
    print(f"{nbytes / 4e6:g} M parameters, {nbytes // MB} MB, Adam, M = N = {RANKS}:\n")
    print(cost_table(ours, theirs, copy), "\n")
    print(f"Bytes touched on all {RANKS} replicas or ranks together, in theory:\n")
    print(bytes_table(ours, theirs, nbytes // MB, copy))
    write_json(given.json, {"sparkdl": ours, "ddp": theirs, "copy": copy})


if __name__ == "__main__":
    main()

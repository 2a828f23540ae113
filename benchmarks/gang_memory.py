"""Memory of a rank of a gang by strategy, and a model whose optimizer state does not fit a worker.

    python benchmarks/gang_memory.py [--depth 25] [--limited 60] [--iterations 8] [--quick]

25 square layers of 1000 (``--depth``: 4 MB each), Adam, 2 ranks in ``local[2]``, against DDP by
torchrun; what is read, and how, is in ``benchmarks/memory.py``. A rank of DDP holds weights, gradients
and two moments, 4 P, and torch's buckets; under fsdp half of that, and the unit at hand; of a pipeline
half of it, and the activations of micro-batches. fsdp stands there twice: as it comes, and where memory
is scarce, since workers may have no more than 7 P.

Then ``--limited`` layers on executors whose Python workers may have no more than so much memory
(``spark.executor.pyspark.memory``, which Spark sets as the limit of their address space): that of a
worker that has imported all this, measured first, and 4.75 P. Which strategies train?
"""

from __future__ import annotations

from typing import Any

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
from memory import MB, WIDTH, Figures, figures, held, with_ddp
from models import squares
from usage import SHARES, Watch, address_space

import sparkdl

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp, stage 2": sparkdl.FSDP(reshard_after_forward=False),
    "fsdp, stage 3": "fsdp",
    "pipeline": "pipeline",
}
CLUSTER = "local-cluster[2,1,1024]"
ROOM, SCARCE = 4.75, 7.0
"""What a limited worker may have, in P, beside its libraries: to train at all, to be measured."""


def with_gang(depth: int, iterations: int, strategy: str, limit: int = 0) -> Figures:
    """What the ranks of a fit hold. ``limit``: bytes that a worker may have; 0: no limit."""
    work = squares(WIDTH, depth)
    spark = session(CLUSTER, **limited_to(limit)) if limit else session()
    watch = Watch()
    try:
        data = work.rdd(spark, RANKS)
        watch.start()
        stop, how = sparkdl.max_iteration(iterations), STRATEGIES[strategy]
        trainer(work, work.batches[0], stop, engine="gang", strategy=how).fit(data)
    finally:
        watch.end()
        spark.stop()
    return figures(watch)


def of_libraries() -> int:
    """Address space of a worker that has only imported what ranks use."""
    spark = session(CLUSTER)
    try:
        return sparkdl.gang.run(address_space, ranks=RANKS, device="cpu")[0]
    finally:
        spark.stop()


def limited_to(limit: int) -> dict[str, str]:
    return {"spark.executor.pyspark.memory": f"{limit >> 20}m"}


def limited(depth: int, strategy: str, limit: int) -> str:
    """Train three iterations where a worker may have ``limit`` bytes; what came of it."""
    work = squares(WIDTH, depth)
    spark = session(CLUSTER, **limited_to(limit))
    try:
        data = work.rdd(spark, RANKS)
        stop, how = sparkdl.max_iteration(3), STRATEGIES[strategy]
        run = trainer(work, work.batches[0], stop, engine="gang", strategy=how)
        losses = run.fit(data).history.losses
        return f"trains, {len(losses)} iterations"
    except sparkdl.SparkdlError as error:
        return str(error).partition("\n")[0]
    finally:
        spark.stop()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--depth", type=int, default=25, help="layers, 4 MB each")
    parser.add_argument("--limited", type=int, default=60, help="layers where memory is limited")
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    size = 4 * WIDTH**2 * given.depth / MB
    print(hardware(), "\n", flush=True)
    libraries = in_fresh_process(of_libraries)
    scarce = libraries + int(SCARCE * size * MB)
    found = {
        name: in_fresh_process(with_gang, given.depth, given.iterations, name)
        for name in STRATEGIES
    }
    for name in ("fsdp, stage 2", "fsdp, stage 3"):
        held_back = in_fresh_process(with_gang, given.depth, given.iterations, name, scarce)
        found[f"{name}, memory scarce"] = held_back
    found["DDP by torchrun"] = in_fresh_process(with_ddp, given.depth, given.iterations)
    print(f"P = {size:.0f} MB of parameters, Adam. MB for each rank:\n")
    head = ("", "", *SHARES, "private + shared", "in P")
    rows = [
        (name, row, *(parts.get(part) for part in SHARES), held(parts), held(parts) / size)
        for name, some in found.items()
        for row, parts in some.items()
    ]
    print(markdown(head, rows), "\n", flush=True)
    if given.quick:
        write_json(given.json, {"memory": found})
        return
    size = 4 * WIDTH**2 * given.limited
    limit = libraries + int(ROOM * size)
    print(f"P = {size / MB:.0f} MB; a worker may have {limit / MB:.0f} MB of address space:\n")
    ends = {name: in_fresh_process(limited, given.limited, name, limit) for name in STRATEGIES}
    print(markdown(("", "what came of it"), list(ends.items())))
    write_json(given.json, {"memory": found, "limited": ends})


if __name__ == "__main__":
    main()

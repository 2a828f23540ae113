"""What a checkpoint costs the ranks of a gang: training waits for it, or goes on meanwhile.

    python benchmarks/gang_checkpoints.py [--depth 25] [--iterations 24] [--every 6] [--rounds 3]

25 square layers of 1000 (``--depth``: 4 MB each), Adam, 2 ranks in ``local[2]``; 3 P a checkpoint, to
the local disk. "cost" is the time of all iterations, and of what is between them, less that of a run
without checkpoints, for each checkpoint; medians of the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
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
from models import squares

import sparkdl

STRATEGIES = ("ddp", "zero1", "fsdp", "pipeline")
WAYS = {"none": None, "training waits": False, "asynchronous": True}


class Ends(sparkdl.Callback):
    """When the first iteration and the fit ended."""

    first = last = 0.0

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        self.first = self.first or time.perf_counter()

    def on_fit_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        self.last = time.perf_counter()


def trained(depth: int, iterations: int, every: int) -> dict[str, dict[str, float]]:
    """Seconds of the iterations after the first, by strategy and way."""
    work, found = squares(1000, depth), {}
    spark = session()
    try:
        data = work.rdd(spark, RANKS).persist()
        data.count()
        for strategy in STRATEGIES:
            found[strategy] = {}
            for way, asynchronous in WAYS.items():
                ends, kept = Ends(), None
                with tempfile.TemporaryDirectory() as folder:
                    if asynchronous is not None:
                        often = sparkdl.every(every)
                        kept = sparkdl.Checkpoint(folder, every=often, asynchronous=asynchronous)
                    how: dict[str, Any] = {"engine": "gang", "strategy": strategy}
                    stop = sparkdl.max_iteration(iterations)
                    run = trainer(
                        work, work.batches[0], stop, callbacks=[ends], checkpoint=kept, **how
                    )
                    run.fit(data)
                found[strategy][way] = ends.last - ends.first
    finally:
        spark.stop()
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--depth", type=int, default=25, help="layers, 4 MB each")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    depth, rounds = (2, 1) if given.quick else (given.depth, given.rounds)
    print(hardware(), "\n", flush=True)
    some = [in_fresh_process(trained, depth, given.iterations, given.every) for _ in range(rounds)]
    count, rows = given.iterations // given.every, []
    for strategy in STRATEGIES:
        median = {way: statistics.median(one[strategy][way] for one in some) for way in WAYS}
        costs = [
            statistics.median(one[strategy][way] - one[strategy]["none"] for one in some) / count
            for way in WAYS
            if way != "none"
        ]
        rows.append((strategy, median["none"] / (given.iterations - 1), *costs))
    print(f"P = {4 * depth} MB, {count} checkpoints in {given.iterations} iterations, seconds:\n")
    print(markdown(("", "an iteration", "cost, training waits", "cost, asynchronous"), rows))
    write_json(given.json, {"checkpoints": some})


if __name__ == "__main__":
    main()

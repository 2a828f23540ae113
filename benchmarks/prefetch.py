"""The next mini-batch, prepared while this one is computed with, where a core is to spare.

    python benchmarks/prefetch.py [--batch 256] [--steps 60] [--rounds 3] [--quick]

LeNet in a gang of one rank, one thread, in ``local[2]``: images are shifted at random and noise is
added, row by row in Python. In turn and in fresh processes: without that, with rows prepared when they
are asked for, and with those of the next mini-batch prepared in a thread, as it ships. Milliseconds an
iteration, medians, the first quarter left out.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import (
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

import sparkdl
from sparkdl.data.prefetch import AHEAD

SIDE = 28


@dataclass(frozen=True)
class Shift:
    """By up to three pixels either way, and noise. The rank calls it, and is told how to prepare."""

    ahead: bool

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if not self.ahead:
            AHEAD.worth_seconds = math.inf
        down, right = rng.integers(-3, 4, 2)
        moved = np.roll(image.reshape(SIDE, SIDE), (down, right), (0, 1)).ravel()
        return moved + rng.normal(0.0, 0.05, moved.shape).astype(np.float32)


WAYS = {"as stored": None, "when asked for": False, "ahead": True}
"""Whether rows are augmented, and then whether ahead."""


def one_way(batch: int, steps: int, ahead: bool | None) -> dict[str, float]:
    """Milliseconds of an iteration, and of what it waits for rows."""
    import prefetch  # workers import what this process runs as its main module

    augment = None if ahead is None else prefetch.Shift(ahead)
    work, spark = WORKS["lenet"], session()
    try:
        data = work.rdd(spark, partitions=1).persist()
        data.count()
        how: dict[str, Any] = {"engine": "gang", "replicas": 1, "augment": augment}
        run = trainer(work, batch, sparkdl.max_iteration(steps), **how)
        rows = laps(run.fit(data).history)[steps // 4 :]
    finally:
        spark.stop()
    return {key: statistics.median(row[key] for row in rows) * 1e3 for key in ("whole", "data")}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    steps, rounds = (12, 1) if given.quick else (given.steps, given.rounds)
    print(hardware(), "\n", flush=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, ahead in WAYS.items():
            found[name].append(in_fresh_process(one_way, given.batch, steps, ahead))
    rows = [
        {"rows": name, **{key: statistics.median(one[key] for one in some) for key in some[0]}}
        for name, some in found.items()
    ]
    plain = rows[0]["whole"]
    for row in rows:
        row["more than as stored"] = row["whole"] - plain
    head = ["rows", "whole", "data", "more than as stored"]
    print(markdown(head, ([row[key] for key in head] for row in rows)))
    write_json(given.json, rows)


if __name__ == "__main__":
    main()

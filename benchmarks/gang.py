"""The gang engine beside torchrun: the same strategy, model, batches and machine.

    python benchmarks/gang.py [--works mlp:256,resnet:64] [--strategies ddp,fsdp] [--steps 200]

For each model and global batch, in turn and in fresh processes: each strategy by torchrun as a user of
torch writes it, over Gloo, 2 ranks of one thread each (``benchmarks/strategies.py``), and
``engine="gang"`` with the same strategy, in ``local[2]``; a pipeline where the model is a chain, parts
of layers where it has pairs of linear ones. A
step is from the end of one to the end of the next, all of the driver's work included; medians, the
first quarter left out. "speed" is torchrun's time by ours: above 1 the gang is faster. "first step" is
seconds from ``fit`` to the end of the first iteration, in a session that has run a job before.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import ddp
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

STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline")


class First(sparkdl.Callback):
    """When the first iteration had ended."""

    ended = 0.0

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        self.ended = self.ended or time.perf_counter()


def gang(name: str, batch: int, steps: int, strategies: list[str]) -> dict[str, float]:
    """Milliseconds of a step with each strategy, and seconds to the first one."""
    work, found = WORKS[name], {}
    spark = session()
    try:
        data = work.rdd(spark, partitions=2).persist()
        data.count()
        for strategy in strategies:
            first, how = First(), {"engine": "gang", "strategy": strategy}
            run = trainer(work, batch, sparkdl.max_iteration(steps), callbacks=[first], **how)
            started = time.perf_counter()
            rows = laps(run.fit(data).history)[steps // 4 :]
            found[strategy] = statistics.median(row["whole"] for row in rows) * 1e3
            found[f"{strategy}, schedule"] = statistics.median(r["schedule"] for r in rows) * 1e3
            found["first step"] = first.ended - started
    finally:
        spark.stop()
    return found


def _without(name: str) -> tuple[str, ...]:
    """What a model cannot be trained with: parts of layers where it has no pair of linear ones."""
    return ("tensor",) if name == "resnet" else ()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--works", default="mlp:256,mlp:1024,resnet:64,transformer:16")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--steps", type=int, default=200, help="of a small model")
    parser.add_argument("--large", type=int, default=12, help="steps of a large model")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    small, large, rounds = (20, 4, 1) if given.quick else (given.steps, given.large, given.rounds)
    print(hardware(), "2 ranks of one thread, milliseconds.\n", flush=True)
    rows: list[dict[str, Any]] = []
    for item in given.works.split(","):
        name, _, size = item.partition(":")
        batch, steps = int(size), large if WORKS[name].large else small
        strategies = [s for s in given.strategies.split(",") if s not in _without(name)]
        some = []
        for _ in range(rounds):
            theirs = {
                f"torchrun {s}": ddp.step_ms(name, batch, steps - steps // 4, steps // 4, s)
                for s in strategies
            }
            ours = in_fresh_process(gang, name, batch, steps, strategies)
            speeds = {f"speed {s}": theirs[f"torchrun {s}"] / ours[s] for s in strategies}
            some.append({**theirs, **ours, **speeds})
        middle = {key: statistics.median(one[key] for one in some) for key in some[0]}
        rows.append({"work": WORKS[name].name, "batch": batch, **middle})
        print(f"{item}: " + ", ".join(f"{k} {v:.4g}" for k, v in middle.items()), flush=True)
    head = ["work", "batch"]
    for s in given.strategies.split(","):
        head += [f"torchrun {s}", s, f"speed {s}"]
    head += ["first step"]
    print("\n" + markdown(head, ([row.get(key) for key in head] for row in rows)))
    write_json(given.json, rows)


if __name__ == "__main__":
    main()

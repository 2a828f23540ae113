"""One GPU: plain PyTorch beside the shuffle and the gang engine, the same model and batches.

    python benchmarks/gpu.py [--works mlp:1024,resnet:64,transformer:16] [--steps 200] [--rounds 3]

Needs a GPU that torch sees. In turn and in fresh processes, in ``local[2]``: plain PyTorch, its batches
gathered on the CPU and copied from pinned memory; ``engine="gang"`` and ``engine="shuffle"`` with one
replica. A step is from the end of one to the end of the next, when the GPU has done it;
milliseconds, medians, the first quarter left out. "speed" is plain PyTorch's time by ours.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import ddp
import torch
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
from strategies import plain_step

import sparkdl

ENGINES = ("gang", "shuffle")
Batches = Iterator[tuple[torch.Tensor, ...]]


def plain_ms(name: str, batch: int, steps: int) -> float:
    """Milliseconds of a step of plain PyTorch."""
    work, gpu = WORKS[name], torch.device("cuda")
    torch.manual_seed(0)
    module = work.make().to(gpu)
    feed = _sent(ddp.batches(*work.tensors(max(work.samples, batch)), batch), gpu)

    step = plain_step(work, module, work.optimizers(module), feed)

    def finished() -> None:
        step()
        torch.cuda.synchronize()

    return ddp.median_ms(ddp.time_steps(finished, steps)[steps // 4 :])


def _sent(feed: Batches, gpu: torch.device) -> Batches:
    for tensors in feed:
        yield tuple(tensor.pin_memory().to(gpu, non_blocking=True) for tensor in tensors)


def ours_ms(engine: str, name: str, batch: int, steps: int) -> dict[str, float]:
    """Milliseconds of an iteration, and of its parts."""
    work, spark = WORKS[name], session()
    try:
        data = work.rdd(spark, partitions=1).persist()
        data.count()
        run = trainer(work, batch, sparkdl.max_iteration(steps), engine=engine, replicas=1)
        rows = laps(run.fit(data).history)[steps // 4 :]
        parts = dict.fromkeys(part for row in rows for part in row)
        return {p: statistics.median(row.get(p, 0.0) for row in rows) * 1e3 for p in parts}
    finally:
        spark.stop()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--works", default="mlp:1024,lenet:256,resnet:64,transformer:16,ncf:4096")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here.")
    steps, rounds = (20, 1) if given.quick else (given.steps, given.rounds)
    print(torch.cuda.get_device_name(), hardware(), "Milliseconds.\n", flush=True)
    rows: list[dict[str, Any]] = []
    for item in given.works.split(","):
        name, _, size = item.partition(":")
        batch, some = int(size), list[dict[str, float]]()
        for _ in range(rounds):
            found = {"plain": in_fresh_process(plain_ms, name, batch, steps)}
            for engine in ENGINES:
                parts = in_fresh_process(ours_ms, engine, name, batch, steps)
                found[engine] = parts["whole"]
                found[f"speed {engine}"] = found["plain"] / parts["whole"]
                found[f"{engine}, schedule"] = parts["schedule"]
                told = ", ".join(f"{part} {ms:.3g}" for part, ms in parts.items())
                print(f"{item}, {engine}: {told}", flush=True)
            some.append(found)
        middle = {key: statistics.median(one[key] for one in some) for key in some[0]}
        rows.append({"work": WORKS[name].name, "batch": batch, **middle})
        print(f"{item}: " + ", ".join(f"{k} {v:.4g}" for k, v in middle.items()), flush=True)
    head = list(rows[0])
    print("\n" + markdown(head, ([row[key] for key in head] for row in rows)))
    write_json(given.json, rows)


if __name__ == "__main__":
    main()

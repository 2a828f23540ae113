"""Where an iteration's time goes, beside its baselines, all in one run.

    python benchmarks/iteration.py [--sizes 0.1,1,10,100] [--iterations 200] [--json FILE]

For each size of the model (MB of fp32 parameters): one iteration of the shuffle engine at M = N = 2,
split into Spark's part, the forward-backward tasks and the synchronization tasks; the same step
in one process; DDP over Gloo with 2 ranks of one thread; a bare Gloo all-reduce of the same bytes;
and an empty two-stage PySpark job of the same session. Medians, milliseconds; quote the ratios, the
machine is noisy. Adam, global batch 64, layers of equal width.

"beyond compute" is the whole iteration less forward and backward (of the slower replica): all that
Spark, slabs, copies and Adam cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pyspark.sql import SparkSession
from torch import nn

import sparkdl
from sparkdl.train.shuffle import ShuffleEngine

WIDTH_AND_DEPTH = {0.1: (64, 6), 1.0: (256, 4), 10.0: (512, 10), 100.0: (1024, 25)}
GLOBAL_BATCH = 64
RANKS = 2
ADAM = partial(torch.optim.Adam, lr=1e-4)


def make_model(size: float) -> nn.Module:
    """Square layers with tanh; ``size`` is a key of ``WIDTH_AND_DEPTH``."""
    width, depth = WIDTH_AND_DEPTH[size]
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(*layers)


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def batch_of(size: float, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    width = WIDTH_AND_DEPTH[size][0]
    return torch.randn(rows, width, generator=generator), torch.randn(
        rows, width, generator=generator
    )


def one_process(size: float, steps: int, threads: int) -> float:
    """Milliseconds of a step of plain PyTorch on the global batch."""
    torch.set_num_threads(threads)
    model = make_model(size)
    optimizer = ADAM(model.parameters())
    x, y = batch_of(size, GLOBAL_BATCH)
    return median_ms(_time_steps(model, optimizer, x, y, steps))


def _time_steps(model, optimizer, x, y, steps) -> list[float]:
    seconds = []
    for step in range(steps + steps // 4):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step >= steps // 4:
            seconds.append(time.perf_counter() - started)
    return seconds


def _ddp_rank(rank: int, store: str, sizes: list[float], steps: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    results = {}
    for size in sizes:
        count = steps if size < 100 else max(10, steps // 10)
        model = nn.parallel.DistributedDataParallel(make_model(size))
        x, y = batch_of(size, GLOBAL_BATCH // RANKS)
        step_ms = median_ms(_time_steps(model, ADAM(model.parameters()), x, y, count))
        flat = torch.randn(sum(p.numel() for p in model.parameters()))
        seconds = []
        for _ in range(count):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(flat)
            seconds.append(time.perf_counter() - started)
            flat.mul_(0.5)
        results[size] = {"step": step_ms, "all_reduce": median_ms(seconds)}
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


def ddp(sizes: list[float], steps: int) -> dict[float, dict[str, float]]:
    """DDP's step and a bare all-reduce, 2 ranks of one thread, milliseconds by size."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/result.json"
        mp.spawn(_ddp_rank, (f"{folder}/store", sizes, steps, out), nprocs=RANKS, join=True)
        return {float(k): v for k, v in json.loads(Path(out).read_text()).items()}


def _pair(value: int) -> tuple[int, int]:
    return value, value


def _count(partition: int, pairs):
    yield partition, sum(1 for _ in pairs)


def empty_two_stage_job(spark: SparkSession, jobs: int) -> list[float]:
    """Seconds of a two-stage PySpark job with nothing in it: 2 tasks, a shuffle, 2 tasks."""
    context, seconds = spark.sparkContext, []
    for _ in range(jobs):
        started = time.perf_counter()
        pairs = context.parallelize(range(RANKS), RANKS).map(_pair).partitionBy(RANKS)
        pairs.mapPartitionsWithIndex(_count).collect()
        seconds.append(time.perf_counter() - started)
    return seconds


def iteration(spark: SparkSession, size: float, steps: int) -> dict[str, float]:
    """Milliseconds by part of an iteration of the shuffle engine; the first quarter is warm-up."""
    x, y = batch_of(size, GLOBAL_BATCH * 8)
    samples = [(a.numpy(), b.numpy()) for a, b in zip(x, y, strict=True)]
    rdd = spark.sparkContext.parallelize(samples, RANKS)
    records: list[dict[str, float]] = []
    original = ShuffleEngine.step

    def step(self, *args):
        result = original(self, *args)
        records.append(dict(result.seconds))
        return result

    ShuffleEngine.step = step
    try:
        trainer = sparkdl.Trainer(
            model=partial(make_model, size),
            loss=nn.MSELoss(),
            optimizer=ADAM,
            batch_size=GLOBAL_BATCH,
            replicas=RANKS,
            stop=sparkdl.max_iteration(steps + steps // 4),
        )
        history = trainer.fit(rdd).history
    finally:
        ShuffleEngine.step = original
    clock = [row["seconds"] for row in history]
    whole = [b - a for a, b in itertools.pairwise(clock)]
    records, whole = records[steps // 4 :], whole[steps // 4 :]
    parts = {key: median_ms([r[key] for r in records]) for key in records[0]}
    compute = [r["forward"] + r["backward"] for r in records[-len(whole) :]]
    parts["iteration"] = median_ms(whole)
    parts["beyond"] = median_ms([w - c for w, c in zip(whole, compute, strict=True)])
    return parts


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="0.1,1,10,100", help="MB of parameters")
    parser.add_argument("--iterations", type=int, default=200, help="measured, for small models")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    sizes = [float(size) for size in options.sizes.split(",")]
    steps = options.iterations
    cores = os.cpu_count() or 1

    def count(size: float) -> int:
        return steps if size < 100 else max(10, steps // 5)

    distributed = ddp(sizes, steps)
    single = {size: one_process(size, count(size), cores) for size in sizes}
    torch.set_num_threads(1)
    spark = sparkdl.session(
        f"local[{RANKS}]", **{"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
    )
    try:
        empty_two_stage_job(spark, steps)
        measured, empties = {}, []
        for size in sizes:
            measured[size] = iteration(spark, size, count(size))
            empties += empty_two_stage_job(spark, max(20, steps // 4))
    finally:
        spark.stop()
    empty = median_ms(empties)
    header = (
        "MB,iteration,schedule,data,fetch,forward,backward,publish,reduce,update,beyond compute,"
        "1 process,DDP x2,all-reduce"
    ).split(",")
    keys = "iteration,schedule,data,fetch,forward,backward,publish,reduce,update,beyond".split(",")
    rows = [header]
    for size in sizes:
        others = (single[size], distributed[size]["step"], distributed[size]["all_reduce"])
        values = [measured[size][key] for key in keys] + list(others)
        rows.append([f"{size:g}", *(f"{value:.1f}" for value in values)])
    print(f"\nmedians in milliseconds, M = N = {RANKS}, {cores} cores, torch {torch.__version__}\n")
    print(table(rows))
    print(f"\nempty two-stage PySpark job: {empty:.1f} ms\n")
    ratios = [
        ["MB", "beyond / empty job", "beyond / (3 x all-reduce + empty job)", "iteration / DDP x2"]
    ]
    for size in sizes:
        beyond = measured[size]["beyond"]
        limit = 3 * distributed[size]["all_reduce"] + empty
        whole = measured[size]["iteration"] / distributed[size]["step"]
        ratios.append(
            [f"{size:g}", f"{beyond / empty:.2f}", f"{beyond / limit:.2f}", f"{whole:.2f}"]
        )
    print(table(ratios))
    if options.json:
        figures = {"empty": empty, "iteration": measured, "ddp": distributed, "one_process": single}
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    np.seterr(all="raise")
    main()

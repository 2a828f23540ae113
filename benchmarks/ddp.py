"""DDP over Gloo, one thread a rank: the ranks' script, and how torchrun starts it.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        benchmarks/ddp.py --work mlp --batch 256 --steps 300 --warm-up 80

prints, as JSON, milliseconds of a step of rank 0 and samples a second. Batches are gathered from
tensors in memory. Sparse tables (``ncf``): DDP gathers the rows of all ranks (Gloo's sparse
all-reduce), and each rank steps SparseAdam on the tables and Adam on the rest.

    ... benchmarks/ddp.py --sizes 1000x25,500x1 --steps 20

prints milliseconds of the parts instead, for 25 layers of 1000x1000 and for one of 500x500: the
all-reduce of as many floats in one flat tensor, and a step of Adam on all parameters, torch's
default and ``fused=True``, on all ranks at once. The slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

RANKS = 2
ADAMS: dict[str, dict[str, bool]] = {"Adam": {}, "Adam, fused": {"fused": True}}


def launch(*arguments: str) -> Any:
    """This script by torchrun, two ranks of one thread; what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), __file__, *arguments, "--out", str(out)]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        return json.loads(out.read_text())


def step_ms(work: str, batch: int, steps: int, warm_up: int, strategy: str = "ddp") -> float:
    """Milliseconds of a step of DDP, or of another strategy, ``batch`` over both ranks together."""
    return launch(*step_arguments(work, batch, steps, warm_up, strategy))["step"]


def step_arguments(
    work: str, batch: int, steps: int, warm_up: int, strategy: str = "ddp"
) -> list[str]:
    """Of a rank's script."""
    sizes = ["--batch", str(batch), "--steps", str(steps), "--warm-up", str(warm_up)]
    return ["--work", work, *sizes, "--strategy", strategy]


def parts_ms(sizes: list[tuple[int, int]], steps: int) -> list[dict[str, float]]:
    """Milliseconds of all-reduce and Adam, for layers of each (width, depth)."""
    text = ",".join(f"{width}x{depth}" for width, depth in sizes)
    return launch("--sizes", text, "--steps", str(steps))


def batches(x: torch.Tensor, y: torch.Tensor, rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Shuffled, without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for chosen in torch.randperm(len(x), generator=generator).split(rows):
            if len(chosen) == rows:
                yield x[chosen], y[chosen]


def time_steps(step: Callable[[], Any], steps: int) -> list[float]:
    """Seconds of each step, the batch and the update included."""
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds


def median_ms(seconds: list[float]) -> float:
    return float(torch.tensor(seconds).median()) * 1e3


def whole_steps(options: argparse.Namespace) -> dict[str, float]:
    from models import work_named
    from strategies import STEPS

    work, world = work_named(options.work), dist.get_world_size()
    torch.manual_seed(0)
    x, y = work.tensors(max(work.samples, options.batch) // world, seed=dist.get_rank())
    do = STEPS[options.strategy](work, batches(x, y, options.batch // world))
    seconds = time_steps(do, options.warm_up + options.steps)
    step = median_ms(seconds[options.warm_up :])
    return {"step": step, "samples_per_second": options.batch / step * 1e3}


def parts(width: int, depth: int, steps: int) -> dict[str, float]:
    parameters = [nn.Parameter(torch.randn(width, width)) for _ in range(depth)]
    flat = torch.randn(width * width * depth)
    found = {"all-reduce": slowest(lambda: dist.all_reduce(flat), steps, lambda: flat.mul_(0.5))}
    for parameter in parameters:
        parameter.grad = torch.randn(width, width)
    for name, how in ADAMS.items():
        found[name] = slowest(optim.Adam(parameters, lr=1e-4, **how).step, steps)
    return found


def slowest(do: Callable[[], Any], steps: int, after: Callable[[], Any] = bool) -> float:
    """Milliseconds of ``do``, begun on all ranks at once; the first three are warm-up."""
    seconds = []
    for _ in range(steps + 3):
        dist.barrier()
        started = time.perf_counter()
        do()
        taken = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
        after()
    return median_ms(seconds[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", help="as models.work_named takes it: mlp, 1000x25, ...")
    parser.add_argument("--strategy", default="ddp", help="see strategies.py")
    parser.add_argument("--batch", type=int, default=256, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--sizes", help="WIDTHxDEPTH, with commas between")
    parser.add_argument("--out", help="write to this file, and print nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.work:
        figures: Any = whole_steps(options)
    else:
        pairs = [map(int, size.split("x")) for size in options.sizes.split(",")]
        figures = [parts(width, depth, options.steps) for width, depth in pairs]
    if dist.get_rank() == 0:
        if options.out:
            Path(options.out).write_text(json.dumps(figures))
        else:
            print(json.dumps(figures), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo that still runs aborts the interpreter's end now and then


if __name__ == "__main__":
    main()

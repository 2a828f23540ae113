"""What an iteration's two task bodies cost beyond forward and backward, without Spark.

    python benchmarks/bytes.py [--sizes 0.1,2.7,100] [--iterations 40]

Two processes of one thread each run the bodies of the two jobs at once, M = N = 2, with slabs in shared
memory, and in the same run what they are held against: forward and backward of plain PyTorch, Gloo's
all-reduce and Adam of the same parameters (what DDP does), and a copy of as many bytes as the bodies
must at least move. Medians over the iterations of the slower process, milliseconds.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pyspark import cloudpickle
from torch import nn

from sparkdl.data.batches import BatchSpec
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.engines.shuffle.messages import IterationMessage
from sparkdl.engines.shuffle.replica_context import (
    RecipeSource,
    at_replicas,
    initial_state,
    prepare_replica,
    prepare_slice,
)
from sparkdl.engines.shuffle.replica_tasks import send_gradients
from sparkdl.engines.shuffle.update_tasks import at_slice, synchronize, to_driver
from sparkdl.model.recipe import Recipe
from sparkdl.replica.run import ReplicaHandle, RunSpec
from sparkdl.slab.pool import release
from sparkdl.slab.root import SlabConfig, remove_root

RANKS = 2
ROWS = 32
WIDTH_AND_DEPTH = {0.1: (64, 6), 2.7: (256, 10), 10.0: (512, 10), 100.0: (1024, 25)}


def make_model(size: float) -> nn.Module:
    width, depth = WIDTH_AND_DEPTH[size]
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(*layers)


class Bodies:
    """The task bodies of rank ``rank``: replica ``rank`` and slice ``rank``."""

    def __init__(self, rank: int, size: float, slab: SlabConfig) -> None:
        width = WIDTH_AND_DEPTH[size][0]
        self.rank = rank
        self.run = RunSpec(
            slab, 0, RANKS, RANKS, BatchSpec(num_features=1, num_labels=1), (ROWS, ROWS), threads=1
        )
        recipe = Recipe(
            partial(make_model, size), nn.MSELoss(), partial(torch.optim.Adam, lr=1e-4), seed=0
        )
        source = RecipeSource(cloudpickle.dumps(recipe))
        generator = np.random.default_rng(rank)
        writer = PartitionWriter(slab)
        columns = [generator.normal(size=(8 * ROWS, width)).astype("float32") for _ in "xy"]
        writer.add(["features", "label"], columns)
        samples = writer.finish()
        handle = ReplicaHandle(self.run, rank, samples.checksum)
        (replica,) = prepare_replica(source, rank, [pickle.dumps(handle)])
        self.seat = replica, pickle.dumps(samples)
        self.owner = list(prepare_slice(self.run, source, RANKS, rank, []))
        first = initial_state(None, "state", 0, rank, self.run)
        self.states = tuple(_gather(first.state))
        self.step = IterationMessage(
            index=0, epoch=0, submission=1, oldest_needed=0, rows=((0, ROWS),) * RANKS
        )

    def iteration(self) -> dict[str, float]:
        """Seconds by activity, and of the two bodies."""
        step = replace(self.step, states=self.states)
        body = partial(at_replicas, partial(send_gradients, step, None), self.states, None, {})
        frames, seconds = _timed(
            "forward-backward task", lambda: list(body(self.rank, iter([self.seat])))[1::2]
        )
        arrived = [sent[self.rank] for sent in _gather(frames)]
        pairs = list(zip(arrived, self.owner, strict=True))
        update = partial(synchronize, step)
        (report,), own_seconds = _timed(
            "synchronization task",
            lambda: list(at_slice(update, to_driver, self.rank, iter(pairs))),
        )
        seconds |= own_seconds
        reports = _gather(pickle.loads(report))
        self.states = tuple(r.state for r in reports)
        assert not any(r.faults for r in reports)
        for own in (*reports[0].replicas[self.rank : self.rank + 1], reports[self.rank]):
            for activity, value in own.seconds.items():
                seconds[activity] = seconds.get(activity, 0.0) + value
        self.step = replace(step, submission=step.submission + 1, oldest_needed=step.submission)
        return seconds


class Plain:
    """Plain PyTorch and Gloo on the same parameters."""

    def __init__(self, rank: int, size: float) -> None:
        self.model = make_model(size)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.fused = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        width = WIDTH_AND_DEPTH[size][0]
        self.x, self.y = torch.randn(2, ROWS, width)
        count = sum(p.numel() for p in self.model.parameters())
        self.flat, self.other = torch.zeros(count), torch.ones(count)

    def iteration(self) -> dict[str, float]:
        seconds = {}
        for name, work in (
            ("plain forward and backward", self._backward),
            ("all-reduce", partial(dist.all_reduce, self.flat)),
            ("Adam, torch's default", self.adam.step),
            ("Adam, fused", self.fused.step),
            ("a copy of the parameters", partial(self.flat.copy_, self.other)),
        ):
            seconds |= _timed(name, work)[1]
        return seconds

    def _backward(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        nn.functional.mse_loss(self.model(self.x), self.y).backward()


def _timed(name: str, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``work`` returned, and its seconds: real ones, and those of this process on a core."""
    dist.barrier()
    real, processor = time.perf_counter(), time.process_time()
    result = work()
    processor, real = time.process_time() - processor, time.perf_counter() - real
    return result, {name: real, f"{name}, processor": processor}


def _gather(value: object) -> list:
    everyone: list = [None] * RANKS
    dist.all_gather_object(everyone, value)
    return everyone


def _rank(rank: int, folder: str, slabs: dict[float, SlabConfig], iterations: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for size, slab in slabs.items():
        bodies, plain, records = Bodies(rank, size, slab), Plain(rank, size), []
        for _ in range(iterations + 5):
            seconds = [s | t for s, t in [(bodies.iteration(), plain.iteration())]]
            records += [
                {name: max(each[name] for each in both) for name in both[0]}
                for both in zip(*_gather(seconds), strict=True)
            ]
        if rank == 0:
            _show(size, records[5:])
        release(slab.name)
    dist.destroy_process_group()


def _show(size: float, records: list[dict[str, float]]) -> None:
    def ms(name: str) -> float:
        return 1e3 * statistics.median([r[name] for r in records])

    bodies = ["forward-backward task", "synchronization task"]
    plain = ["plain forward and backward", "all-reduce", "Adam, torch's default", "Adam, fused"]
    touched = {  # bytes that one process reads and writes at least, in units of the parameters
        "fetch": (2.0, "read W, write W"),
        "publish": (2.0, "read G, write G"),
        "update": (1 + 6 / RANKS, "read G, read 3/N W, write 3/N W"),
    }
    copy = "a copy of the parameters"
    print(f"\n{size:g} MB of parameters, medians of {len(records)} iterations, ms\n")
    print(f"  {'':28s}{'real':>9s}{'processor':>11s}   a copy of the bytes it must touch")
    for name in (*bodies, *plain, copy):
        print(f"  {name:28s}{ms(name):9.2f}{ms(f'{name}, processor'):11.2f}")
    for name in ("data", "fetch", "forward", "backward", "publish", "reduce", "update"):
        if name in records[0]:
            units, what = touched.get(name, (0.0, ""))
            least = f"{units / 2 * ms(copy):8.2f}  {what}" if units else ""
            print(f"  {name:28s}{ms(name):9.2f}{'':14s}{least}")
    for kind in ("", ", processor"):
        beyond = sum(ms(f"{name}{kind}") for name in bodies) - ms(f"{plain[0]}{kind}")
        for adam in plain[2:]:
            ddp = ms(f"all-reduce{kind}") + ms(f"{adam}{kind}")
            print(
                f"  beyond forward and backward{kind}: {beyond:.2f}; "
                f"all-reduce and {adam}: {ddp:.2f}; ratio {beyond / ddp:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="0.1,2.7,100", help="MB of parameters")
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args()
    slabs = {
        float(size): SlabConfig.new("/dev/shm", f"bytes{os.getpid()}")
        for size in options.sizes.split(",")
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (folder, slabs, options.iterations), nprocs=RANKS)
    finally:
        for slab in slabs.values():
            remove_root(slab)
            assert not Path(slab.directory, slab.name).exists()


if __name__ == "__main__":
    main()

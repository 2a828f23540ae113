"""An iteration between nodes: milliseconds, and bytes beside the least there can be.

    python benchmarks/between_nodes.py [--sizes 25,100] [--replicas 1,2] [--slices 0,1] [--rounds 3]
        [--iterations 6] [--nodes 2]

Two executors (or more) of this machine with slab roots apart, so that bytes go through Spark's shuffle
as they would between two machines: ``local-cluster[2,R,2048]``, R replicas a node, as many slices as
replicas (0) or as many as is said. Where R > 1, runs in which nodes sum their gradients first take
turns with runs in which every replica sends its own; ``ratio`` is of their medians. Adam, layers of
equal width, global batch 64. "bytes" are those of the busiest node and direction, "least" is
2 P (K - 1) / K of the flat vector. "processor" is the time of driver, JVMs and workers together in an
iteration, which other work on the machine hardly changes, while it may change "ms" by any factor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pyspark
import torch
from torch import nn

import sparkdl
from sparkdl.engines.shuffle import forms
from sparkdl.engines.shuffle.messages import least_bytes

WIDTH_AND_DEPTH = {0.1: (64, 6), 1: (256, 4), 25: (1024, 6), 100: (1024, 25)}
GLOBAL_BATCH = 64
RESULT = "RESULT "
Way = tuple[int, bool]
"""The number of slices, and whether nodes sum."""


def make_model(size: float) -> nn.Module:
    """Square layers with tanh; ``size`` is a key of ``WIDTH_AND_DEPTH``."""
    width, depth = WIDTH_AND_DEPTH[size]
    return nn.Sequential(
        *[m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.Tanh())]
    )


def processor_seconds() -> float:
    """Of this process and all that descend from it, the dead children of each included."""
    parents, submissions = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(stat.parent.name)
        parents[pid], submissions[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    mine = os.getpid()

    def descends(pid: int) -> bool:
        while pid not in (mine, 0):
            pid = parents.get(pid, 0)
        return pid == mine

    return sum(submissions[pid] for pid in submissions if descends(pid)) / os.sysconf("SC_CLK_TCK")


class Processor(sparkdl.Callback):
    """Seconds of processor time after each iteration."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_iteration_end(self, trainer, state) -> None:
        self.seconds.append(processor_seconds())


def fit(spark, size: float, replicas: int, slices: int, iterations: int, summed: bool):
    """Milliseconds of each iteration but the first few, of processor time in one of them; the last
    loss, bytes, and where the time went."""
    forms.BYTES_PER_SECOND = 1e-9 if summed else 1e99
    width = WIDTH_AND_DEPTH[size][0]
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, GLOBAL_BATCH * 2, width)).astype("float32")
    samples = [(a, b) for a, b in zip(x, y, strict=True)]
    processor = Processor()
    trainer = sparkdl.Trainer(
        callbacks=[processor],
        model=partial(make_model, size),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        batch_size=GLOBAL_BATCH,
        replicas=replicas,
        slices=slices,
        stop=sparkdl.max_iteration(iterations + max(2, iterations // 4)),
    )
    history = trainer.fit(spark.sparkContext.parallelize(samples, replicas)).history
    clock = [record["seconds"] for record in history]
    whole = [1e3 * (b - a) for a, b in itertools.pairwise(clock)][-iterations:]
    spent = processor.seconds[-1] - processor.seconds[-1 - iterations]
    sent = list(history)[-1]["bytes_sent"]
    return whole, 1e3 * spent / iterations, history.losses[-1], sent, history.timings()


def run(options: dict) -> None:
    """All fits of one master, in this process."""
    nodes, replicas = options["nodes"], options["replicas"]
    spark = sparkdl.session(
        f"local-cluster[{nodes},{replicas},2048]",
        **{
            "spark.ui.enabled": "false",
            "spark.sparkdl.progress": "false",
            "spark.sparkdl.slab.dir": "slabs",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        },
    )
    rows = []
    try:
        slots = nodes * replicas
        spark.sparkContext.parallelize(range(slots), slots).count()
        for size in options["sizes"]:
            ways = list(
                itertools.product(options["slices"], [False, True] if replicas > 1 else [False])
            )
            times: dict[Way, list[float]] = {way: [] for way in ways}
            spent: dict[Way, list[float]] = {way: [] for way in ways}
            sent, losses, timings = {}, set(), {}
            for _ in range(options["rounds"]):
                for way in ways:
                    whole, processor, loss, sent[way], timings[way] = fit(
                        spark, size, slots, way[0] or slots, options["iterations"], way[1]
                    )
                    times[way] += whole
                    spent[way].append(processor)
                    losses.add(loss)
            assert len(losses) == 1, "neither slices nor sums on the nodes change a bit"
            for way in ways:
                median = {name: 1e3 * row["median"] for name, row in timings[way].items()}
                ms, processor = statistics.median(times[way]), statistics.mean(spent[way])
                rows.append([size, replicas, *way, ms, processor, sent[way], median])
    finally:
        spark.stop()
    print(RESULT + json.dumps(rows), flush=True)


def launch(**options) -> list:
    """:func:`run` in a process of its own, whose working folder and Spark home can be written to."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "spark"
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            if path.name != "work":
                (home / path.name).symlink_to(path)
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": f"{folder}/local",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), str(Path(sparkdl.__file__).parents[1])]
            ),
        }
        done = subprocess.run(
            [sys.executable, Path(__file__).resolve(), "--run", json.dumps(options)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            start_new_session=True,
        )
    line = next(line for line in done.stdout.splitlines() if line.startswith(RESULT))
    return json.loads(line.removeprefix(RESULT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="25,100", help="MB of parameters")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--replicas", default="1,2", help="a node")
    parser.add_argument("--slices", default="0", help="0: as many as replicas")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each kind, taking turns")
    parser.add_argument("--iterations", type=int, default=6, help="measured in each fit")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(json.loads(options.run))
        return
    print(
        "| MB | replicas a node | slices | nodes sum | ms | ratio | processor ms | ratio | MB sent "
        "| least MB | where (ms) |"
    )
    print("|" + "---|" * 11)
    for replicas in map(int, options.replicas.split(",")):
        rows = launch(
            nodes=options.nodes,
            sizes=[float(size) for size in options.sizes.split(",")],
            replicas=replicas,
            slices=[int(count) for count in options.slices.split(",")],
            rounds=options.rounds,
            iterations=options.iterations,
        )
        plain = {row[0]: row for row in reversed(rows) if not row[3]}
        for size, count, slices, summed, ms, processor, sent, where in rows:
            width, depth = WIDTH_AND_DEPTH[size]
            least = least_bytes(4 * width * width * depth, options.nodes)
            parts = ", ".join(f"{name} {value:.0f}" for name, value in where.items())
            print(
                f"| {size:g} | {count} | {slices or options.nodes * count} "
                f"| {'yes' if summed else 'no'} "
                f"| {ms:.0f} | {ms / plain[size][4]:.2f} "
                f"| {processor:.0f} | {processor / plain[size][5]:.2f} "
                f"| {sent / 1e6:.2f} | {least / 1e6:.2f} | {parts} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

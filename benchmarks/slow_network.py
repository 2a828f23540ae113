"""Two nodes with a network as slow as is wanted: sparkdl beside torch by itself.

    python benchmarks/slow_network.py [--mbit 1000,10000] [--works mlp:1024,resnet:64] [--quick]
        [--strategies ddp,zero1,fsdp,tensor,pipeline]

As root on Linux: the nodes are network namespaces of this machine, see ``nodes.py``, with a standalone
Spark cluster on them, one core each. For each speed (million bits a second each way; 0: no limit) and
model, in turn: each strategy by torch over Gloo, a rank of one thread a node (``strategies.py``); the
gang with each; the shuffle engine, which sends what ``--send`` says. Milliseconds of an iteration,
medians, the first quarter left out; "/ torch" is of these, for the shuffle engine by DDP's. "MB sent"
is of the busiest node and direction.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ddp
import nodes
from harness import (
    HERE,
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
from models import WORKS, work_named

import sparkdl

PORT = 29_400
SENDING: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"wire": "bf16"},
    "PowerSGD": {"compression": sparkdl.PowerSGD(4)},
    "top-k": {"compression": sparkdl.TopK(0.01)},
}
"""What replicas send; the keys of ``--send``."""


def with_torch(
    some: Sequence[nodes.Node], folder: Path, name: str, batch: int, steps: int, strategy: str
) -> float:
    """Milliseconds of a step."""
    out, warm_up = folder / f"{strategy}-{name}-{batch}.json", steps // 4
    arguments = ddp.step_arguments(name, batch, steps - warm_up, warm_up, strategy)
    ranks = [
        node.start(
            [sys.executable, str(HERE / "ddp.py"), *arguments, "--out", str(out)],
            folder,
            RANK=str(node.number),
            WORLD_SIZE=str(len(some)),
            MASTER_ADDR=some[0].address,
            MASTER_PORT=str(PORT),
            GLOO_SOCKET_IFNAME=nodes.CARD,
            OMP_NUM_THREADS="1",
        )
        for node in some
    ]
    try:
        if any(rank.wait() for rank in ranks):
            raise RuntimeError((folder / "node0.log").read_text())
    finally:
        nodes.end(ranks)
    return json.loads(out.read_text())["step"]


def with_sparkdl(
    master: str, name: str, batch: int, steps: int, ways: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """For each way, milliseconds of an iteration and of its parts, and MB sent. A run of the last way,
    which does not count, warms the JVMs up."""
    work, found = work_named(name), {}
    size = {"spark.executor.memory": "2g", "spark.cores.max": "2"}
    spark = session(master, **nodes.SETTINGS, **size)
    try:
        data = work.rdd(spark, partitions=2).persist()
        data.count()
        stop = sparkdl.max_iteration(steps)
        for how in list(ways.values())[-1:]:
            trainer(work, batch, stop, **how).fit(data)
        for way, how in ways.items():
            history = list(trainer(work, batch, stop, **how).fit(data).history)
            sent = {"MB": history[-1].get("bytes_sent", 0) / 1e6}
            found[way] = medians(laps(history)[steps // 4 :]) | sent
    finally:
        spark.stop()
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--mbit", default="1000,10000")
    parser.add_argument("--works", default="mlp:1024,resnet:64,transformer:16")
    parser.add_argument("--send", default="fp32,bf16,PowerSGD")
    parser.add_argument(
        "--slices", type=int, help="of the shuffle engine; a replica each by default"
    )
    parser.add_argument("--engines", default="torch,gang,shuffle")
    parser.add_argument("--strategies", default="ddp", help="of torch and of the gang")
    parser.add_argument("--steps", type=int, default=160, help="of a small model")
    parser.add_argument("--large", type=int, default=16, help="steps of a large model")
    given = parser.parse_args()
    nodes.enter()
    os.environ["SPARK_LOCAL_IP"] = nodes.DRIVER
    paths = [str(HERE), str(Path(sparkdl.__file__).parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the nodes' too
    small, large = (12, 4) if given.quick else (given.steps, given.large)
    engines, strategies = given.engines.split(","), given.strategies.split(",")
    ways: dict[str, dict[str, Any]] = {}
    if "gang" in engines:
        ways = {f"gang, {s}": {"engine": "gang", "strategy": s} for s in strategies}
    if "shuffle" in engines:
        for how in given.send.split(","):
            ways[f"shuffle, {how}"] = {"slices": given.slices, **SENDING[how]}
    print(hardware(), "\n", flush=True)
    rows = []
    for mbit in map(float, given.mbit.split(",")):
        for item in given.works.split(","):
            name, _, size = item.partition(":")
            batch, steps = int(size), large if WORKS[name].large else small
            with tempfile.TemporaryDirectory() as folder, nodes.network(2, mbit or None) as some:
                found = {}
                for s in strategies if "torch" in engines else ():
                    ms = with_torch(some, Path(folder), name, batch, steps, s)
                    found[f"torch, {s}"] = {"whole": ms}
                with nodes.cluster(some, Path(folder), 1, "3g") as master:
                    found |= in_fresh_process(with_sparkdl, master, name, batch, steps, ways)
            for way, parts in found.items():
                engine, _, strategy = way.partition(", ")
                baseline = found.get(f"torch, {'ddp' if engine == 'shuffle' else strategy}", {})
                ratio, sent = parts["whole"] / baseline.get("whole", math.nan), parts.get("MB")
                rows.append([item, mbit, way, parts["whole"], ratio, sent or None])
                told = ", ".join(f"{key} {value:.1f}" for key, value in parts.items())
                print(f"{item}, {mbit:g} Mbit/s, {way}: {told}", flush=True)
    head = ("model", "Mbit/s", "", "ms", "/ torch", "MB sent")
    print("\n" + markdown(head, rows))
    write_json(given.json, [dict(zip(head, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()

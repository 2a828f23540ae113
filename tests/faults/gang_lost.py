"""Train with the gang engine in one session again and again, each time with other faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fault_table import Cluster, tried
from harness.faulty import chain, pair
from harness.inject import Fault, at

import sparkdl
from sparkdl.checkpoint.store import CheckpointStore

REPLICAS = 2
DDP, ZERO1 = {"strategy": "ddp"}, {"strategy": "zero1"}
PIPELINE = {"strategy": "pipeline", "model": chain}
TENSOR = {"strategy": "tensor", "model": pair}
FSDP = {"strategy": sparkdl.FSDP(units=["layers.0"])}
WRITING = sparkdl.Checkpoint("checkpoints", every=sparkdl.every(2), keep=None, asynchronous=True)
DILOCO = {"consistency": sparkdl.DiLoCo(inner_steps=2)}
COMPRESSED = {"compression": sparkdl.TopK(0.3)}
WRITES = "executor killed, writing"


def all_rows() -> dict[str, tuple[dict, list[Fault]]]:
    """How the trainer differs, and faults, by name."""
    return {
        "none": (DDP, []),
        "rank killed": (DDP, [at(job="fb", iteration=3, partition=1).kill_worker()]),
        "rank killed in its update": (
            ZERO1,
            [at(job="sync", iteration=6, partition=0).kill_worker()],
        ),
        "executor killed": (DDP, [at(job="fb", iteration=6, partition=0).kill_executor()]),
        "executor killed, zero1": (ZERO1, [at(job="fb", iteration=7, partition=1).kill_executor()]),
        "executor killed, fsdp": (FSDP, [at(job="fb", iteration=7, partition=1).kill_executor()]),
        "rank killed at a validation, fsdp": (
            FSDP,
            [at(job="validation", iteration=4, partition=1).kill_worker()],
        ),
        "none, tensor": (TENSOR, []),
        "executor killed, tensor": (
            TENSOR,
            [at(job="sync", iteration=7, partition=1).kill_executor()],
        ),
        "none, pipeline": (PIPELINE, []),
        "rank killed, pipeline": (
            PIPELINE,
            [at(job="sync", iteration=3, partition=1).kill_worker()],
        ),
        "executor killed, pipeline": (
            PIPELINE,
            [at(job="sync", iteration=7, partition=0).kill_executor()],
        ),
        WRITES: (
            {**FSDP, "checkpoint": WRITING},
            [at(job="fb", iteration=7, partition=1).kill_executor()],
        ),
        "executor killed, DiLoCo": (
            {**DDP, **DILOCO},
            [at(job="fb", iteration=11, partition=1).kill_executor()],
        ),
        "executor killed, Gossip": (
            {**DDP, "consistency": sparkdl.Gossip()},
            [at(job="fb", iteration=7, partition=1).kill_executor()],
        ),
        "executor killed, compressed": (
            {**ZERO1, **COMPRESSED},
            [at(job="fb", iteration=6, partition=1).kill_executor()],
        ),
    }


def run(spark, local: str, notes: str, rows: Sequence[str]) -> dict:
    """``local``: the folder of all executors' local directories. ``notes``: of the faults' notes."""
    cluster = Cluster(REPLICAS, Path(local), "slabs")
    results: dict = {}
    spark.conf.set("spark.sparkdl.slab.dir", cluster.slabs)
    spark.conf.set("spark.sparkdl.snapshot.seconds", "0")
    for name in rows:
        how, faults = all_rows()[name]
        results[name] = tried(spark, cluster, faults, Path(notes) / name, engine="gang", **how)
        print(name, results[name], flush=True)
    if WRITES in rows:
        found = [m.iteration for _, m in CheckpointStore.open(WRITING.path).candidates()]
        results[WRITES]["checkpoints"] = found
    return results

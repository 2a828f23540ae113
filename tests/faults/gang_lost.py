"""Script: train with the gang engine on one cluster again and again, each time with other faults."""

from __future__ import annotations

from pathlib import Path

from fault_table import Cluster, tried
from harness.inject import Fault, at

REPLICAS = 2


def rows() -> dict[str, tuple[str, list[Fault]]]:
    """Strategy and faults by name."""
    return {
        "none": ("ddp", []),
        "rank killed": ("ddp", [at(job="fb", iteration=3, partition=1).kill_worker()]),
        "rank killed in its update": (
            "zero1",
            [at(job="sync", iteration=6, partition=0).kill_worker()],
        ),
        "executor killed": ("ddp", [at(job="fb", iteration=6, partition=0).kill_executor()]),
        "executor killed, zero1": (
            "zero1",
            [at(job="fb", iteration=7, partition=1).kill_executor()],
        ),
    }


def main() -> None:
    from launch import answer, session, spec

    given = spec()
    cluster = Cluster(REPLICAS, Path(given["local"]), "slabs")
    results = {}
    settings = {"spark.sparkdl.slab.dir": cluster.slabs, **given["settings"]}
    with session(given["master"], **settings) as spark:
        for name, (strategy, faults) in rows().items():
            notes = Path(given["notes"]) / name
            how = {"engine": "gang", "strategy": strategy}
            results[name] = tried(spark, cluster, faults, notes, **how)
            print(name, results[name], flush=True)
    answer(results)


if __name__ == "__main__":
    main()

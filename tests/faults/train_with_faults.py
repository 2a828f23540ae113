"""Script: train on one master again and again, each time with another fault; what came of it."""

from __future__ import annotations

from pathlib import Path

from harness import faulty
from harness.inject import Fault, at

import sparkdl
from sparkdl.engines.shuffle import shuffled

REPLICAS, SLICES, ITERATIONS = 3, 2, 6


def trainer(*faults: Fault, **changes) -> sparkdl.Trainer:
    return faulty.trainer(
        REPLICAS, faults, ITERATIONS, **{"slices": SLICES, "batch_size": 16, **changes}
    )


def frame(spark):
    return faulty.frame(spark, REPLICAS, rows=60)


FAULTS = {
    "raise in forward-backward": at(job="fb", iteration=3, partition=1).raise_once(),
    "raise in synchronization": at(job="sync", iteration=3, partition=1).raise_once(),
    "kill in forward-backward": at(job="fb", iteration=4, partition=2).kill_worker(),
    "kill in synchronization": at(job="sync", iteration=4, partition=0).kill_worker(),
}
"""All of them strike in one run, after another."""
COMPRESSED = at(job="fb", iteration=4, partition=2).kill_worker()
COMPRESSION = {"compression": sparkdl.PowerSGD(1)}
LASTING = {
    "lasting in forward-backward": at(job="fb", iteration=3, partition=1).raise_always(),
    "lasting in synchronization": at(job="sync", iteration=5, partition=1).raise_always(),
    "lasting kill": at(job="sync", iteration=2, partition=0).kill_worker(times=10),
}


def leftovers(spark) -> dict[str, object]:
    """What a fit left in Spark and on disk."""
    import innards

    context = spark.sparkContext
    context._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker follows the scheduler
    return {
        "persisted": innards.persisted(context),
        "active stages": list(context.statusTracker().getActiveStageIds()),
        "shuffles": innards.shuffles(context),
        "slabs": [
            str(p) for top in ("slabs", "spark/work") for p in Path(top).glob("**/sparkdl-*")
        ],
        "properties": [
            context.getLocalProperty(f"spark.{key}")
            for key in ("jobGroup.id", "job.description", "job.interruptOnCancel", "callSite.short")
        ],
    }


def main() -> None:
    from launch import answer, digest, session, spec

    given = spec()
    results, notes = {}, Path(given["notes"])
    settings = {"spark.sparkdl.slab.dir": "slabs"}
    if given["sums"]:  # whatever the size of the model
        shuffled.BYTES_PER_SECOND = 1e-9
    with session(given["master"], **settings) as spark:
        df = frame(spark)
        spark.sparkContext.parallelize(range(4), 4).count()  # until all executors are known
        before = leftovers(spark)
        several = [fault.into(notes / name) for name, fault in FAULTS.items()]
        found = digest(trainer(*several).fit(df).module)
        results["faults"] = {"digest": found, "struck": [len(fault.told()) for fault in several]}
        armed = COMPRESSED.into(notes / "compressed")
        found = digest(trainer(armed, **COMPRESSION).fit(df).module)
        results["compressed"] = {"digest": found, "struck": len(armed.told())}
        results["lasting"] = given["lasting"]
        for name in given["lasting"]:
            armed = LASTING[name].into(notes / name)
            try:
                trainer(armed).fit(df)
            except Exception as error:
                results[name] = {
                    "attempts": [note["attempt"] for note in armed.told()],
                    "type": type(error).__name__,
                    "message": str(error),
                    "shown alone": error.__cause__ is None and error.__suppress_context__,
                    "after": leftovers(spark),
                }
        results["undisturbed"] = digest(trainer().fit(df).module)
        results["leftovers"] = [before, leftovers(spark)]
    answer(results)


if __name__ == "__main__":
    main()

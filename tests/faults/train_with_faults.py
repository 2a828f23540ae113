"""Script: train on one master again and again, each time with another fault; what came of it."""

from __future__ import annotations

import gc
import itertools
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lose_executors
from harness import faulty
from harness.cluster import PATIENT
from harness.inject import Fault, at
from harness.slabs import all_slabs
from harness.strikes import Strike, Strikes

import sparkdl
from sparkdl.engines.shuffle import forms

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


ENGINES: dict[str, dict[str, Any]] = {
    "shuffle": {"engine": "shuffle", "slices": 2},
    "gang": {"engine": "gang", "strategy": "zero1"},
}
DELETED = {
    f"{engine}, {when}": (engine, when)
    for engine in ENGINES
    for when in ("after every iteration", "while samples are placed", "without end")
}


class Delete(sparkdl.Callback):
    """Delete all slabs after every iteration."""

    times = 0

    def on_iteration_end(self, trainer, state) -> None:
        for root in all_slabs():
            shutil.rmtree(root, ignore_errors=True)
            self.times += 1


def moved(spark):
    """More partitions than replicas: what a replica reads refers to what others have written."""
    return faulty.frame(spark, 5, rows=60)


def deletions(when: str) -> Iterable[Strike]:
    """From the beginning of a fit on."""
    draw = random.Random(1)
    if when == "without end":
        return (("slabs", 0, 0.0) for _ in itertools.count())
    return [("slabs", 0, draw.uniform(0, 0.3)) for _ in range(6 * when.startswith("while"))]


def fit_moved(spark, **changes) -> dict:
    df = moved(spark)
    validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(2))
    return faulty.outcome(
        faulty.trainer(2, (), 3, batch_size=16, validation=validation, **changes).fit(df)
    )


def fit_without_slabs(spark, engine: str, when: str) -> dict:
    """What comes of a fit whose slabs are deleted, and how often they were."""
    delete = Delete()
    callbacks = [delete] if when.startswith("after") else []
    strikes = Strikes(spark.sparkContext, deletions(when), 1, lambda: 0)
    strikes.start()
    result: dict = {}
    try:
        result["outcome"] = fit_moved(spark, callbacks=callbacks, **ENGINES[engine])
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    strikes.stop()
    return {**result, "times": delete.times + strikes.done["slabs"]}


def leftovers(spark) -> dict[str, object]:
    """What a fit left in Spark and on disk, apart from shuffles that nothing holds: those of a reading
    that was broken off go when Spark's cleaner notices."""
    import innards

    context = spark.sparkContext
    context._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker follows the scheduler
    if innards.shuffles(context):
        gc.collect()
        innards.drain_py4j(context)
        innards.collect_garbage(context)
        innards.eventually(lambda: not innards.shuffles(context))
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
    settings = {**PATIENT, "spark.task.maxFailures": "4", "spark.sparkdl.slab.dir": "slabs"}
    if given["sums"]:  # whatever the size of the model
        forms.BYTES_PER_SECOND = 1e-9
    with session(given["master"], **settings) as spark:
        df = frame(spark)
        spark.sparkContext.parallelize(range(4), 4).count()  # until all executors are known
        before = leftovers(spark)
        several = [fault.into(notes / name) for name, fault in FAULTS.items()]
        found = digest(trainer(*several).fit(df).module)
        results["faults"] = {"digest": found, "struck": [len(fault.told()) for fault in several]}
        if given["compressed"]:
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
        for name in given["deleted"]:
            results[name] = fit_without_slabs(spark, *DELETED[name])
        results["undisturbed"] = digest(trainer().fit(df).module)
        results["leftovers"] = [before, leftovers(spark)]
        results["lost"] = lose_executors.run(spark, str(notes / "lost"), given["lost"])
    answer(results)


if __name__ == "__main__":
    main()

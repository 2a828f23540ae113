"""Script: gangs that lose an executor, for good or by a kill; what came of each fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import fork_server
from harness import processes
from harness.faulty import frame, outcome, trainer
from harness.slabs import slabs_apart
from hosted import hosted_ranks
from pyspark import SparkContext

import sparkdl
from sparkdl.gang import slots

AFTER = 4
"""Iterations, after which the executor goes."""
SOME_TIME = sparkdl.max_time(3600)
"""With it no iteration is foreseen: ranks are not ahead of the driver when the executor goes."""
SHARED = "shared"
"""Folder of slabs, in the working directory, where executors share them."""
GONE_SECONDS = 60.0
SLOT_SECONDS = 5.0
"""What is lost for good does not come, however long the driver waits for it: 30 s by default."""


@dataclass(frozen=True)
class Strike(sparkdl.Callback):
    """Something happens to an executor. The fit goes on when that is gone with all that it has started:
    its ranks outlive it by a moment, in which the few iterations that are left may be done; and nobody
    shall take it for one that is there.

    ``ended``: when it went on; what comes before takes its time, too."""

    context: SparkContext
    happens: Callable[[SparkContext], None]
    ended: list[float] = field(default_factory=list)

    def on_iteration_end(self, trainer, state) -> None:
        if state.iteration != AFTER:
            return
        driver = processes.driver(self.context)
        there = {pid: fork_server.below(pid) for pid in processes.executors(driver)}
        self.happens(self.context)
        processes.wait_until(
            lambda: any(
                not any(map(processes.alive, [jvm, *started])) for jvm, started in there.items()
            ),
            GONE_SECONDS,
            "an executor is gone",
        )
        self.ended.append(time.monotonic())


def lose_one(context: SparkContext) -> None:
    """Spark is told to do without one of its executors, and does not replace it."""
    listed = context._jsc.sc().statusStore().executorList(True)
    names = sorted({listed.apply(i).id() for i in range(listed.size())} - {"driver"})
    assert context._jsc.sc().killExecutor(names[-1])


def kill_one(context: SparkContext) -> None:
    """SIGKILL for the JVM of one, which Spark replaces."""
    there = processes.executors(processes.driver(context))
    nothing = getattr(getattr(context._jvm.scala.collection.immutable, "Map$"), "MODULE$").empty()
    assert context._jsc.sc().requestTotalExecutors(len(there), 0, nothing)
    processes.kill(there[-1])


STRIKES = {"lost": lose_one, "killed": kill_one}


def fit(spark, run: sparkdl.Trainer) -> dict:
    """Its outcome or its error, the log, the seconds since each strike, and what is left of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    result = dict[str, object]()
    try:
        result = outcome(run.fit(frame(spark, run.replicas)))
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("sparkdl").removeHandler(handler)
    now, strikes = time.monotonic(), [one for one in run.callbacks if isinstance(one, Strike)]
    context = spark.sparkContext
    slabs = [*Path(SHARED).glob("sparkdl-*"), *slabs_apart()]
    return {
        **result,
        "log": lines,
        "seconds": [round(now - ended, 1) for strike in strikes for ended in strike.ended],
        "left": [*hosted_ranks(), *map(str, slabs), *context._jsc.getPersistentRDDs().keySet()],
    }


def main() -> None:
    from launch import answer, session, spec

    given, results = spec(), {}
    slots.SLOT_SECONDS = SLOT_SECONDS
    with session(given["master"], **given["settings"]) as spark:
        for name, changes in given["fits"].items():
            run = trainer(given["replicas"], engine="gang", **changes)
            if name in STRIKES:
                strike = Strike(spark.sparkContext, STRIKES[name])
                run = replace(run, callbacks=[strike], stop=run.stop | SOME_TIME)
            results[name] = fit(spark, run)
            print(name, results[name], flush=True)
    answer(results)


if __name__ == "__main__":
    main()

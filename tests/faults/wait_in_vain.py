"""Script: fit where no executor is, and where the only one is lost for good; how each fit ends."""

from __future__ import annotations

import time
from pathlib import Path

from harness.faulty import frame, trainer
from harness.inject import at

BOUNDS = {"none from the beginning": 4, "all lost": 30}
"""Seconds, of ``spark.sparkdl.timeout.seconds``. While executors are there, the second bounds all that
they do, also on a slow machine."""


def warm(_: int) -> None:
    """A first task takes its time: what it imports."""
    import sparkdl.train.fit  # noqa: F401


def main() -> None:
    from launch import answer, session, spec

    given, results = spec(), {}
    fault = at(job="fb", iteration=3, partition=0).kill_host().into(Path(given["notes"]))
    with session(given["master"], **given["settings"]) as spark:
        context, df = spark.sparkContext, frame(spark, 2)
        for name, seconds in BOUNDS.items():
            spark.conf.set("spark.sparkdl.timeout.seconds", str(seconds))
            began, error = time.monotonic(), ""
            try:
                trainer(2, [fault]).fit(df)
            except Exception as ended:
                error = f"{type(ended).__name__}: {ended}"
            results[name] = {"error": error, "seconds": time.monotonic() - began}
            if name != "all lost":
                Path(given["told"]).touch()  # a worker may come
                context.parallelize(range(2), 2).foreach(warm)
    answer({**results, "struck": len(fault.told())})


if __name__ == "__main__":
    main()

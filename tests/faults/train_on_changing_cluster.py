"""Script: train once; tell of each iteration and of the executors that Spark has then."""

from __future__ import annotations

import time
from pathlib import Path

from harness.faulty import frame, outcome, trainer
from harness.inject import at

import sparkdl

ITERATIONS = 40
SLOW_SECONDS = 6.0
"""Spark asks for another executor where tasks wait for a second."""


class Tell(sparkdl.Callback):
    """A line an iteration: its number, executors. ``pauses``: seconds to wait after an iteration."""

    def __init__(self, path: Path, context, pauses: dict[int, float]) -> None:
        self.path, self.context, self.pauses = path, context, pauses

    def on_iteration_end(self, trainer, state) -> None:
        executors = (
            self.context._jsc.sc().getExecutorMemoryStatus().size() - 1
        )  # without the driver
        with self.path.open("a") as file:
            file.write(f"{state.iteration} {executors}\n")
        time.sleep(self.pauses.get(state.iteration, 0.0))


def main() -> None:
    from launch import answer, session, spec

    given = spec()
    pauses = {int(iteration): seconds for iteration, seconds in given["pauses"].items()}
    slow = at(job="fb", iteration=given["slow"], partition=0).sleep(SLOW_SECONDS)
    slow = slow.into(Path(given["notes"]))
    with session(given["master"], **given["settings"]) as spark:
        tell = Tell(Path(given["told"]), spark.sparkContext, pauses)
        run = trainer(given["replicas"], [slow], ITERATIONS, callbacks=[tell])
        answer(outcome(run.fit(frame(spark, given["replicas"]))))


if __name__ == "__main__":
    main()

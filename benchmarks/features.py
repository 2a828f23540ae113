"""What each feature of the trainer adds to an iteration, each beside a plain run.

    python benchmarks/features.py [--iterations 60] [--only clip_norm,ema] [--json FILE]

A perceptron 784-512-512-10 (2.7 MB of parameters), Adam, global batch 256, M = N = 2, shuffle engine.
For each feature two fits take turns in one session, an iteration of the one, an iteration of the
other, so that both meet the same noise of the machine; the first quarter is warm-up. What runs every
tenth iteration is spread over ten: nine ordinary ones and one of these, medians each. Local steps are
counted per batch. Milliseconds, of time and of processor time: that of this process, Spark's JVM and
the Python workers together, which says more than time does while the machine is busy with other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RANKS, session
from models import WORKS
from pyspark import RDD, InheritableThread
from pyspark.sql import SparkSession
from usage import cpu_seconds

import sparkdl

WORK = WORKS["mlp"]
BATCH = 256
PERIOD = 10
PATIENCE = 120.0


@dataclass
class Turns:
    """Whose turn it is among those that take part; the first waits for the second."""

    expected: int = 2
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _waiting: list[int] = field(default_factory=list)
    _at_work: int | None = None

    def wait(self, me: int) -> None:
        """Hand the turn on, and come back when it is ``me``'s."""
        with self._condition:
            self._waiting.append(me)
            self._at_work = None
            self._condition.notify_all()
            mine = self._condition.wait_for(
                lambda: (
                    self._at_work is None
                    and self._waiting[0] == me
                    and len(self._waiting) >= self.expected
                ),
                PATIENCE,
            )
            if not mine:
                raise TimeoutError("the other run does not take its turn")
            self._at_work = self._waiting.pop(0)

    def leave(self) -> None:
        """Take part no longer."""
        with self._condition:
            self.expected -= 1
            self._at_work = None
            self._condition.notify_all()


@dataclass
class Laps(sparkdl.Callback):
    """Of each iteration with all that follows it, without waiting for the turn: seconds, and seconds
    of processor time."""

    turns: Turns
    number: int
    taken: list[tuple[float, float]] = field(default_factory=list)
    _since: tuple[float, float] | None = None

    def on_iteration_start(self, trainer, state) -> None:
        self._book()
        self.turns.wait(self.number)
        processor = cpu_seconds()
        self._since = time.perf_counter(), processor

    def on_fit_end(self, trainer, state) -> None:
        self._book()

    def _book(self) -> None:
        if self._since is not None:
            ended, (began, processor) = time.perf_counter(), self._since
            self.taken.append((ended - began, cpu_seconds() - processor))


def features(data: RDD, folder: str) -> dict[str, dict[str, Any]]:
    """Name -> what the trainer is given beyond the plain run."""
    tenth = sparkdl.every(PERIOD)
    return {
        "none": {},
        "clip_value": {"clip_value": 0.1},
        "clip_norm, N = 1": {"clip_norm": 1.0, "slices": 1},
        "clip_norm": {"clip_norm": 1.0},
        'wire="bf16"': {"wire": "bf16"},
        "accumulate=4": {"accumulate": 4},
        "local_steps=4": {"local_steps": 4},
        "ema": {"ema": 0.999},
        "histograms": {"histograms": sparkdl.every(1)},
        "validation / 10": {
            "validation": sparkdl.Validation(data, metrics=["accuracy"], every=tenth)
        },
        "checkpoint / 10": {"checkpoint": sparkdl.Checkpoint(f"{folder}/checkpoint", every=tenth)},
    }


def side_by_side(data: RDD, extra: dict[str, Any], iterations: int) -> tuple[list, list]:
    """What each iteration took with ``extra``, and in a plain run; warm-up left out."""
    turns = Turns()
    plain = {"slices": extra["slices"]} if "slices" in extra else {}
    laps = [Laps(turns, 0), Laps(turns, 1)]
    problems: list[BaseException] = []
    warm = PERIOD * -(-iterations // (4 * PERIOD))

    def run(number: int, more: dict[str, Any]) -> None:
        try:
            sparkdl.Trainer(
                model=WORK.make,
                loss=WORK.loss,
                optimizer=partial(torch.optim.Adam, lr=1e-4),
                batch_size=BATCH,
                replicas=RANKS,
                stop=sparkdl.max_iteration(warm + iterations),
                callbacks=[laps[number]],
                **more,
            ).fit(data)
        except BaseException as error:  # of a thread: raised below
            problems.append(error)
        finally:
            turns.leave()

    threads = [
        InheritableThread(target=run, args=arguments) for arguments in enumerate([extra, plain])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return laps[0].taken[warm:], laps[1].taken[warm:]


def cost(seconds: list[float], steps: int) -> tuple[float, float]:
    """Milliseconds per batch: an ordinary iteration, and the mean of ten with a tenth one."""
    tenth = seconds[PERIOD - 1 :: PERIOD]
    others = [s for i, s in enumerate(seconds, 1) if i % PERIOD]
    often, seldom = (statistics.median(some) * 1e3 / steps for some in (others, tenth))
    return often, ((PERIOD - 1) * often + seldom) / PERIOD


def measure(spark: SparkSession, iterations: int, wanted: Callable[[str], bool]) -> list[dict]:
    """Every feature's figures, printed as they come."""
    data = WORK.rdd(spark, RANKS, 8 * BATCH).persist()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in features(data, folder).items():
            if not wanted(name):
                continue
            with_it, plain = side_by_side(data, extra, iterations)
            row: dict[str, Any] = {"feature": name}
            for what, own, base in zip(
                ("time", "processor"),
                zip(*with_it, strict=True),
                zip(*plain, strict=True),
                strict=True,
            ):
                value = cost(list(own), extra.get("local_steps", 1))[name.endswith("/ 10")]
                row[what], row[f"{what}, plain"] = value, cost(list(base), 1)[0]
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Of time, then of processor time: with the feature, without, ratio."""
    cells = f"{row['feature']:18}"
    for what in ("time", "processor"):
        own, base = row[what], row[f"{what}, plain"]
        cells += f"{own:9.1f}{base:9.1f}{own / base:9.2f}"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60, help="measured, of each run")
    parser.add_argument("--only", help="beginnings of names, with commas between")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    only = tuple(options.only.split(",")) if options.only else ("",)
    spark = session()
    try:
        print(
            f"{'feature':18}"
            + f"{'ms':>9}{'plain':>9}{'ratio':>9}{'CPU ms':>9}{'plain':>9}{'ratio':>9}"
        )
        rows = measure(spark, options.iterations, lambda name: name.startswith(only))
    finally:
        spark.stop()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Predictions of ``sparkdl.plan`` beside measurements: five models, twelve configurations, two rounds.

    python benchmarks/planner.py [--quick] [--works mlp:256,resnet] [--configurations 12] [--rounds 2]

In each round, in a fresh process with a session of local[4], a model is planned, and configurations
spread over the rows of the plan are trained; the last third of the iterations counts. "error" is that
of the prediction, mean and median, by the clock and in processor time of all processes over the cores
that they can have; "between" the difference of two measurements of the configurations that both rounds
have, a common factor taken out; "rank" Spearman's correlation; "regret" how much longer than the best
one the planned one takes, "of three" the best of the first three rows. A figure below twice "between"
says nothing more than that.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import hardware, in_fresh_process, markdown, options, session, write_json
from models import WORKS, tabular

import sparkdl
from sparkdl.session import SessionFacts
from sparkdl.train.chosen import timed_fit
from sparkdl.train.fit import run

SMALL = {"tabular": tabular(batch=256, samples=8192)}
MODELS = "tabular:256,mlp:256,lenet:256,resnet:64,transformer:16"


@dataclass(frozen=True)
class Measured:
    """A configuration: predicted seconds of an iteration, by the clock and of a processor."""

    choice: str
    row: int
    predicted: float
    clock: float
    processor: float


def spread(count: int, wanted: int) -> list[int]:
    """The first three of ``count`` rows, and others evenly between them and the last."""
    if count <= wanted:
        return list(range(1, count + 1))
    rest = wanted - 3
    return [1, 2, 3, *(4 + round(i * (count - 4) / max(1, rest - 1)) for i in range(rest))]


def one_round(name: str, batch: int, wanted: int, iterations: int) -> list[dict[str, Any]]:
    work = (SMALL | WORKS)[name]
    with tempfile.TemporaryDirectory() as home:  # a plan must not know what was measured before
        os.environ["XDG_CACHE_HOME"] = home
        spark = session("local[4]")
        try:
            rows = max(2 * batch, min(work.samples, 16 * batch))
            data = work.dataframe(spark, 4, rows).persist()
            trainer = sparkdl.Trainer(
                model=work.make,
                loss=work.loss,
                optimizer=work.optimizer,
                batch_size=batch,
                stop=sparkdl.max_iteration(10 * iterations),
            )
            plan = sparkdl.plan(trainer, data)
            print(plan, flush=True)
            found, facts = [], SessionFacts.of(data, "plan")
            for row in sorted(set(spread(len(plan.rows), wanted))):
                estimate = plan.rows[row - 1]
                times = timed_fit(plan.trainer_of(row), data, facts, iterations, run)
                at_once = min(estimate.choice.replicas, os.cpu_count() or 1)
                each = times.clock, times.processor / at_once
                one = Measured(str(estimate.choice), row, estimate.seconds or math.nan, *each)
                print(one, flush=True)
                found.append(vars(one))
            return found
        finally:
            spark.stop()


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(i)) for i in range(len(values))]


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.correlation(ranks(one), ranks(other)) if len(one) > 2 else math.nan


def errors(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    off = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True) if m > 0]
    return (statistics.fmean(off), statistics.median(off)) if off else (math.nan, math.nan)


def between(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Errors of one round as a prediction of the other, a common factor taken out."""
    ratios = [a / b for a, b in zip(one, other, strict=True) if a > 0 and b > 0]
    if not ratios:
        return math.nan, math.nan
    factor = statistics.median(ratios)
    return errors([a / factor for a in one], other)


def summary(name: str, rounds: Sequence[Sequence[Measured]]) -> list[list[Any]]:
    """A row for each round and clock."""
    common = set.intersection(*({one.choice for one in each} for each in rounds))
    same = [sorted((m for m in r if m.choice in common), key=lambda m: m.choice) for r in rounds]
    lines = []
    for number, each in enumerate(rounds, 1):
        for clock in ("clock", "processor"):
            predicted, times = (
                [one.predicted for one in each],
                [getattr(one, clock) for one in each],
            )
            best = min(times)
            first = min(each, key=lambda one: one.row)
            three = sorted(each, key=lambda one: one.row)[:3]
            mean, median = errors(predicted, times)
            twice = [[getattr(one, clock) for one in other] for other in (same[0], same[-1])]
            noise = between(*twice) if len(rounds) > 1 else (math.nan, math.nan)
            lines.append(
                [
                    f"{name}, round {number}", clock, len(each), 100 * mean, 100 * median,
                    100 * noise[0], 100 * noise[1], correlation(predicted, times),
                    100 * (getattr(first, clock) / best - 1) if best else math.nan,
                    100 * (min(getattr(o, clock) for o in three) / best - 1) if best else math.nan,
                ]
            )  # fmt: skip
    return lines


HEAD = [
    "model", "by", "configurations", "error %", "median", "between %", "median", "rank", "regret %",
    "of three",
]  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--works", default=MODELS)
    parser.add_argument("--configurations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=60)
    asked = parser.parse_args()
    if asked.quick:
        asked = replace_options(
            asked, works="tabular:256", configurations=3, rounds=1, iterations=30
        )
    print(hardware(), flush=True)
    figures: dict[str, list[list[Measured]]] = {}
    for number in range(asked.rounds):
        for text in asked.works.split(","):
            name, _, batch = text.partition(":")
            measure = functools.partial(one_round, name, int(batch))
            found = in_fresh_process(measure, asked.configurations, asked.iterations)
            figures.setdefault(text, []).append([Measured(**one) for one in found])
            print(f"round {number + 1} of {text}: {len(found)} configurations", flush=True)
    print(markdown(HEAD, [line for name, r in figures.items() for line in summary(name, r)]))
    write_json(asked.json, figures)


def replace_options(asked: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(asked, name, value)
    return asked


if __name__ == "__main__":
    main()

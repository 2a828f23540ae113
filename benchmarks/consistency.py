"""Time to a loss under each consistency model, while one replica is slow.

    .venv/bin/python benchmarks/consistency.py --step-ms 100 --slow 1,2,4 --rounds 3

Forward passes of a mini-batch sleep for the time of a step; in replica 0 for ``slow`` times that.
A round trains with each model in turn, so that they meet the same machine. The task is a regression on
made rows. For each model: seconds for as many batches as Synchronous has, the loss at their end (the
mean of the last tenth), seconds until Synchronous's loss was reached, steps with an exchange; all
beside Synchronous's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import session
from torch import nn

import sparkdl

ROWS = 32
"""The rows of a replica's mini-batch."""
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


class Slow(nn.Module):
    """A small network whose first input says whether its replica is slow."""

    def __init__(self, step: float, slow: float, rows: int) -> None:
        super().__init__()
        self.step, self.slow, self.rows = step, slow, rows
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            share = len(x) / self.rows
            time.sleep(share * self.step * (self.slow if x[0, 0] > 0 else 1.0))
        found: torch.Tensor = self.net(x[:, 1:])
        return found


def models(inner_steps: int) -> dict[str, Any]:
    return {
        "Synchronous": sparkdl.Synchronous(),
        "drop_stragglers": sparkdl.Synchronous(drop_stragglers=0.25),
        "Asynchronous": sparkdl.Asynchronous(),
        "Asynchronous, not scaled": sparkdl.Asynchronous(scale=None),
        "StaleSynchronous(0)": sparkdl.StaleSynchronous(staleness=0),
        "StaleSynchronous(1)": sparkdl.StaleSynchronous(staleness=1),
        "DiLoCo": sparkdl.DiLoCo(inner_steps=inner_steps, outer_optimizer=OUTER),
    }


def made_rows(replicas: int, each: int) -> list[tuple[list[float], list[float]]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(replicas * each, 16, generator=generator)
    y = torch.sin(x[:, :4].sum(1, keepdim=True))
    slow = torch.zeros(len(x), 1)
    slow[:each] = 1.0
    return list(zip(torch.cat([slow, x], 1).tolist(), y.tolist(), strict=True))


def one(data: Any, model: Any, batches: int, arguments: argparse.Namespace, slow: float) -> Any:
    """Train, and return the seconds and the losses of its iterations."""
    trainer = sparkdl.Trainer(
        model=partial(Slow, arguments.step_ms / 1000, slow, ROWS),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        batch_size=ROWS * arguments.replicas,
        accumulate=8 if model.may_drop else 1,
        replicas=arguments.replicas,
        consistency=model,
        stop=sparkdl.max_iteration(max(1, batches // model.inner_steps)),
    )
    history = trainer.fit(data).history
    return [(record["seconds"], record["loss"]) for record in history]


def figures(curve: Any, base: Any) -> Mapping[str, float]:
    """Return the figures of a run beside those of Synchronous in the same round."""

    def end(run: Any) -> float:
        return statistics.mean(loss for _, loss in run[-max(1, len(run) // 10) :])

    smooth, reached, seconds = curve[0][1], math.inf, 0.0
    for seconds, loss in curve:
        smooth += 0.2 * (loss - smooth)
        if smooth <= end(base) and math.isinf(reached):
            reached = seconds
    return {
        "seconds": seconds / base[-1][0],
        "loss": end(curve) / end(base),
        "to the loss": reached / base[-1][0],
        "exchanges": len(curve) / len(base),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--inner-steps", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--slow", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    spark = session(f"local[{arguments.replicas}]")
    rows = made_rows(arguments.replicas, 512)
    data = spark.sparkContext.parallelize(rows, arguments.replicas)
    one(data, sparkdl.Synchronous(), 5, arguments, 1.0)  # the first fit of a session warms it up
    found: dict[str, dict[str, list[float]]] = {}
    for slow in map(float, arguments.slow.split(",")):
        for _ in range(arguments.rounds):
            curves = {
                name: one(data, model, arguments.batches, arguments, slow)
                for name, model in models(arguments.inner_steps).items()
            }
            for name, curve in curves.items():
                row = found.setdefault(f"{name}, {slow:g}x", {})
                for figure, value in figures(curve, curves["Synchronous"]).items():
                    row.setdefault(figure, []).append(value)
    print(
        "| model, slow replica | seconds | loss | to the loss | exchanges |\n|---|---|---|---|---|"
    )
    for name, row in found.items():
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(v):.2f}" for v in row.values()) + " |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()

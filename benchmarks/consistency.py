"""Time to a loss under each consistency model, while one replica is slow.

    .venv/bin/python benchmarks/consistency.py --step-ms 100 --slow 1,2,4 --rounds 3 [--plot curves.svg]

Forward passes of a mini-batch sleep for the time of a step; in replica 0 for ``slow`` times that.
A round trains with each model in turn, so that they meet the same machine. The task is a regression on
made rows. For each model: seconds for as many batches as Synchronous has, the loss at their end (the
mean of the last tenth), seconds until Synchronous's loss was reached, for which the others may take
twice as many batches; all beside Synchronous's. A run that diverges has an infinite loss. "replayed" is
the Asynchronous run of the round once more, by ``fit(replay=)``. Every other round is in reverse order.
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
        "not scaled": sparkdl.Asynchronous(scale=None),
        "StaleSynchronous(0)": sparkdl.StaleSynchronous(staleness=0),
        "StaleSynchronous(1)": sparkdl.StaleSynchronous(staleness=1),
        "DiLoCo": sparkdl.DiLoCo(inner_steps=inner_steps, outer_optimizer=OUTER),
        "DiLoCo with drop_stragglers": sparkdl.DiLoCo(
            inner_steps=inner_steps, outer_optimizer=OUTER, drop_stragglers=0.25
        ),
    }


def made_rows(replicas: int, each: int) -> list[tuple[list[float], list[float]]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(replicas * each, 16, generator=generator)
    y = torch.sin(x[:, :4].sum(1, keepdim=True))
    slow = torch.zeros(len(x), 1)
    slow[:each] = 1.0
    return list(zip(torch.cat([slow, x], 1).tolist(), y.tolist(), strict=True))


class Curve(sparkdl.Callback):
    """Seconds and loss of each iteration, also of a run that ends because it diverges."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def on_iteration_end(self, trainer: Any, state: sparkdl.TrainState) -> None:
        self.points.append((state.seconds, state.loss))


def one(
    data: Any,
    model: Any,
    batches: int,
    arguments: argparse.Namespace,
    slow: float,
    replay: Any = None,
) -> tuple[list[tuple[float, float]], Any]:
    """Train, and return the seconds and the losses of its iterations, and its history."""
    curve = Curve()
    trainer = sparkdl.Trainer(
        model=partial(Slow, arguments.step_ms / 1000, slow, ROWS),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=arguments.rate, momentum=arguments.momentum),
        batch_size=ROWS * arguments.replicas,
        accumulate=8 if model.may_drop and model.inner_steps == 1 else 1,
        replicas=arguments.replicas,
        consistency=model,
        callbacks=[curve],
        stop=sparkdl.max_iteration(max(1, batches // model.inner_steps)),
    )
    try:
        history = trainer.fit(data, replay=replay).history
    except sparkdl.TrainingError:
        return [*curve.points, (math.inf, math.inf)], None
    return curve.points, history


def figures(curve: Any, base: Any, inner_steps: int) -> Mapping[str, float]:
    """Return the figures of a run beside those of Synchronous in the same round."""
    window = max(1, len(base) // 10)
    narrow = max(1, window // inner_steps)
    target = mean_loss(base[-window:])

    def reached(run: Any, width: int) -> float:
        ends = range(width, len(run) + 1)
        return next(
            (run[e - 1][0] for e in ends if mean_loss(run[e - width : e]) <= target), math.inf
        )

    as_many = curve[: max(1, len(base) // inner_steps)]
    return {
        "seconds": as_many[-1][0] / base[-1][0],
        "loss": mean_loss(as_many[-narrow:]) / target,
        "to the loss": reached(curve, narrow) / reached(base, window),
    }


def mean_loss(curve: Any) -> float:
    return statistics.mean(loss for _, loss in curve)


def draw(curves: Mapping[float, Mapping[str, Any]], window: int, path: Path) -> None:
    """Draw the loss of the last round against the seconds, a panel for each slowness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1,
        len(curves),
        figsize=(5 * len(curves), 4),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axes, (slow, some) in zip(panels[0], curves.items(), strict=True):
        for name, curve in some.items():
            ends = range(window, len(curve) + 1)
            smooth = [mean_loss(curve[end - window : end]) for end in ends]
            axes.plot([curve[end - 1][0] for end in ends], smooth, label=name)
        axes.set(title=f"one of the replicas needs {slow:g} times as long", xlabel="seconds")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("training loss")
    panels[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--models", default="", help="comma between; all if left out")
    parser.add_argument("--inner-steps", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--slow", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="where to draw loss against time")
    arguments = parser.parse_args()
    spark = session(f"local[{arguments.replicas}]")
    rows = made_rows(arguments.replicas, 512)
    data = spark.sparkContext.parallelize(rows, arguments.replicas)
    one(
        data, sparkdl.Synchronous(), 100, arguments, 1.0
    )  # so that Java has compiled what runs often
    every = models(arguments.inner_steps)
    found: dict[str, dict[str, list[float]]] = {}
    last: dict[float, Any] = {}
    for slow in map(float, arguments.slow.split(",")):
        for turn in range(arguments.rounds):
            curves = {}
            chosen = arguments.models.split(",") if arguments.models else list(every)
            names = list(dict.fromkeys(["Synchronous", *chosen]))
            for name in reversed(names) if turn % 2 else names:
                batches = arguments.batches * (1 if name == "Synchronous" else 2)
                curves[name], history = one(data, every[name], batches, arguments, slow)
                if name == "Asynchronous" and history:
                    curves["replayed"], _ = one(
                        data, every[name], batches, arguments, slow, history
                    )
            last[slow] = curves
            for name, curve in curves.items():
                row = found.setdefault(f"{name}, {slow:g}x", {})
                steps = 1 if name == "replayed" else every[name].inner_steps
                for figure, value in figures(curve, curves["Synchronous"], steps).items():
                    row.setdefault(figure, []).append(value)
    print("| model, slow replica | seconds | loss | to the loss |\n|---|---|---|---|")
    for name, row in found.items():
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(v):.2f}" for v in row.values()) + " |"
        )
    if arguments.plot:
        draw(last, max(1, arguments.batches // 10), arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()

"""Replicas in virtual time, with real gradients, to compare how they may agree.

The first of four replicas is slow. Times are in milliseconds: a ``step`` of a replica, ``send`` for
sending one model, a ``job`` of Spark. The task is a small network on scikit-learn's handwritten
digits, by SGD with momentum.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

REPLICAS, ROWS, WIDTH, EPOCHS, INNER = 4, 8, 32, 6, 10
ALL_REDUCE = 2 * (REPLICAS - 1) / REPLICAS
SETTINGS = [(rate, momentum) for momentum in (0.0, 0.9) for rate in (0.3, 0.6, 1.2, 2.5)]
"""Learning rates, as those without momentum that move the weights as far, and the momentum."""
X, Y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
Setting = tuple[float, float]
Events = Iterator[tuple[float, Any]]
"""Times, and the mean weights then."""


def passed(w: Any, x: Any, y: Any) -> tuple[float, Any]:
    """Return the loss and its gradient."""
    a, b = w[: 65 * WIDTH].reshape(65, WIDTH), w[65 * WIDTH :].reshape(WIDTH + 1, 10)
    h = np.tanh(x @ a[1:] + a[0])
    z = h @ b[1:] + b[0]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -float(np.log(p[np.arange(len(y)), y] + 1e-12).mean())
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ b[1:].T) * (1 - h * h)
    parts = (back.sum(0)[None], x.T @ back, p.sum(0)[None], h.T @ p)
    return loss, np.concatenate([part.ravel() for part in parts])


class Cluster:
    """The replicas: their rows, times, weights, and the momentum of each."""

    def __init__(self, seed: int, setting: Setting, given: argparse.Namespace) -> None:
        self.random, (self.rate, self.momentum) = np.random.default_rng(seed), setting
        order = self.random.permutation(len(X))
        self.rows = [order[r::REPLICAS] for r in range(REPLICAS)]
        self.step, self.send, self.job = given.step, given.send, given.job
        self.seconds = [given.step * (given.slow if r == 0 else 1) for r in range(REPLICAS)]
        start = self.random.normal(0, 0.1, 65 * WIDTH + (WIDTH + 1) * 10)
        self.w = np.stack([start.astype(np.float32)] * REPLICAS)
        self.moment = np.zeros_like(self.w)

    def gradient(self, r: int, w: Any, share: float = 1.0) -> Any:
        chosen = self.random.choice(self.rows[r], round(ROWS * share), replace=False)
        return passed(w, X[chosen], Y[chosen])[1]

    def moved(self, r: int, gradient: Any) -> Any:
        """Return what a step of SGD adds to the weights."""
        self.moment[r] = self.momentum * self.moment[r] + (1 - self.momentum) * gradient
        return -self.rate * self.moment[r]

    def ends(self) -> list[tuple[float, int, Any]]:
        """Let all begin at once, and return when they end their first gradient."""
        return [(self.seconds[r], r, self.gradient(r, self.w[r])) for r in range(REPLICAS)]


Models = Mapping[str, tuple[Callable[[Cluster], Events], float, float]]
"""How each model goes, and what a rank sends for a batch and at most at once, in models."""


def losses(events: Events, whole: float, most: float) -> Iterator[tuple[float, float]]:
    """Yield times, a hundred in ``whole`` milliseconds, and the mean of the last five losses."""
    last = deque([math.inf] * 5, 5)
    look = 0.0
    for now, w in events:
        if now > most or not np.isfinite(w).all():
            return
        if now >= look:
            look += whole / 100
            last.append(passed(w, X[::3], Y[::3])[0])
            yield now, statistics.mean(last)


def compare(models: Models, words: str) -> None:
    """Print a table of the models; ``words`` describe the program."""
    parser = argparse.ArgumentParser(description=words)
    for name, value in (("slow", 4.0), ("step", 100.0), ("send", 5.0), ("job", 13.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    first, *_ = next(iter(models.values()))
    step = next(first(Cluster(0, SETTINGS[0], given)))[0]
    whole = step * (EPOCHS * len(X) // ROWS // REPLICAS)

    def run(model: Any, setting: Setting, seed: int, most: float) -> Iterator[tuple[float, float]]:
        return losses(model(Cluster(seed, setting, given)), whole, most)

    targets: list[float] = []
    several = SETTINGS
    for seed in range(given.seeds):
        ends = {setting: list(run(first, setting, seed, whole))[-1][1] for setting in several}
        targets.append(min(ends.values()))
        several = [min(ends, key=ends.__getitem__)]
    print("| model | time to the loss | sent for a batch | at once | rate, momentum |")
    print("|---|---|---|---|---|")
    for name, (model, *sent) in models.items():

        def reached(setting: Setting, seed: int, most: float, model: Any = model) -> float:
            found = run(model, setting, seed, most)
            return next((now for now, loss in found if loss <= targets[seed]), math.inf)

        best, chosen = math.inf, SETTINGS[0]
        for setting in SETTINGS:
            found = reached(setting, 0, min(best, 2 * whole))
            best, chosen = (found, setting) if found < best else (best, chosen)
        others = range(1, given.seeds if best < math.inf else 1)
        times = [best, *(reached(chosen, seed, 2 * whole) for seed in others)]
        middle = statistics.median(times) / whole
        print(f"| {name} | {middle:.2f} | {sent[0]:.3g} | {sent[1]:.3g} | {chosen} |", flush=True)

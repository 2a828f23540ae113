"""Simulate decentralized models beside those that there are: are they worth it?

    .venv/bin/python benchmarks/decentralized.py [--slow 4] [--step 100] [--exchange 5] [--commit 13]

One replica of four is slow. Time is virtual, in milliseconds: a step of a replica, an exchange of
weights between two ranks, a commit of an asynchronous gradient. The gradients are real: a small
network on scikit-learn's handwritten digits, SGD with momentum. For each model: the time until the
loss of Synchronous after ten epochs is reached, by that, at the best of several learning rates; the
loss is that of all training rows, under the mean of the replicas' weights.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from few_bytes import digits

REPLICAS, ROWS, WIDTH, EPOCHS = 4, 8, 64, 10
RATES = (0.03, 0.06, 0.12, 0.25, 0.5)
(X, Y), _ = digits()
Events = Iterator[tuple[float, np.ndarray]]
"""Times, and the weights then: those of all, or a row for each replica."""


def passed(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
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


class Task:
    """The replicas' batches, and their times."""

    def __init__(self, seed: int, slow: float, step: float, exchange: float, commit: float) -> None:
        self.random = np.random.default_rng(seed)
        order = self.random.permutation(len(X))
        self.rows = [order[r::REPLICAS] for r in range(REPLICAS)]
        self.seconds = [step * (slow if r == 0 else 1) for r in range(REPLICAS)]
        self.exchange, self.commit, self.steps = (
            exchange,
            commit,
            EPOCHS * len(X) // ROWS // REPLICAS,
        )
        self.start = self.random.normal(0, 0.1, 65 * WIDTH + (WIDTH + 1) * 10)

    def gradient(self, replica: int, w: np.ndarray) -> np.ndarray:
        chosen = self.random.choice(self.rows[replica], ROWS, replace=False)
        return passed(w, X[chosen], Y[chosen])[1]


def synchronous(task: Task, rate: float) -> Events:
    w, moment, now = task.start.copy(), 0.0, 0.0
    while True:
        mean = sum(task.gradient(r, w) for r in range(REPLICAS)) / REPLICAS
        moment = 0.9 * moment + mean
        w, now = w - rate * moment, now + max(task.seconds) + task.exchange
        yield now, w


def gossip(task: Task, rate: float) -> Events:
    w, moment, now = np.stack([task.start] * REPLICAS), np.zeros((REPLICAS, len(task.start))), 0.0
    for n in range(1 << 30):
        moment = 0.9 * moment + np.stack([task.gradient(r, w[r]) for r in range(REPLICAS)])
        w = w - rate * moment
        w, now = (w + np.roll(w, 1 + n % 2, 0)) / 2, now + max(task.seconds) + task.exchange
        yield now, w


def asynchronous(task: Task, rate: float) -> Events:
    w, moment, free = task.start.copy(), 0.0, 0.0
    waiting = [(task.seconds[r], r, task.gradient(r, w)) for r in range(REPLICAS)]
    while True:
        now, r, gradient = heapq.heappop(waiting)
        moment, free = 0.9 * moment + gradient, max(now, free) + task.commit
        w = w - rate / REPLICAS * moment
        heapq.heappush(waiting, (free + task.seconds[r], r, task.gradient(r, w)))
        yield free, w


def push_sum(task: Task, rate: float, bound: float = math.inf) -> Events:
    """Each sends half of itself on, and goes on; with a bound, it waits for those too far behind."""
    x, mass = np.stack([task.start] * REPLICAS), np.ones(REPLICAS)
    moment, done = np.zeros_like(x), [0] * REPLICAS
    ending = [(task.seconds[r], r, task.gradient(r, x[r])) for r in range(REPLICAS)]
    sent: list[tuple[float, int, np.ndarray, float]] = []
    stopped: list[tuple[int, np.ndarray]] = []
    while True:
        now, r, gradient = heapq.heappop(ending)
        moment[r] = 0.9 * moment[r] + gradient
        x[r] -= rate * moment[r]
        x[r], mass[r], done[r] = x[r] / 2, mass[r] / 2, done[r] + 1
        to = (r + 1 + done[r] % 2) % REPLICAS
        sent.append((now + task.exchange, to, x[r].copy(), float(mass[r])))
        stopped.append((r, gradient))
        for each in [each for each in stopped if done[each[0]] - min(done) <= bound]:
            stopped.remove(each)
            for message in [m for m in sent if m[0] <= now and m[1] == each[0]]:
                sent = [m for m in sent if m is not message]
                x[each[0]] += message[2]
                mass[each[0]] += message[3]
            its = task.gradient(each[0], x[each[0]] / mass[each[0]])
            heapq.heappush(ending, (now + task.seconds[each[0]], each[0], its))
        yield now, x / mass[:, None]


def pairwise(task: Task, rate: float) -> Events:
    """Each averages with one at random, which computes meanwhile, and then takes its step."""
    w, moment, free = (
        np.stack([task.start] * REPLICAS),
        np.zeros((REPLICAS, len(task.start))),
        [0.0] * 4,
    )
    ending = [(task.seconds[r], r, task.gradient(r, w[r])) for r in range(REPLICAS)]
    while True:
        now, r, gradient = heapq.heappop(ending)
        other = int(task.random.choice([n for n in range(REPLICAS) if n != r]))
        moment[r] = 0.9 * moment[r] + gradient
        free[r] = free[other] = max(now, free[r], free[other]) + task.exchange
        w[r] = w[other] = (w[r] + w[other]) / 2
        w[r] = w[r] - rate * moment[r]
        heapq.heappush(ending, (free[r] + task.seconds[r], r, task.gradient(r, w[r])))
        yield now, w


MODELS: dict[str, Callable[[Task, float], Events]] = {
    "Synchronous": synchronous,
    "Asynchronous": asynchronous,
    "Gossip, exponential": gossip,
    "push-sum, 1 behind": partial(push_sum, bound=1),
    "push-sum, 8 behind": partial(push_sum, bound=8),
    "push-sum, any": push_sum,
    "pairwise": pairwise,
}


def until(events: Events, target: float, most: float) -> float:
    """Return the time when the loss is at most ``target``; infinite if it is not by ``most``."""
    for n, (now, w) in enumerate(events):
        if now > most:
            return math.inf
        if n % 10 == 0 and passed(w.mean(0) if w.ndim > 1 else w, X, Y)[0] <= target:
            return now
    return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("slow", 4.0), ("step", 100.0), ("exchange", 5.0), ("commit", 13.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    times: dict[str, dict[float, list[float]]] = {name: {} for name in MODELS}
    make: Any = partial(
        Task, slow=given.slow, step=given.step, exchange=given.exchange, commit=given.commit
    )
    for seed in range(given.seeds):
        ends = {}
        for rate in RATES:
            task = make(seed)
            for (now, w), _ in zip(synchronous(task, rate), range(task.steps), strict=False):
                ends[rate] = passed(w, X, Y)[0], now
        target, whole = min(ends.values())
        for name, model in MODELS.items():
            for rate in RATES:
                found = until(model(make(seed), rate), target, 1.5 * whole)
                times[name].setdefault(rate, []).append(found / whole)
    print("\n| model | time to the loss | rate |\n|---|---|---|")
    for name, by_rate in times.items():
        rate = min(by_rate, key=lambda one: statistics.median(by_rate[one]))
        print(f"| {name} | {statistics.median(by_rate[rate]):.2f} | {rate:g} |")


if __name__ == "__main__":
    main()

"""Simulate models that sparkdl does not have beside those that it has: are they worth building?

    .venv/bin/python benchmarks/decentralized.py [--slow 4] [--step 100] [--send 5] [--job 13]

The first of four replicas is slow. Time is virtual, in milliseconds: a ``step`` of a replica, ``send``
for sending one model, a ``job`` of Spark. The gradients are real: a small network on scikit-learn's
handwritten digits, SGD with momentum. For each model, at the best of several learning rates for the
first seed: the time until the mean of the replicas' weights has the loss, on all training rows, that
Synchronous has after eight epochs, beside Synchronous's time on a gang; and what a rank sends for a
batch, and at most at once, in models. sparkdl does not have the models with a star.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

REPLICAS, ROWS, WIDTH, EPOCHS, INNER = 4, 8, 32, 8, 10
ALL_REDUCE = 2 * (REPLICAS - 1) / REPLICAS
RATES = (0.03, 0.06, 0.12, 0.25, 0.5)
X, Y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
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

    def __init__(self, seed: int, rate: float, given: argparse.Namespace) -> None:
        self.random, self.rate = np.random.default_rng(seed), rate
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
        """Return what a step of SGD with momentum adds to the weights of a replica."""
        self.moment[r] = 0.9 * self.moment[r] + gradient
        return -self.rate * self.moment[r]

    def ends(self) -> list[tuple[float, int, Any]]:
        """Let all begin at once, and return when they end their first gradient."""
        return [(self.seconds[r], r, self.gradient(r, self.w[r])) for r in range(REPLICAS)]


def synchronous(c: Cluster, jobs: int = 0, drop: bool = False) -> Events:
    """Sum the gradients of all. ``drop``: the slow one does as many eighths as it has time for."""
    now, w = 0.0, c.w[0]
    share = max(1, round(8 * c.step / c.seconds[0])) / 8 if drop else 1.0
    overhead = jobs * c.job + ALL_REDUCE * c.send
    while True:
        total = share * c.gradient(0, w, share)
        total = total + sum(c.gradient(r, w) for r in range(1, REPLICAS))
        w = w + c.moved(0, total / (share + REPLICAS - 1))
        now += max(c.step, share * c.seconds[0]) + overhead
        yield now, w


def asynchronous(c: Cluster) -> Events:
    """A gradient takes a job; another one applies all that have arrived while the last one ran."""
    w, free = c.w[0], 0.0
    ending = [(time + c.job, r, gradient) for time, r, gradient in c.ends()]
    while True:
        free, begun = max(free, ending[0][0]) + c.job + ALL_REDUCE * c.send, max(free, ending[0][0])
        arrived = []
        while ending and ending[0][0] <= begun:
            _, r, gradient = heapq.heappop(ending)
            w = w + c.moved(0, gradient) / REPLICAS
            arrived.append(r)
        for r in arrived:
            heapq.heappush(ending, (free + c.seconds[r] + c.job, r, c.gradient(r, w)))
        yield free, w


def gossip(c: Cluster) -> Events:
    now = 0.0
    for n in range(1 << 30):
        c.w = c.w + [c.moved(r, c.gradient(r, c.w[r])) for r in range(REPLICAS)]
        c.w = (c.w + np.roll(c.w, 1 + n % 2, 0)) / 2
        now += max(c.seconds) + c.send
        yield now, c.w.mean(0)


def push_sum(c: Cluster, bound: float = math.inf) -> Events:
    """Each sends half of itself and goes on; with a bound, it waits for those too far behind."""
    mass, done, idle = np.ones(REPLICAS), np.zeros(REPLICAS, int), set[int]()
    ending: list[Any] = c.ends()
    sent: list[list[tuple[float, Any, float]]] = [[] for _ in range(REPLICAS)]
    while True:
        now, r, gradient = heapq.heappop(ending)
        c.w[r] = (c.w[r] + c.moved(r, gradient)) / 2
        mass[r], done[r] = mass[r] / 2, done[r] + 1
        sent[(r + 1 + done[r] % 2) % REPLICAS].append((now + c.send, c.w[r].copy(), mass[r]))
        idle.add(r)
        for each in [each for each in sorted(idle) if done[each] - done.min() <= bound]:
            idle.remove(each)
            for _, its, weight in (arrived for arrived in sent[each] if arrived[0] <= now):
                c.w[each], mass[each] = c.w[each] + its, mass[each] + weight
            sent[each] = [late for late in sent[each] if late[0] > now]
            gradient = c.gradient(each, c.w[each] / mass[each])
            heapq.heappush(ending, (now + c.seconds[each], each, gradient))
        waiting = [message for messages in sent for message in messages]
        whole = mass.sum() + sum(weight for *_, weight in waiting)
        yield now, (c.w.sum(0) + sum(its for _, its, _ in waiting)) / whole


def pairwise(c: Cluster) -> Events:
    """Each takes its step, goes on, and meanwhile averages with one at random, who computes too."""
    free, ending = [0.0] * REPLICAS, [(*end, -1) for end in c.ends()]
    while True:
        now, r, gradient, other = heapq.heappop(ending)
        if other >= 0:  # an average of r and another ends
            c.w[r] = c.w[other] = (c.w[r] + c.w[other]) / 2
            continue
        c.w[r] = c.w[r] + c.moved(r, gradient)
        other = int(c.random.choice([n for n in range(REPLICAS) if n != r]))
        free[r] = free[other] = max(now, free[r], free[other]) + c.send
        heapq.heappush(ending, (free[r], r, None, other))
        begun = max(now, free[r] - c.seconds[r])  # at most one average of its own is under way
        heapq.heappush(ending, (begun + c.seconds[r], r, c.gradient(r, c.w[r]), -1))
        yield now, c.w.mean(0)


def inner(c: Cluster, r: int, w: Any, steps: int) -> Any:
    """Return how far some steps of a replica have moved the weights, against their direction."""
    end = w
    for _ in range(steps):
        end = end + c.moved(r, c.gradient(r, end))
    return w - end


def steps_by_speed(c: Cluster, by_speed: bool) -> list[int]:
    speeds = [1 / s if by_speed else 1.0 for s in c.seconds]
    return [max(1, round(INNER * REPLICAS * speed / sum(speeds))) for speed in speeds]


def diloco(c: Cluster, by_speed: bool = False) -> Events:
    w, moment, now, steps = c.w[0], np.zeros_like(c.w[0]), 0.0, steps_by_speed(c, by_speed)
    while True:
        mean = sum(inner(c, r, w, steps[r]) for r in range(REPLICAS)) / REPLICAS
        moment = 0.9 * moment + mean
        w = w - 0.7 * (mean + 0.9 * moment)
        now += max(n * s for n, s in zip(steps, c.seconds, strict=True)) + ALL_REDUCE * c.send
        yield now, w


def streaming(c: Cluster, fragments: int = 5) -> Events:
    """In turn, send each fragment's differences in 8 bits while all compute; mix what comes back."""
    outer, now, gap = c.w[0].copy(), 0.0, INNER // fragments
    moment, blocks = np.zeros_like(outer), np.array_split(np.arange(len(outer)), fragments)
    sending = ALL_REDUCE * c.send / fragments / 4
    delay = min(gap, math.ceil(sending / max(c.seconds)))  # steps until it is there
    for n in range(1 << 30):
        c.w = c.w + [c.moved(r, c.gradient(r, c.w[r])) for r in range(REPLICAS)]
        block = blocks[n // gap % fragments]
        if n % gap == 0:
            differences = outer[block] - c.w[:, block]
            scale = np.abs(differences).max(1, keepdims=True) / 127 + 1e-30
            mean = (np.round(differences / scale) * scale).mean(0)
        if n % gap == delay % gap:
            moment[block] = 0.9 * moment[block] + mean
            outer[block] -= 0.7 * (mean + 0.9 * moment[block])
            c.w[:, block] = (c.w[:, block] + outer[block]) / 2
        now += max(max(c.seconds), sending / gap)
        yield now, c.w.mean(0)


def asynchronous_diloco(c: Cluster) -> Events:
    """Steps by speed, and Nesterov's momentum delayed until all could have sent a difference."""
    w, moment, gathered, steps = c.w[0], np.zeros_like(c.w[0]), 0.0, steps_by_speed(c, True)
    begin = [(steps[r] * c.seconds[r] + 2 * c.send, r) for r in range(REPLICAS)]
    ending = [(time, r, inner(c, r, w, steps[r])) for time, r in begin]
    for n in range(1, 1 << 30):
        now, r, difference = heapq.heappop(ending)
        gathered, w = gathered + difference / REPLICAS, w - 0.7 * difference / REPLICAS
        if n % REPLICAS == 0:
            moment, gathered = 0.9 * moment + gathered, 0.0
            w = w - 0.7 * 0.9 * moment
        again = now + steps[r] * c.seconds[r] + 2 * c.send
        heapq.heappush(ending, (again, r, inner(c, r, w, steps[r])))
        yield now, w


MODELS: dict[str, tuple[Callable[[Cluster], Events], float, float]] = {
    "Synchronous, gang": (synchronous, ALL_REDUCE, ALL_REDUCE),
    "Synchronous, shuffle": (partial(synchronous, jobs=2), ALL_REDUCE, ALL_REDUCE),
    "drop_stragglers": (partial(synchronous, jobs=2, drop=True), ALL_REDUCE, ALL_REDUCE),
    "Asynchronous": (asynchronous, ALL_REDUCE, ALL_REDUCE),
    "Gossip, exponential": (gossip, 1, 1),
    "push-sum, at most 1 ahead *": (partial(push_sum, bound=1), 1, 1),
    "push-sum, at most 8 ahead *": (partial(push_sum, bound=8), 1, 1),
    "push-sum, any *": (push_sum, 1, 1),
    "averages of pairs *": (pairwise, 2, 1),
    "DiLoCo": (diloco, ALL_REDUCE / INNER, ALL_REDUCE),
    "DiLoCo, steps by speed *": (partial(diloco, by_speed=True), ALL_REDUCE / INNER, ALL_REDUCE),
    "streaming DiLoCo, 8 bits *": (streaming, ALL_REDUCE / INNER / 4, ALL_REDUCE / 5 / 4),
    "asynchronous DiLoCo *": (asynchronous_diloco, 2 / INNER, 1),
}
"""How each goes, and what a rank sends for a batch and at most at once, in models."""


def until(events: Events, target: float, most: float, whole: float) -> float:
    """Return the time when the loss is at most ``target``; infinite if it is not by ``most``."""
    look = 0.0
    for now, w in events:
        if now > most or not np.isfinite(w).all():
            return math.inf
        if now >= look:
            look = now + whole / 200
            if passed(w, X, Y)[0] <= target:
                return now
    return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("slow", 4.0), ("step", 100.0), ("send", 5.0), ("job", 13.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    count = EPOCHS * len(X) // ROWS // REPLICAS
    targets: list[float] = []
    rates: tuple[float, ...] = RATES
    for seed in range(given.seeds):
        ends = []
        for rate in rates:
            for now, w in itertools.islice(synchronous(Cluster(seed, rate, given)), count):
                whole, last = now, w
            ends.append((passed(last, X, Y)[0], rate))
        targets.append(min(ends)[0])
        rates = (min(ends)[1],)
    print("| model | time to the loss | sent for a batch | at once | rate |\n|---|---|---|---|---|")
    for name, (model, *sent) in MODELS.items():
        best, rate = 2 * whole, math.nan
        for each in RATES:
            found = until(model(Cluster(0, each, given)), targets[0], best, whole)
            best, rate = (found, each) if found < best else (best, rate)
        times = [best if rate == rate else math.inf]
        for seed in range(1, given.seeds if rate == rate else 0):
            times.append(until(model(Cluster(seed, rate, given)), targets[seed], 2 * whole, whole))
        middle = statistics.median(times) / whole
        words = " | ".join(f"{models:.3g}" for models in sent)
        print(f"| {name} | {middle:.2f} | {words} | {rate:g} |", flush=True)


if __name__ == "__main__":
    main()

"""Simulate models that sparkdl does not have beside those that it has: are they worth building?

    .venv/bin/python benchmarks/decentralized.py [--slow 4] [--step 100] [--send 5] [--job 13]

See ``virtual_replicas.py`` for the replicas, their times and their task. For each model, at the best
of several learning rates, with and without momentum, for the first seed: the time until the mean of
the replicas' weights has the loss, on all training rows, that Synchronous has after six epochs, beside
those six epochs on a gang; and what a rank sends for a batch, and at most at once, in models. sparkdl
does not have the models with a star.
"""

from __future__ import annotations

import heapq
import math
from functools import partial
from typing import Any

import numpy as np
from virtual_replicas import ALL_REDUCE, INNER, REPLICAS, Cluster, Events, Models, compare


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
    """Each sends half of itself and goes on, unless it still sends; it waits for the slow ones."""
    mass, done, idle = np.ones(REPLICAS), np.zeros(REPLICAS, int), set[int]()
    ending, free, turns = c.ends(), [0.0] * REPLICAS, [0] * REPLICAS
    sent: list[list[tuple[float, Any, float]]] = [[] for _ in range(REPLICAS)]
    while True:
        now, r, gradient = heapq.heappop(ending)
        c.w[r] += c.moved(r, gradient)
        done[r] += 1
        if free[r] <= now:
            c.w[r], mass[r] = c.w[r] / 2, mass[r] / 2
            free[r], turns[r] = now + c.send, turns[r] + 1
            sent[(r + 1 + turns[r] % 2) % REPLICAS].append((free[r], c.w[r].copy(), mass[r]))
        idle.add(r)
        for each in [each for each in sorted(idle) if done[each] - done.min() <= bound]:
            idle.remove(each)
            for _, its, weight in (arrived for arrived in sent[each] if arrived[0] <= now):
                c.w[each], mass[each] = c.w[each] + its, mass[each] + weight
            sent[each] = [late for late in sent[each] if late[0] > now]
            gradient = c.gradient(each, c.w[each] / mass[each])
            heapq.heappush(ending, (now + c.seconds[each], each, gradient))
        waiting = [message for messages in sent for message in messages]
        yield now, (c.w.sum(0) + sum(its for _, its, _ in waiting)) / REPLICAS


def pairwise(c: Cluster) -> Events:
    """Each takes its step, goes on, and meanwhile averages with one at random, who computes too."""
    free, ending = [0.0] * REPLICAS, [(now, -1, r, gradient) for now, r, gradient in c.ends()]
    while True:
        now, other, r, gradient = heapq.heappop(ending)
        if other >= 0:  # an average of r and another ends
            c.w[r] = c.w[other] = (c.w[r] + c.w[other]) / 2
            continue
        c.w[r] = c.w[r] + c.moved(r, gradient)
        other = int(c.random.choice([n for n in range(REPLICAS) if n != r]))
        free[r] = free[other] = max(now, free[r], free[other]) + c.send
        heapq.heappush(ending, (free[r], other, r, None))
        begun = max(now, free[r] - c.seconds[r])  # at most one average of its own is under way
        heapq.heappush(ending, (begun + c.seconds[r], -1, r, c.gradient(r, c.w[r])))
        yield now, c.w.mean(0)


def inner(c: Cluster, r: int, w: Any, steps: int) -> Any:
    """Return how far some steps of a replica have moved the weights, against their direction."""
    end = w
    for _ in range(steps):
        end = end + c.moved(r, c.gradient(r, end))
    return w - end


def diloco(c: Cluster, jobs: int = 0, drop: bool = False, by_steps: bool = False) -> Events:
    """``drop``: the slow one takes as many steps as it has time for. ``by_steps``: it counts less."""
    w, moment, now = c.w[0], np.zeros_like(c.w[0]), 0.0
    steps = [max(1, round(INNER * c.step / s)) if drop else INNER for s in c.seconds]
    shares = [n / sum(steps) if by_steps else 1 / REPLICAS for n in steps]
    overhead = jobs * c.job + ALL_REDUCE * c.send
    while True:
        mean = sum(share * inner(c, r, w, steps[r]) for r, share in enumerate(shares))
        moment = 0.9 * moment + mean
        w = w - 0.7 * (mean + 0.9 * moment)
        now += max(n * s for n, s in zip(steps, c.seconds, strict=True)) + overhead
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
    w, moment, gathered = c.w[0], np.zeros_like(c.w[0]), 0.0
    speeds = [1 / seconds for seconds in c.seconds]
    steps = [max(1, round(INNER * REPLICAS * speed / sum(speeds))) for speed in speeds]
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


MODELS: Models = {
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
    "DiLoCo, drop_stragglers": (partial(diloco, jobs=2, drop=True), ALL_REDUCE / INNER, ALL_REDUCE),
    "DiLoCo, drop_stragglers, weights by steps *": (
        partial(diloco, jobs=2, drop=True, by_steps=True),
        ALL_REDUCE / INNER,
        ALL_REDUCE,
    ),
    "streaming DiLoCo, 8 bits *": (streaming, ALL_REDUCE / INNER / 4, ALL_REDUCE / 5 / 4),
    "asynchronous DiLoCo *": (asynchronous_diloco, 2 / INNER, 1),
}

if __name__ == "__main__":
    compare(MODELS, str(__doc__))

"""Ranks that are threads of this process, with clocks that go by the cost model alone."""

from __future__ import annotations

import itertools
import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from sparkdl.collectives.algorithms import Link

PATIENCE = 10.0
"""Seconds until a receive that nobody answers fails the test."""


class Network(NamedTuple):
    alpha: float
    beta: float
    gamma: float


STEPS = Network(alpha=1.0, beta=0.0, gamma=0.0)


class Wire:
    """One direction between two ranks: what is sent, and when its receipt was done."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[torch.Tensor, float]] = queue.Queue()
        self.receipts: queue.Queue[float] = queue.Queue()


class VirtualLink(Link):
    """A message begins when both ends are ready and takes alpha + n beta; summing takes n gamma."""

    def __init__(self, rank: int, size: int, network: Network, wires: Any) -> None:
        self.rank, self.size, self.network, self.wires = rank, size, network, wires
        self.clock = 0.0
        self.sent, self.received = 0, 0

    def exchange(self, out, to, into, source):
        started = self.clock
        sending = out is not None and to is not None and out.numel()
        if sending:
            assert out.is_contiguous()
            self.wires[self.rank, to].messages.put((out.clone(), started))
            self.sent += out.nbytes
        if into is not None and source is not None and into.numel():
            wire = self.wires[source, self.rank]
            message, ready = wire.messages.get(timeout=PATIENCE)
            assert message.shape == into.shape
            took = self.network.alpha + message.nbytes * self.network.beta
            done = max(started, ready) + took
            into.copy_(message)
            wire.receipts.put(done)
            self.received += into.nbytes
            self.clock = max(self.clock, done)
        if sending:
            self.clock = max(self.clock, self.wires[self.rank, to].receipts.get(timeout=PATIENCE))

    def add(self, into: torch.Tensor, received: torch.Tensor) -> None:
        into += received
        self.clock += into.nbytes * self.network.gamma


def on_virtual_ranks(
    size: int, do: Callable[[VirtualLink], Any], network: Network = STEPS
) -> tuple[list[Any], list[VirtualLink]]:
    """``do(link)`` of every rank, and the links; no message may be left over."""
    wires: dict[tuple[int, int], Wire] = defaultdict(Wire)
    for pair in itertools.product(range(size), repeat=2):
        wires[pair]  # made here, not by two threads at once
    links = [VirtualLink(rank, size, network, wires) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(do, links))
    assert all(w.messages.empty() and w.receipts.empty() for w in wires.values())
    return found, links

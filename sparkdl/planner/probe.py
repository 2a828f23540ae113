"""The probe of a session: what an engine itself costs there, sums among ranks, cores and memory.

A cluster that is not here is described by a few numbers in its place, for plans that are computed only.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives import direct
from sparkdl.collectives.algorithms import cost
from sparkdl.errors import ParameterError, SparkdlError, raise_all, shown
from sparkdl.plain import is_number, is_whole, make_plain
from sparkdl.planner.choice import GANG, SHUFFLE, Choice
from sparkdl.planner.profile import BUSY, ProfileOrder, Timed, timed
from sparkdl.process.memory import left_to_machine
from sparkdl.process.system import processor_seconds as processor_seconds

SUMMED = (256, 256 << 10, 4 << 20)
"""The bytes of the sums that are timed."""
ITERATIONS = 60
"""The iterations of a trial fit, whose last third is measured: a JVM is slow at first."""
TRIAL_TENSORS, TRIAL_PAIRS, TRIAL_PARTS = 8, 2, 4
"""Parameter tensors, pairs of layers and micro-batches of the model whose fits find overheads."""
WARM_FROM, WARM = 450, 0.55
"""The iteration from which on Spark's schedule takes a share of what it took before."""
Trial = Callable[[Choice, int], Timed]
"""The type of a function that fits a tiny model as a choice says, for some iterations, and returns the
seconds of one."""


@dataclass(frozen=True)
class Probe:
    """The costs of a session beside computing, in seconds and bytes."""

    slots: int
    cores: int  # of a node
    nodes: int = 1
    memory: float = math.inf  # bytes that are left to a slot
    overheads: Mapping[tuple[str, int], float] = field(
        default_factory=dict
    )  # by engine and replicas
    units: Mapping[str, float] = field(default_factory=dict)  # of a tensor, a pair, a micro-batch
    sums: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)  # by ranks
    reasons: Mapping[str, str] = field(default_factory=dict)  # why something was not measured
    bandwidth: float = math.inf  # bytes a second between nodes
    latency: float = 0.0
    busy: float = 1.0
    computed: bool = False  # for machines that are not here

    def overhead(self, engine: str, replicas: int) -> float | None:
        """Return the seconds of an iteration that computes nothing; None if that is not known."""
        known = sorted(
            (n, seconds) for (name, n), seconds in self.overheads.items() if name == engine
        )
        return _between(known, replicas) if known else None

    def unit(self, word: str, ranks: int) -> float:
        """Return the seconds of a unit of a strategy; ranks beyond the cores take turns."""
        return self.units.get(word, 0.0) * max(1.0, ranks / (self.cores * self.nodes))

    def sum(self, ranks: int, nbytes: float) -> float:
        """Return the seconds of a sum among ranks beyond those of a tiny one."""
        if ranks <= 1 or nbytes <= SUMMED[0]:
            return 0.0
        if self.computed or not self.sums:
            return self.computed_sum(ranks, nbytes)
        nearest = max((n for n in self.sums if n <= ranks), default=min(self.sums))
        points = [(float(size), seconds) for size, seconds in self.sums[nearest]]
        beyond = max(0.0, _between(points, nbytes) - points[0][1])
        if nearest >= ranks:
            return beyond
        terms = [cost("ring", "all_reduce", 1.0, n, 0.0, 1.0) for n in (ranks, nearest)]
        return beyond * terms[0] / terms[1]

    def computed_sum(self, ranks: int, nbytes: float) -> float:
        """Return the seconds of a sum by the model of a network."""
        if ranks <= 1 or math.isinf(self.bandwidth):
            return 0.0
        small = cost("ring", "all_reduce", SUMMED[0], ranks, self.latency, 1 / self.bandwidth)
        return cost("ring", "all_reduce", nbytes, ranks, self.latency, 1 / self.bandwidth) - small

    def message(self, nbytes: float) -> float:
        """Return the seconds of a message from one rank to the next."""
        if self.computed:
            return self.latency + nbytes / self.bandwidth
        return self.sum(2, nbytes)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return a value between measured points, on the line through the nearest two beyond them."""
    if len(points) == 1:
        return points[0][1]
    after = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[max(1, after)]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(value, min(y0, y1)) if x < points[0][0] or x > points[-1][0] else value


def sums_among(sizes: Sequence[int], device: torch.device) -> dict[int, list[tuple[int, float]]]:
    """Return the seconds of sums among the first 2, 4 and so on ranks, and among all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    counts = sorted({*(n for n in (2, 4) if n < size), size} - {1})
    found: dict[int, list[tuple[int, float]]] = {}
    for count in counts:
        group = dist.new_group(list(range(count)))
        if rank < count:
            found[count] = [(n, _sum_of(n, group, device)) for n in sizes]
        dist.barrier()
    return found


def _sum_of(nbytes: int, group: Any, device: torch.device) -> float:
    tensor, times = torch.zeros(nbytes // 4, device=device), []

    def run() -> None:
        direct.all_reduce(tensor, group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(8):
        dist.barrier(group)
        times.append(timed(run, 0.0).clock)
    return statistics.median(times[2:])


def here() -> dict[str, Any]:
    """Return the node, its cores and the bytes that are left to it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"node": socket.gethostname(), "cores": cores or 1, "memory": left_to_machine()}


def measure_on_rank(order: ProfileOrder | None, sums: Sequence[int]) -> dict[str, Any]:
    """Measure on a rank, at the same time as all others: the model, then sums among ranks."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    measured: dict[str, Any] = {} if order is None else order.measure(device)
    if dist.is_initialized():
        dist.barrier()
        measured["sums"] = sums_among(sums, device)
    return measured | {"here": here()}


def probe_of(
    measured: Sequence[Mapping[str, Any]],
    slots: int,
    trial: Trial,
    replicas: Sequence[int],
    strategies: Sequence[str],
    engines: Sequence[str],
    busy: float,
) -> Probe:
    """Return the probe of a session: what ranks have measured, and overheads by trial fits."""
    nodes = {found["here"]["node"]: found["here"] for found in measured}
    cores = min(found["cores"] for found in nodes.values())
    memory = sum(found["memory"] for found in nodes.values()) / max(1, slots)
    overheads: dict[tuple[str, int], float] = {}
    units: dict[str, float] = {}
    reasons: dict[str, str] = {}

    def seconds_of(choice: Choice, name: str) -> float | None:
        if name in reasons:
            return None
        try:
            times = trial(choice, ITERATIONS)
        except SparkdlError as error:
            reasons[name] = str(error).partition("\n")[0]
            return None
        shared = times.processor / min(choice.replicas, cores * len(nodes))
        is_busy = busy > BUSY and times.processor > 0
        return min(times.clock, shared) if is_busy else times.clock

    def overheads_of(engine: str) -> None:
        for count in sorted({min(replicas), max(replicas)}) if engine in engines else ():
            seconds = seconds_of(Choice(engine, count), engine)
            if seconds is not None:
                overheads[engine, count] = seconds

    overheads_of(GANG)
    plain = Probe(slots, cores, overheads=overheads).overhead(GANG, 2)
    counts = {"fsdp": TRIAL_TENSORS, "tensor": TRIAL_PAIRS, "pipeline": TRIAL_PARTS}
    for word in (word for word in counts if word in strategies and max(replicas) > 1):
        parts = TRIAL_PARTS if word == "pipeline" else 0
        seconds = seconds_of(Choice(GANG, 2, word, (), parts), word)
        if plain is not None and seconds is not None:
            units[word] = max(0.0, seconds - plain) / counts[word]
    overheads_of(SHUFFLE)  # last, when the JVM is warm
    sums = measured[0].get("sums", {})
    return Probe(slots, cores, len(nodes), memory, overheads, units, sums, reasons, busy=busy)


OVERHEADS = {SHUFFLE: (0.013, 0.0), GANG: (0.001, 0.0001)}
"""Seconds of an iteration that computes nothing, by engine: of any, and for each replica beside the
driver's work on tasks, which :mod:`sparkdl.planner.estimate` counts itself."""
UNITS = {"fsdp": 0.0012, "tensor": 0.0006, "pipeline": 0.0012}
"""Seconds of a parameter tensor, of a pair of layers and of a micro-batch, by strategy."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that is not here, for ``sparkdl.plan(trainer, data, cluster=...)``.

    Its iterations are computed by formulas from the profile of the model on this machine. Nothing runs
    there, and the table says so.

    Attributes:
        nodes: The number of machines.
        slots: The task slots of each.
        gbit: The bandwidth between two machines, in Gbit/s.
        latency: The seconds that a small message takes.
        speed: How many times as fast as here a slot computes.
        memory: The bytes that each slot may use.
        gpus: The GPUs of each machine. Times are then unknown unless ``speed`` says how fast they are,
            or this machine has one too.
        spread: The spread of the computing times of the slots, as a share of their mean.
    """

    nodes: int
    slots: int
    gbit: float = 10.0
    latency: float = 50e-6
    speed: float | None = None
    memory: float = math.inf
    gpus: int = 0
    spread: float = 0.05

    def __post_init__(self) -> None:
        make_plain(self)
        raise_all(ParameterError, [*self._problems()])

    def _problems(self) -> list[str]:
        wrong = [
            f"Cluster({name}={shown(value)}): give a whole number of at least {least}."
            for name, least in (("nodes", 1), ("slots", 1), ("gpus", 0))
            if not is_whole(value := getattr(self, name), least)
        ]
        for name in ("gbit", "speed", "memory"):
            value = getattr(self, name)
            infinite = name == "memory" and value == math.inf
            known = infinite or (name == "speed" and value is None)
            if not known and not (is_number(value) and value > 0):
                wrong.append(f"Cluster({name}={shown(value)}): give a number above 0.")
        for name in ("latency", "spread"):
            if not (is_number(value := getattr(self, name)) and value >= 0):
                wrong.append(f"Cluster({name}={shown(value)}): give a number of at least 0.")
        return wrong

    def __str__(self) -> str:
        return f"Cluster(nodes={self.nodes:g}, slots={self.slots:g}, gbit={self.gbit:g})"

    def probe(self, units: dict[str, float] | None = None) -> Probe:
        """Return the probe that such a cluster would have, as far as numbers tell."""
        total = self.nodes * self.slots
        ends = sorted({1, total})
        overheads = {
            (engine, n): fixed + each * n
            for engine, (fixed, each) in OVERHEADS.items()
            for n in ends
        }
        latency = self.latency if self.nodes > 1 else 0.0
        return Probe(
            slots=total,
            cores=self.slots,
            nodes=self.nodes,
            memory=self.memory,
            overheads=overheads,
            units={**UNITS, **(units or {})},
            bandwidth=self.gbit * 1e9 / 8 if self.nodes > 1 else 8e9,
            latency=latency or 5e-6,
            computed=True,
        )

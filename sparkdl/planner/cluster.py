"""Machines that are not here, described by a few numbers, for plans that are computed and not run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from sparkdl.errors import ParameterError, raise_all, shown
from sparkdl.plain import is_number, is_whole, make_plain
from sparkdl.planner.choice import GANG, SHUFFLE
from sparkdl.planner.probe import Probe

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
        told = [f"{f.name}={getattr(self, f.name):g}" for f in fields(self) if f.name in _TOLD]
        return f"Cluster({', '.join(told)})"

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


_TOLD = ("nodes", "slots", "gbit")

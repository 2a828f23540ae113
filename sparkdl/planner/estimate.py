"""Predictions: the time, memory and traffic of an iteration by a choice.

[Note: formulas] P bytes of parameters, R ranks, D copies of a split model, r = R / D ranks a copy, S
stages, m micro-batches. w(n) is a pass over n rows, u an update of everything, s(r, n) a sum of n bytes
among r ranks. An iteration is the sum of its parts: "overhead" (what the engine costs), "compute",
"sum", "update", and "driver" between nodes. Constants are in seconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.planner.choice import GANG, SHUFFLE, Choice, Facts
from sparkdl.planner.probe import WARM, WARM_FROM, Probe
from sparkdl.planner.profile import BUSY, Profile, spread_factor

BYTE_SECONDS = 1.3e-9
"""Seconds of a byte of parameters in an iteration of shuffle on one node: written, mapped, checked."""
TASK_SECONDS = 0.35 * 1.55e-3
"""Seconds of the driver for a task: of the 1.55 ms of its JVM, those of the busiest thread."""
BLOCK_SECONDS = 0.16e-3
"""Seconds of a task for each block of a shuffle that it reads."""
LIBRARIES = 180e6
"""The bytes of a worker before it has a model."""
BUCKET = 4 << 20
"""The bytes from which gradients are summed while backward still runs."""
RANGE, WIDE = 0.2, 0.35
"""How far times may be off, as a share: of choices that are probe_of whole, and of split models."""
MOST_MEMORY = 0.9
"""The share of a slot's memory that a choice may take."""


@dataclass(frozen=True)
class Estimate:
    """The prediction of an iteration by one choice; seconds are None where something is unknown."""

    choice: Choice
    seconds: float | None
    low: float = 0.0
    high: float = math.inf
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0  # bytes of a worker at its peak
    sent: float = 0.0  # bytes that a replica sends
    unknown: str = ""  # why seconds are None
    refused: str = ""  # why it cannot run
    measured: bool = False  # in an earlier fit, not predicted

    @property
    def milliseconds(self) -> float:
        return 1e3 * (math.inf if self.seconds is None else self.seconds)


@dataclass(frozen=True)
class Formulas:
    """The formulas over what was measured; see the note above."""

    facts: Facts
    profile: Profile
    probe: Probe

    def estimate(self, choice: Choice, refused: str = "") -> Estimate:
        """Return the prediction for a choice; where it is ``refused`` only its memory."""
        memory, sent = self.memory(choice), self.sent(choice)
        most = MOST_MEMORY * self.probe.memory
        if not refused and memory - LIBRARIES > most:
            refused = (
                f"a worker needs {_gb(memory)}, and {_gb(self.probe.memory)} are left to each of "
                f"{self.probe.slots} task slots"
            )
        if refused:
            return Estimate(choice, None, memory=memory, sent=sent, refused=refused)
        parts = self.parts(choice)
        if isinstance(parts, str):
            return Estimate(choice, None, memory=memory, sent=sent, unknown=parts)
        seconds = max(sum(parts.values()), self._least(choice, parts))
        off = RANGE if choice.split == 1 else WIDE
        if max(self.profile.busy, self.probe.busy) > BUSY:
            off *= 2
        low, high = seconds * (1 - off), seconds * (1 + off)
        return Estimate(choice, seconds, low, high, parts, memory, sent)

    def parts(self, choice: Choice) -> dict[str, float] | str:
        """Return the seconds of an iteration by part, or why they are unknown."""
        probe = self.probe
        if probe.overhead(choice.engine, choice.replicas) is None:
            return probe.reasons.get(choice.engine, "its engine was not tried")
        for word in ("fsdp", "tensor", "pipeline") if choice.engine == GANG else ():
            if word in choice.strategy and word not in probe.units:
                return probe.reasons.get(word, "this strategy was not tried")
        return self.parts_of(choice)

    def overhead(self, choice: Choice) -> float:
        """Return the seconds that the engine takes by itself, 0 if they are unknown."""
        return self.probe.overhead(choice.engine, choice.replicas) or 0.0

    def parts_of(self, choice: Choice) -> dict[str, float]:
        """Return the seconds of an iteration by part, 0 where they are unknown."""
        overhead = self.overhead(choice)
        if choice.engine == SHUFFLE:
            return self._shuffle(choice, overhead)
        words = choice.strategy.split("+")
        parts = {"overhead": overhead, "compute": self._compute(choice.replicas)}
        nbytes, update = self.profile.nbytes, self.profile.update
        if choice.split == 1:
            parts["sum"] = self._not_hidden(choice, self.probe.sum(choice.replicas, nbytes))
            parts["update"] = update / (choice.replicas if "zero1" in words else 1)
            return parts
        sizes, r = choice.sizes, choice.split
        rows = self.facts.batch_size / max(1, choice.passes)
        whole = self._pass(rows, choice.replicas)
        units, summed = 0.0, 0.0
        if "pipeline" in words:
            whole, messages = self._pipeline(choice, rows)
            units += choice.micro_batches * self.probe.unit("pipeline", choice.replicas)
            summed += messages
        if "tensor" in words:
            whole /= sizes.tensor  # of the layers that are split, here taken for all
            pairs = max(1, self.profile.tensors // 4)
            width = self.profile.output * rows
            times = max(1, choice.micro_batches)
            units += times * pairs * self.probe.unit("tensor", choice.replicas)
            summed += 2 * pairs * self.probe.sum(sizes.tensor, width)
        if "fsdp" in words:
            tensors = self.profile.tensors / (sizes.pipe * sizes.tensor)
            units += tensors * self.probe.unit("fsdp", choice.replicas)
            share = nbytes / (sizes.pipe * sizes.tensor)
            summed += 1.5 * self.probe.sum(sizes.shard, share)
        summed += self.probe.sum(sizes.data, nbytes / r)
        return {"overhead": overhead + units, "compute": whole, "sum": summed, "update": update / r}

    def _shuffle(self, choice: Choice, overhead: float) -> dict[str, float]:
        """Return the parts of an iteration of Spark jobs, on one node or between nodes."""
        probe, profile, m = self.probe, self.profile, choice.replicas
        waves = math.ceil(m / max(1, probe.slots))
        steps = int(dict(choice.more).get("local_steps", self.facts.local_steps))
        nbytes = profile.nbytes * (1.0 + (profile.state if steps > 1 else 0.0))
        compute, alone = waves * self._compute(m), probe.nodes == 1
        parts = {"overhead": overhead * warmth(self.facts.iterations), "compute": compute}
        if alone:
            parts["overhead"] += BYTE_SECONDS * nbytes
        else:
            # half to launch tasks, half to take their results, some of it while others compute
            each = TASK_SECONDS * m
            parts["driver"] = each + max(each / 2, each - compute) + self.blocks(m)
            parts["sum"] = self._moved(nbytes) / probe.bandwidth
        if steps > 1:  # of a batch: replicas meet once in so many
            parts |= {name: parts[name] / steps for name in parts if name != "compute"}
        return {**parts, "update": profile.update / (1 if alone or steps > 1 else m)}

    def blocks(self, replicas: int) -> float:
        """Return the seconds of tasks for the blocks of a shuffle that they read."""
        return BLOCK_SECONDS * replicas * replicas / max(1, self.probe.slots)

    def _moved(self, nbytes: float) -> float:
        """Return the bytes between nodes of a shuffle of gradients and weights."""
        return 2 * nbytes * (self.probe.nodes - 1) / self.probe.nodes

    def _pass(self, rows: float, ranks: int) -> float:
        return self.profile.line(rows) * spread_factor(self.profile.line.spread, ranks)

    def _compute(self, replicas: int) -> float:
        return self._pass(self.facts.batch_size / replicas, replicas)

    def _not_hidden(self, choice: Choice, summed: float) -> float:
        """Return the part of a sum that backward does not hide: large gradients go in buckets."""
        nbytes, probe = self.profile.nbytes, self.probe
        if nbytes <= BUCKET or choice.replicas >= probe.cores * probe.nodes:
            return summed
        backward = 2 / 3 * self._compute(choice.replicas) * (1 - BUCKET / nbytes)
        return max(summed * BUCKET / nbytes, summed - backward)

    def _pipeline(self, choice: Choice, rows: float) -> tuple[float, float]:
        """Return the seconds of the passes of a pipeline, and of the messages between its stages."""
        stages, count = choice.sizes.pipe, choice.micro_batches
        longest = max(self.profile.stages(stages)) * self._pass(rows / count, choice.replicas)
        message = self.probe.message(self.profile.output * rows / count)
        return (count + stages - 1) * longest, 2 * (count + stages - 1) * message

    def _least(self, choice: Choice, parts: Mapping[str, float]) -> float:
        """Return the processor time of all ranks by the cores: no iteration is shorter."""
        cores = self.probe.cores * self.probe.nodes
        if choice.replicas <= cores:
            return 0.0
        updates = choice.replicas if choice.engine == GANG else 1
        busy = parts["compute"] * choice.replicas + parts["update"] * updates
        if choice.split > 1 and "pipeline" in choice.strategy:
            busy = self.profile.line(self.facts.batch_size) + parts["update"] * updates
        return parts["overhead"] + busy / cores

    def memory(self, choice: Choice) -> float:
        """Return the bytes of a worker at its peak, libraries included."""
        p, state = float(self.profile.nbytes), self.profile.state
        rows = self.facts.batch_size / choice.replicas
        kept, sizes, r = self.profile.kept * rows, choice.sizes, choice.split
        if choice.engine == SHUFFLE:
            shared = (2 + (2 + 2 * state) / choice.replicas) * p  # by the workers of a node
            beside = max(1, min(choice.replicas, self.probe.slots // self.probe.nodes))
            return LIBRARIES + 0.7 * p + shared / beside + kept
        words = choice.strategy.split("+")
        if "pipeline" in words:
            stages, count = sizes.pipe, choice.micro_batches
            kept = self.profile.kept * self.facts.batch_size / choice.passes / stages
            return LIBRARIES + (1.6 + (3 + state) / r) * p + kept * min(stages, count) / count
        if "tensor" in words:
            return LIBRARIES + (1.2 + (3 + state) / r) * p + kept
        if "fsdp" in words:
            return LIBRARIES + (2.1 + (2 + state) / r) * p + kept
        own = state / choice.replicas if "zero1" in words else state
        return LIBRARIES + (4.1 + own) * p + kept

    def sent(self, choice: Choice) -> float:
        """Return the bytes that a replica sends in an iteration."""
        r, p = choice.replicas, self.profile.nbytes
        if choice.engine == SHUFFLE:
            return self._moved(p)
        factor = 1.5 if "fsdp" in choice.strategy else 1.0
        return factor * 2 * p * (r - 1) / r


def warmth(iterations: int | None) -> float:
    """Return the mean cost of Spark's schedule over a fit, relative to that of a young JVM."""
    if iterations is None or iterations <= WARM_FROM:
        return 1.0
    return (WARM_FROM + WARM * (iterations - WARM_FROM)) / iterations


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"

"""An iteration event by event: for what formulas cannot say, and for its picture.

[Note: operations on resources] A resource (a rank's processor, the network, the driver) does one thing
at a time, in the order in which things become ready. Collectives are one operation on the network with
the time that :class:`sparkdl.planner.probe.Probe` says. It shows stragglers against a serial driver,
buckets that hide behind backward, and uneven stages. Choices are ranked by formulas; where both apply
they agree, which is a test.
"""

from __future__ import annotations

import heapq
import html
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparkdl.planner.choice import SHUFFLE, Choice, Facts
from sparkdl.planner.estimate import BLOCK_SECONDS, BUCKET, BYTE_SECONDS, TASK_SECONDS, warmth
from sparkdl.planner.probe import Probe
from sparkdl.planner.profile import Profile

DRIVER, NETWORK = "driver", "network"
FORWARD = 1 / 3
"""The share of a pass that is forward."""
COLOURS = {
    "schedule": "#7ba5cf",
    "forward": "#8fbc8f",
    "backward": "#588157",
    "sum": "#d99a2b",
    "update": "#c8553d",
}
MOST_LANES, WIDTH, LANE = 18, 720, 18


@dataclass(frozen=True)
class Operation:
    """A piece of work on a resource, once the operations ``after`` which it comes have ended."""

    resource: str
    kind: str
    seconds: float
    after: Sequence[int] = ()
    priority: int = 0  # among what is ready on its resource, the lowest first


@dataclass(frozen=True)
class Bar:
    """An operation with its beginning."""

    resource: str
    kind: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass
class Timeline:
    """Operations, which are run event by event."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, resource: str, kind: str, seconds: float, *after: int, priority: int = 0) -> int:
        """Add an operation, and return its number."""
        self.operations.append(Operation(resource, kind, seconds, after, priority))
        return len(self.operations) - 1

    def run(self) -> list[Bar]:
        """Return all operations with the times at which they begin, in the order of their ends."""
        missing = [len(set(one.after)) for one in self.operations]
        followers: dict[int, list[int]] = {}
        for number, one in enumerate(self.operations):
            for before in set(one.after):
                followers.setdefault(before, []).append(number)
        ready: dict[str, list[tuple[int, float, int]]] = {}
        ends: list[tuple[float, int]] = []
        busy: set[str] = set()
        spans: list[Bar] = []

        def begin(resource: str, now: float) -> None:
            if resource not in busy and ready.get(resource):
                _, _, number = heapq.heappop(ready[resource])
                busy.add(resource)
                heapq.heappush(ends, (now + self.operations[number].seconds, number))

        def free(number: int, now: float) -> None:
            one = self.operations[number]
            heapq.heappush(ready.setdefault(one.resource, []), (one.priority, now, number))

        for number, count in enumerate(missing):
            if not count:
                free(number, 0.0)
        for resource in list(ready):
            begin(resource, 0.0)
        while ends:
            now, number = heapq.heappop(ends)
            one = self.operations[number]
            spans.append(Bar(one.resource, one.kind, now - one.seconds, one.seconds))
            busy.discard(one.resource)
            touched = {one.resource}
            for follower in followers.get(number, ()):
                missing[follower] -= 1
                if not missing[follower]:
                    free(follower, now)
                    touched.add(self.operations[follower].resource)
            for resource in touched:
                begin(resource, now)
        return spans


def duration(spans: Sequence[Bar]) -> float:
    """Return the end of the last operation."""
    return max((span.end for span in spans), default=0.0)


def simulated(choice: Choice, facts: Facts, profile: Profile, probe: Probe) -> list[Bar]:
    """Return an iteration by a choice, event by event."""
    if choice.engine == SHUFFLE:
        return _shuffle(choice, facts, profile, probe).run()
    words = choice.strategy.split("+")
    if "pipeline" in words:
        return _pipeline(choice, facts, profile, probe).run()
    if choice.split > 1:
        return _layer_by_layer(choice, facts, profile, probe).run()
    return _buckets(choice, facts, profile, probe).run()


def paces(spread: float, ranks: int) -> list[float]:
    """Return how many times as long as the mean each rank computes: quantiles of a normal."""
    if not spread or ranks == 1:
        return [1.0] * ranks
    normal = statistics.NormalDist(1.0, spread)
    return [max(0.1, normal.inv_cdf((rank + 0.5) / ranks)) for rank in range(ranks)]


def _shuffle(choice: Choice, facts: Facts, profile: Profile, probe: Probe) -> Timeline:
    """The driver launches tasks one after another; slots compute; owners fetch and update."""
    line, count = Timeline(), choice.replicas
    overhead = (probe.overhead(SHUFFLE, count) or 0.0) * warmth(facts.iterations)
    compute = profile.line(facts.batch_size / count)
    slots = [f"slot {n}" for n in range(min(count, probe.slots))]
    if probe.nodes == 1:
        begun = line.add(DRIVER, "schedule", overhead + BYTE_SECONDS * profile.nbytes)
        launched = [begun] * count
    else:
        begun = line.add(DRIVER, "schedule", overhead)
        each = TASK_SECONDS / 2  # to launch a task, and to take its result
        launched = [line.add(DRIVER, "schedule", each, begun, priority=-2) for _ in range(count)]
    done = [
        _pass(line, slots[n % len(slots)], compute * pace, launched[n])
        for n, pace in enumerate(paces(profile.line.spread, count))
    ]
    if probe.nodes == 1:
        line.add(slots[0], "update", profile.update, *done)
        return line
    results = [line.add(DRIVER, "schedule", each, one) for one in done]
    again = [line.add(DRIVER, "schedule", each, *results) for _ in done]
    blocks = BLOCK_SECONDS * count * count / max(1, probe.slots)
    moved = 2 * profile.nbytes * (probe.nodes - 1) / probe.nodes / probe.bandwidth
    fetched = line.add(NETWORK, "sum", moved + blocks, *again)
    updated = [line.add(slot, "update", profile.update / count, fetched) for slot in slots]
    for _ in done:
        line.add(DRIVER, "schedule", each, *updated)
    return line


def _pass(line: Timeline, resource: str, seconds: float, *after: int, priority: int = 0) -> int:
    forward = line.add(resource, "forward", FORWARD * seconds, *after, priority=priority)
    return line.add(resource, "backward", (1 - FORWARD) * seconds, forward, priority=priority - 1)


def _begun(line: Timeline, choice: Choice, probe: Probe) -> int:
    return line.add(DRIVER, "schedule", probe.overhead(choice.engine, choice.replicas) or 0.0)


def _buckets(choice: Choice, facts: Facts, profile: Profile, probe: Probe) -> Timeline:
    """Each rank goes backward bucket by bucket; the sum of one hides behind the next."""
    line, count = Timeline(), choice.replicas
    begun, seconds = _begun(line, choice, probe), profile.line(facts.batch_size / count)
    hides = profile.nbytes > BUCKET and count < probe.cores * probe.nodes
    buckets = max(1, round(profile.nbytes / BUCKET)) if hides else 1
    steps = paces(profile.line.spread, count)
    last = [
        line.add(f"rank {rank}", "forward", FORWARD * seconds * pace, begun)
        for rank, pace in enumerate(steps)
    ]
    summed = begun
    for _ in range(buckets):
        last = [
            line.add(f"rank {rank}", "backward", (1 - FORWARD) * seconds * pace / buckets, before)
            for rank, (pace, before) in enumerate(zip(steps, last, strict=True))
        ]
        share = probe.sum(count, profile.nbytes) / buckets
        summed = line.add(NETWORK, "sum", share, summed, *last)
    update = profile.update / (count if choice.strategy == "zero1" else 1)
    for rank in range(count):
        line.add(f"rank {rank}", "update", update, summed)
    return line


def _layer_by_layer(choice: Choice, facts: Facts, profile: Profile, probe: Probe) -> Timeline:
    """All ranks compute a layer, then wait for what they exchange for the next one."""
    line, count, sizes = Timeline(), choice.replicas, choice.sizes
    words, last = choice.strategy.split("+"), _begun(line, choice, probe)
    seconds = profile.line(facts.batch_size / max(1, choice.passes)) / sizes.tensor
    steps = paces(profile.line.spread, count)
    if "tensor" in words:
        rounds = max(1, profile.tensors // 4)
        width = profile.output * facts.batch_size / choice.passes
        unit, exchange = probe.unit("tensor", count), 2 * probe.sum(sizes.tensor, width)
        exchanges = [("sum", unit + exchange)]
    else:
        rounds, exchanges = profile.tensors, []
    if "fsdp" in words:
        own = 1.5 * probe.sum(sizes.shard, profile.nbytes / sizes.tensor)
        units = profile.tensors / sizes.tensor * probe.unit("fsdp", count)
        exchanges.append(("sum", (own + units) / rounds))
    for kind, share in (("forward", FORWARD), ("backward", 1 - FORWARD)):
        for _ in range(rounds):
            computed = [
                line.add(f"rank {rank}", kind, seconds * share * pace / rounds, last)
                for rank, pace in enumerate(steps)
            ]
            last = line.add(NETWORK, "sum", share * sum(s for _, s in exchanges), *computed)
    last = line.add(NETWORK, "sum", probe.sum(sizes.data, profile.nbytes / choice.split), last)
    for rank in range(count):
        line.add(f"rank {rank}", "update", profile.update / choice.split, last)
    return line


def _pipeline(choice: Choice, facts: Facts, profile: Profile, probe: Probe) -> Timeline:
    """The engine's own order, 1F1B: a stage runs backward as soon as it can."""
    line, sizes, count = Timeline(), choice.sizes, choice.micro_batches
    begun, stages = _begun(line, choice, probe), choice.sizes.pipe
    units = line.add(DRIVER, "schedule", count * probe.unit("pipeline", choice.replicas), begun)
    rows = facts.batch_size / max(1, choice.passes) / count
    whole = profile.line(rows)
    seconds = [share * whole for share in profile.stages(stages)]
    message = probe.message(profile.output * rows)
    ends: list[int] = []
    copies = choice.replicas // stages
    for copy in range(copies):
        ends += one_f_one_b(line, seconds, count, message, units, f"copy {copy} " * (copies > 1))
    summed = line.add(NETWORK, "sum", probe.sum(sizes.data, profile.nbytes / choice.split), *ends)
    for copy in range(copies):
        for stage in range(stages):
            name = f"{f'copy {copy} ' * (copies > 1)}stage {stage}"
            line.add(name, "update", profile.update / choice.split, summed)
    return line


def one_f_one_b(
    line: Timeline,
    seconds: Sequence[float],  # of a micro-batch, by stage
    count: int,
    message: float = 0.0,
    after: int | None = None,
    label: str = "",
) -> list[int]:
    """Add the passes of a pipeline; return the last operation of each stage."""
    stages, begun = len(seconds), () if after is None else (after,)
    done: dict[tuple[str, int, int], int] = {}
    orders = [deque(_order(stage, stages, count)) for stage in range(stages)]
    last: list[int | None] = [None] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, part = order[0]
                source = stage - 1 if kind == "forward" else stage + 1
                comes = 0 <= source < stages
                if comes and (kind, source, part) not in done:
                    break
                order.popleft()
                before = [*begun, *([] if last[stage] is None else [last[stage]])]
                if comes:
                    link = f"{label}link {min(stage, source)} {kind}"
                    before.append(line.add(link, "sum", message, done[kind, source, part]))
                share = FORWARD if kind == "forward" else 1 - FORWARD
                name = f"{label}stage {stage}"
                number = line.add(name, kind, share * seconds[stage], *before)  # type: ignore[arg-type]
                done[kind, stage, part] = last[stage] = number
    return [number for number in last if number is not None]


def _order(stage: int, stages: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield the passes of a stage in the order of 1F1B."""
    ahead = min(count, stages - stage)
    yield from (("forward", part) for part in range(ahead))
    for part in range(count):
        yield "backward", part
        if part + ahead < count:
            yield "forward", part + ahead


def draw(spans: Sequence[Bar]) -> str:
    """Return the picture of an iteration: a lane for each resource, a bar for each operation."""
    whole, lanes = duration(spans) or 1.0, dict[str, list[Bar]]()
    for span in sorted(spans, key=lambda span: span.start):
        lanes.setdefault(span.resource, []).append(span)
    names = sorted(lanes, key=_lane)
    left, shown = 90, names[:MOST_LANES]
    scale, drawn = (WIDTH - left - 10) / whole, []
    for row, name in enumerate(shown):
        y = 4 + row * LANE
        drawn.append(f"<text x='0' y='{y + 11}'>{html.escape(name)}</text>")
        drawn += [
            f"<rect x='{left + span.start * scale:.2f}' y='{y}' "
            f"width='{max(0.4, span.seconds * scale):.2f}' height='{LANE - 4}' "
            f"fill='{COLOURS[span.kind]}' stroke='#fff' stroke-width='0.3'>"
            f"<title>{span.kind}: {1e3 * span.seconds:.3g} ms</title></rect>"
            for span in lanes[name]
            if span.seconds > 0
        ]
    y = 4 + len(shown) * LANE + 12
    hidden = f"; {len(names) - len(shown)} lanes more" if len(names) > len(shown) else ""
    step = 10 ** math.floor(math.log10(1e3 * whole))
    for tick in range(int(1e3 * whole / step) + 1):
        x = left + tick * step / 1e3 * scale
        drawn.append(f"<text x='{x:.1f}' y='{y}' text-anchor='middle'>{tick * step:g}</text>")
    drawn += [
        *keys(COLOURS, left, 80, y + 16),
        f"<text x='0' y='{y}'>ms</text>",
        f"<text x='0' y='{y + 30}'>{1e3 * whole:.3g} ms{hidden}; computed</text>",
    ]
    return picture(WIDTH, y + 34, drawn)


def keys(colours: Mapping[str, str], left: int, step: int, y: int) -> list[str]:
    """Return names in their colours, side by side."""
    return [
        f"<text x='{left + i * step}' y='{y}' fill='{colour}'>{html.escape(words)}</text>"
        for i, (words, colour) in enumerate(colours.items())
    ]


def picture(width: int, height: int, drawn: Sequence[str]) -> str:
    """Return SVG of such elements."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"style='font:10px sans-serif' fill='currentColor'>{''.join(drawn)}</svg>"
    )


def _lane(name: str) -> tuple[int, list[object]]:
    """Return the order of lanes: the driver, ranks by number, the network."""
    words = [int(word) if word.isdigit() else word for word in name.split()]
    kind = 0 if name == DRIVER else 2 if name == NETWORK or "link" in words else 1
    return kind, [(isinstance(word, str), word) for word in words]

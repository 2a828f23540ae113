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
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter

from sparkdl.planner.choice import SHUFFLE, Choice
from sparkdl.planner.estimate import BUCKET, TASK_SECONDS, Formulas
from sparkdl.planner.profile import spread_factor

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
class Bar:
    """A piece of work on a resource, once the ones ``after`` which it comes have ended."""

    resource: str
    kind: str
    seconds: float
    after: Sequence[int] = ()
    priority: int = 0  # among what is ready on its resource, the lowest first
    start: float = 0.0  # known after a run

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass
class Timeline:
    """Bars, which are run event by event."""

    bars: list[Bar] = field(default_factory=list)

    def add(self, resource: str, kind: str, seconds: float, *after: int, priority: int = 0) -> int:
        """Add a bar, and return its number."""
        self.bars.append(Bar(resource, kind, seconds, after, priority))
        return len(self.bars) - 1

    def run(self) -> list[Bar]:
        """Return all bars with the times at which they begin, in the order of their ends."""
        order = TopologicalSorter({n: bar.after for n, bar in enumerate(self.bars)})
        order.prepare()
        ready = defaultdict[str, list[tuple[int, float, int]]](list)
        ends, busy, spans, now = list[tuple[float, int]](), set[str](), list[Bar](), 0.0
        while order.is_active():
            for number in order.get_ready():
                bar = self.bars[number]
                heapq.heappush(ready[bar.resource], (bar.priority, now, number))
            for resource, waiting in ready.items():
                if waiting and resource not in busy:
                    busy.add(resource)
                    number = heapq.heappop(waiting)[-1]
                    heapq.heappush(ends, (now + self.bars[number].seconds, number))
            now, number = heapq.heappop(ends)
            bar = self.bars[number]
            spans.append(replace(bar, start=now - bar.seconds))
            busy.discard(bar.resource)
            order.done(number)
        return spans


def duration(spans: Sequence[Bar]) -> float:
    """Return the end of the last bar."""
    return max((span.end for span in spans), default=0.0)


def simulated(choice: Choice, formulas: Formulas) -> list[Bar]:
    """Return an iteration by a choice, event by event."""
    if choice.engine == SHUFFLE:
        return _shuffle(choice, formulas).run()
    if "pipeline" in choice.strategy:
        return _pipeline(choice, formulas).run()
    return _data_and_layers(choice, formulas).run()


def paces(spread: float, ranks: int) -> list[float]:
    """Return how many times as long as the mean each rank computes: quantiles of a normal."""
    if not spread or ranks == 1:
        return [1.0] * ranks
    normal = statistics.NormalDist(1.0, spread)
    return [max(0.1, normal.inv_cdf((rank + 0.5) / ranks)) for rank in range(ranks)]


def _shuffle(choice: Choice, formulas: Formulas) -> Timeline:
    """The driver launches tasks one after another; slots compute; owners fetch and update."""
    probe, parts = formulas.probe, formulas.parts_of(choice)
    line, count = Timeline(), choice.replicas
    compute = formulas.profile.line(formulas.facts.batch_size / count)
    slots = [f"slot {n}" for n in range(min(count, probe.slots))]
    begun, each = line.add(DRIVER, "schedule", parts["overhead"]), 0.0
    launched = [begun] * count
    if probe.nodes > 1:
        each = TASK_SECONDS / 2  # to launch a task, and to take its result
        launched = [line.add(DRIVER, "schedule", each, begun, priority=-2) for _ in range(count)]
    done = []
    for n, pace in enumerate(paces(formulas.profile.line.spread, count)):
        slot, seconds = slots[n % len(slots)], compute * pace
        forward = line.add(slot, "forward", FORWARD * seconds, launched[n])
        done.append(line.add(slot, "backward", (1 - FORWARD) * seconds, forward, priority=-1))
    if probe.nodes == 1:
        line.add(slots[0], "update", parts["update"], *done)
        return line
    results = [line.add(DRIVER, "schedule", each, one) for one in done]
    again = [line.add(DRIVER, "schedule", each, *results) for _ in done]
    fetched = line.add(NETWORK, "sum", parts["sum"] + formulas.blocks(count), *again)
    updated = [line.add(slot, "update", parts["update"], fetched) for slot in slots]
    for _ in done:
        line.add(DRIVER, "schedule", each, *updated)
    return line


def _data_and_layers(choice: Choice, formulas: Formulas) -> Timeline:
    """Each rank goes backward bucket by bucket, and the sum of one hides behind the next.

    With a split model all ranks compute a layer, then wait for what they exchange for the next one.
    """
    probe, profile, parts = formulas.probe, formulas.profile, formulas.parts_of(choice)
    line, count, own = Timeline(), choice.replicas, formulas.overhead(choice)
    whole, last = choice.split == 1, 0.0
    if whole:
        hides = profile.nbytes > BUCKET and count < probe.cores * probe.nodes
        rounds = {"forward": 1, "backward": max(1, round(profile.nbytes / BUCKET)) if hides else 1}
        summed = probe.sum(count, profile.nbytes)
    else:
        layers = max(1, profile.tensors // 4) if "tensor" in choice.strategy else profile.tensors
        rounds = {"forward": layers, "backward": layers}
        last = probe.sum(choice.sizes.data, profile.nbytes / choice.split)
        summed = parts["sum"] - last + parts["overhead"] - own
    network = line.add(DRIVER, "schedule", own)
    alone = parts["compute"] / spread_factor(profile.line.spread, count)
    before = [network] * count
    for kind, share in (("forward", FORWARD), ("backward", 1 - FORWARD)):
        for _ in range(rounds[kind]):
            before = [
                line.add(f"rank {rank}", kind, share * alone * pace / rounds[kind], before[rank])
                for rank, pace in enumerate(paces(profile.line.spread, count))
            ]
            if kind == "backward" or not whole:
                exchange = (1.0 if whole else share) * summed / rounds[kind]
                network = line.add(NETWORK, "sum", exchange, network, *before)
            if not whole:
                before = [network] * count
    network = line.add(NETWORK, "sum", last, network)
    for rank in range(count):
        line.add(f"rank {rank}", "update", parts["update"], network)
    return line


def _pipeline(choice: Choice, formulas: Formulas) -> Timeline:
    """The engine's own order, 1F1B: a stage runs backward as soon as it can."""
    probe, profile, parts = formulas.probe, formulas.profile, formulas.parts_of(choice)
    line, count, stages = Timeline(), choice.micro_batches, choice.sizes.pipe
    begun = line.add(DRIVER, "schedule", parts["overhead"])
    rows = formulas.facts.batch_size / max(1, choice.passes) / count
    seconds = [share * profile.line(rows) for share in profile.stages(stages)]
    message = probe.message(profile.output * rows)
    several = choice.replicas > stages
    labels = [f"copy {copy} " * several for copy in range(choice.replicas // stages)]
    ends = [
        end for label in labels for end in one_f_one_b(line, seconds, count, message, begun, label)
    ]
    data = probe.sum(choice.sizes.data, profile.nbytes / choice.split)
    summed = line.add(NETWORK, "sum", data, *ends)
    for label in labels:
        for stage in range(stages):
            line.add(f"{label}stage {stage}", "update", parts["update"], summed)
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

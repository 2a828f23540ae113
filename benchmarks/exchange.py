"""Topologies over which M tasks send a vector, have it summed, and receive it: counts and Spark jobs.

Each is a number of shuffles up (gradients, summed where they arrive) and as many down (weights). The
job is a plain one, whose tasks do nothing else: owners hand weights down to M replicas, and these hand
gradients up to the owners again, as in an iteration of the shuffle engine between nodes. The tree is a
prototype that exists here alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from pyspark import RDD, SparkContext

from sparkdl.spark.frames import map_frames, send, shuffle_frames
from sparkdl.spark.worker import finish_task

Parcel = tuple[int, int, int]
"""To which task, and from where to where of the vector."""
Route = Callable[[int, int], list[Parcel]]
"""The frames that a task sends, by its number and the length of the vector."""


@dataclass(frozen=True)
class Hop:
    """A shuffle. Tasks of a stage stand on nodes at equal distances."""

    senders: int
    receivers: int
    route: Route

    def parcels(self, length: int, nodes: int) -> Iterator[tuple[int, int, int]]:
        """From which node to which, and how many elements."""
        for sender in range(self.senders):
            for receiver, start, stop in self.route(sender, length):
                source, target = sender * nodes // self.senders, receiver * nodes // self.receivers
                yield source, target, stop - start


@dataclass(frozen=True)
class Topology:
    replicas: int
    up: tuple[Hop, ...]
    down: tuple[Hop, ...]

    @property
    def stages(self) -> int:
        return 1 + len(self.down) + len(self.up)

    @property
    def tasks(self) -> int:
        hops = (*self.down, *self.up)
        return hops[0].senders + sum(hop.receivers for hop in hops)

    def count(self, length: int) -> Counts:
        """In fp32, for a replica a node."""
        messages, nbytes, most, busiest = 0, 0, 0, 0
        for hop in (*self.down, *self.up):
            ways = np.zeros((2, self.replicas, 2), int)  # sent or received, node, messages or bytes
            for source, target, elements in hop.parcels(length, self.replicas):
                messages += 1
                nbytes += 4 * elements
                if source != target:
                    ways[0, source] += 1, 4 * elements
                    ways[1, target] += 1, 4 * elements
            most += int(ways[..., 0].max())
            busiest += int(ways[..., 1].max())
        return Counts(self.stages, self.tasks, messages, nbytes, most, busiest)


@dataclass(frozen=True)
class Counts:
    """``messages`` and ``nbytes``: all of an iteration. ``most_messages`` and ``most_bytes``: of the
    busiest node and direction, shuffle by shuffle."""

    stages: int
    tasks: int
    messages: int
    nbytes: int
    most_messages: int
    most_bytes: int


def sliced(replicas: int, slices: int) -> Topology:
    """Each replica sends each slice to its owner: one owner is the plain parameter server."""
    up = Hop(replicas, slices, partial(_to_owners, slices))
    return Topology(replicas, (up,), (Hop(slices, replicas, partial(_to_all, replicas, slices)),))


def tree(replicas: int) -> Topology:
    """Two levels of equal fan-in, whole vectors: what ``treeAggregate`` does, and back."""
    fan = _root(replicas)
    up = Hop(replicas, fan, partial(_to_parent, fan)), Hop(fan, 1, _to_root)
    down = (
        Hop(1, fan, partial(_to_children, fan, fan)),
        Hop(fan, replicas, partial(_to_children, fan, replicas)),
    )
    return Topology(replicas, up, down)


def sliced_tree(replicas: int) -> Topology:
    """As many trees as replicas, one for each slice: two shuffles, each among the root of M tasks."""
    fan = _root(replicas)
    inside = Hop(replicas, replicas, partial(_in_group, fan, False))
    across = Hop(replicas, replicas, partial(_across, fan, False))
    back = Hop(replicas, replicas, partial(_across, fan, True))
    again = Hop(replicas, replicas, partial(_in_group, fan, True))
    return Topology(replicas, (inside, across), (back, again))


def _root(replicas: int) -> int:
    fan = math.isqrt(replicas)
    assert fan * fan == replicas, "a square number of replicas"
    return fan


def _part(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    length = stop - start
    return start + length * index // count, start + length * (index + 1) // count


def _to_owners(slices: int, task: int, length: int) -> list[Parcel]:
    return [(n, *_part(0, length, n, slices)) for n in range(slices)]


def _to_all(replicas: int, slices: int, task: int, length: int) -> list[Parcel]:
    return [(m, *_part(0, length, task, slices)) for m in range(replicas)]


def _to_parent(fan: int, task: int, length: int) -> list[Parcel]:
    return [(task // fan, 0, length)]


def _to_root(task: int, length: int) -> list[Parcel]:
    return [(0, 0, length)]


def _to_children(fan: int, receivers: int, task: int, length: int) -> list[Parcel]:
    return [(task * fan + child, 0, length) for child in range(fan)]


def _in_group(fan: int, back: bool, task: int, length: int) -> list[Parcel]:
    """Member k of a group has the k-th range; it is sent to it, or comes back from it."""
    group, member = divmod(task, fan)
    parts = [_part(0, length, member if back else other, fan) for other in range(fan)]
    return [(group * fan + other, *parts[other]) for other in range(fan)]


def _across(fan: int, back: bool, task: int, length: int) -> list[Parcel]:
    """Return the parcels between groups: of a member's range, the g-th part is that of group g."""
    group, member = divmod(task, fan)
    mine = _part(0, length, member, fan)
    parts = [_part(*mine, group if back else other, fan) for other in range(fan)]
    return [(other * fan + member, *parts[other]) for other in range(fan)]


def job(context: SparkContext, topology: Topology, length: int) -> RDD:
    """An RDD with a frame of each owner: the sum of its part of the gradients."""
    hops = (*topology.down, *topology.up)
    kinds = ["join"] * (len(topology.down) - 1) + ["replica"] + ["sum"] * len(topology.up)
    routes = [*(hop.route for hop in hops[1:]), None]
    owners = context.parallelize(range(hops[0].senders), hops[0].senders)
    rdd = map_frames(owners, Exchange("owner", length, hops[0].route))
    few_bytes = 4 * length <= 64 << 20
    for hop, kind, route in zip(hops, kinds, routes, strict=True):
        arrived = shuffle_frames(rdd, hop.receivers, few_bytes)
        rdd = map_frames(arrived, Exchange(kind, length, route))
    return rdd


@dataclass(frozen=True)
class Exchange:
    """A task: sum or join what arrives, and send it on; at the last owner, yield its sum.

    Weights are 1, and a replica's gradient is its number more than these.
    """

    kind: str
    length: int
    route: Route | None

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        if self.kind == "owner":
            low, values = 0, np.ones(self.length, np.float32)
        else:
            low, values = (_sum if self.kind == "sum" else _join)(frames)
        if self.kind == "replica":
            values += np.float32(partition)
        if self.route is None:
            yield np.array([values.sum(dtype=np.float64)]).tobytes()
        else:
            for target, start, stop in self.route(partition, self.length):
                head = np.array([start, stop], np.int64).tobytes()
                yield from send(target, head + values[start - low : stop - low].tobytes())
        finish_task()


def _sum(frames: Iterable[bytes]) -> tuple[int, np.ndarray]:
    total, low = np.zeros(0, np.float32), 0
    for frame in frames:
        values = np.frombuffer(frame, np.float32, offset=16)
        if len(total):
            total += values
        else:
            total, low = values.copy(), int(np.frombuffer(frame, np.int64, 1)[0])
    return low, total


def _join(frames: Iterable[bytes]) -> tuple[int, np.ndarray]:
    arrived = []
    for frame in frames:
        start, stop = np.frombuffer(frame, np.int64, 2)
        arrived.append((int(start), int(stop), frame))
    low = min(start for start, _, _ in arrived)
    values = np.empty(max(stop for _, stop, _ in arrived) - low, np.float32)
    for start, stop, frame in arrived:
        values[start - low : stop - low] = np.frombuffer(frame, np.float32, offset=16)
    return low, values


def expected(topology: Topology, length: int) -> float:
    """Return the total of the sums that ``job`` yields."""
    return length * sum(1 + m for m in range(topology.replicas))

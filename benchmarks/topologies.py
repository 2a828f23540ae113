"""Topologies of synchronization: what they send, what they take, a formula for it, and clusters.

    python benchmarks/topologies.py [--rounds 5] [--plot docs/images/topologies.svg] [--quick]

M replicas hand P MB of gradients to the owners of N slices, and receive weights of as many bytes, as in
an iteration of the shuffle engine between nodes with a replica on each: "N = M"; fewer owners; one, the
plain parameter server ("central"); a tree of two levels with fan-in sqrt(M), with whole vectors as
``treeAggregate`` has them, and with M slices. ``exchange.py`` has the jobs; those of the trees exist
nowhere else. Stages, tasks, messages and bytes are counted, and depend on no machine's load.

Milliseconds of processor time, which other work on the machine changes less than real time: medians of
jobs, one of each topology in turn, on ``local[2]``, where bytes go through Spark's shuffle files. In
brackets those of the formula, fitted by ``cost_model.py``, and real ones.

    t = a job + stages x a stage + tasks x a task + messages x a message + MB x a MB

Last, clusters of one replica a node with a core, computed: an owner's messages and bytes are its own
work, and each byte crosses a network; tasks of a stage run at once, and the driver takes 1.6 ms for
each (``scaling.py``). "best N": of 1, 2, 4, ... M.

With the real engine, slices and sums on the nodes first are measured by

    python benchmarks/between_nodes.py --nodes 4 --replicas 4 --slices 0,4,1 --sizes 0.1,25
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from between_nodes import processor_seconds
from cost_model import Fit, Term, error, fit
from exchange import Counts, Topology, expected, job, sliced, sliced_tree, tree
from harness import hardware, in_fresh_process, markdown, options, session, write_json

from sparkdl.spark.frames import RunningJob, forget_shuffles

SIZES = {0.01: (4, 16, 64), 1.0: (4, 16, 64), 8.0: (4, 16)}
"""MB -> replicas, square numbers."""
DRIVER = 1.6e-3
"""Seconds of the driver for a task."""
TERMS: dict[str, Term] = {
    "a job": lambda p: 1.0,
    "a stage": lambda p: p.counts.stages,
    "a task": lambda p: p.counts.tasks,
    "a message": lambda p: p.counts.messages,
    "a MB": lambda p: p.counts.nbytes / 1e6,
}


@dataclass(frozen=True)
class Point:
    """A topology, and what it took: seconds of processor time, and of the clock."""

    topology: str
    replicas: int
    size: float
    counts: Counts
    seconds: float = float("nan")
    clock: float = float("nan")


def topologies(replicas: int) -> dict[str, Topology]:
    """By name."""
    few = round(replicas**0.5)
    return {
        "N = M": sliced(replicas, replicas),
        "N = sqrt(M)": sliced(replicas, few),
        "central, N = 1": sliced(replicas, 1),
        "tree": tree(replicas),
        "tree, N = M": sliced_tree(replicas),
    }


def elements(size: float) -> int:
    return round(size * 1e6 / 4)


def measured(sizes: dict[float, tuple[int, ...]], rounds: int) -> list[Point]:
    """In each round a job of every topology, size and M in turn; the first round does not count."""
    spark = session()
    places = [(size, replicas) for size, counts in sizes.items() for replicas in counts]
    seconds: dict[tuple[str, int, float], list[tuple[float, float]]] = {}
    try:
        for number in range(rounds + 1):
            for size, replicas in places:
                for name, topology in topologies(replicas).items():
                    found = one_job(spark, topology, elements(size))
                    if number:
                        seconds.setdefault((name, replicas, size), []).append(found)
            print(f"round {number} of {rounds}", flush=True)
    finally:
        spark.stop()
    return [
        Point(
            *key,
            topologies(key[1])[key[0]].count(elements(key[2])),
            *(statistics.median(values) for values in zip(*found, strict=True)),
        )
        for key, found in seconds.items()
    ]


def one_job(spark: Any, topology: Topology, length: int) -> tuple[float, float]:
    """Seconds of processor time and of the clock; the sum is checked."""
    rdd = job(spark.sparkContext, topology, length)
    spent, started = processor_seconds(), time.perf_counter()
    frames = RunningJob(rdd, topology.up[-1].receivers).frames()
    seconds = time.perf_counter() - started
    spent = processor_seconds() - spent
    forget_shuffles(rdd)
    total = sum(float(np.frombuffer(frame)[0]) for frame in frames)
    assert abs(total / expected(topology, length) - 1) < 1e-9
    return spent, seconds


def on_a_cluster(constants: dict[str, float], counts: Counts, gbit: float) -> float:
    """Seconds, if each node has one replica and one core."""
    fixed, stage, task, message, megabyte = constants.values()
    return (
        fixed
        + counts.stages * (stage + max(0.0, task - DRIVER))
        + counts.tasks * DRIVER
        + counts.most_messages * message
        + counts.most_bytes / 1e6 * (megabyte + 8e-3 / gbit)
    )


def count_table(all_of: Iterable[int]) -> str:
    rows = []
    for replicas in all_of:
        for name, topology in topologies(replicas).items():
            counts, nbytes = topology.count(1 << 20), 4 << 20
            rows.append(
                (
                    *(replicas, name, counts.stages, counts.tasks, counts.messages),
                    *(counts.most_messages, counts.nbytes / nbytes, counts.most_bytes / nbytes),
                )
            )
    head = ("M", "", "stages", "tasks", "messages", "of a node", "P sent in all", "of a node")
    return markdown(head, rows)


def time_table(points: Sequence[Point], guess: Fit) -> str:
    """Milliseconds of processor time, and in brackets the formula's and those of the clock."""
    names = list(dict.fromkeys(point.topology for point in points))
    rows = []
    for size, replicas in dict.fromkeys((point.size, point.replicas) for point in points):
        some = [p for p in points if (p.size, p.replicas) == (size, replicas)]
        cells = [f"{1e3 * p.seconds:.0f} ({1e3 * guess(p):.0f}; {1e3 * p.clock:.0f})" for p in some]
        ratios = [
            min(figure(p) for p in some if p.topology.startswith("tree"))
            / min(figure(p) for p in some if not p.topology.startswith("tree"))
            for figure in (lambda p: p.seconds, lambda p: p.clock)
        ]
        rows.append((f"{size:g}", replicas, *cells, *ratios))
    return markdown(("MB", "M", *names, "better tree / best other", "real"), rows)


def cluster_table(constants: dict[str, float]) -> str:
    rows = []
    for gbit in (1.0, 10.0):
        for size in (0.01, 0.1, 1.0, 10.0, 100.0):
            for replicas in (4, 16, 36, 64):
                length = elements(size)

                def seconds(topology: Topology, length: int = length, gbit: float = gbit) -> float:
                    return on_a_cluster(constants, topology.count(length), gbit)

                powers = [2**k for k in range(7) if 2**k < replicas]
                owners = {n: seconds(sliced(replicas, n)) for n in (*powers, replicas)}
                few = min(owners, key=owners.__getitem__)
                others = (owners[replicas], owners[1], seconds(tree(replicas)))
                ratios = [each / owners[few] for each in (*others, seconds(sliced_tree(replicas)))]
                rows.append((gbit, f"{size:g}", replicas, few, 1e3 * owners[few], *ratios))
    head = ("Gbit/s", "MB", "M", "best N", "its ms", "N = M", "N = 1", "tree", "tree, N = M")
    return markdown(head, rows)


def draw(points: Sequence[Point], guess: Fit, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(point.size for point in points))
    figure, panels = pyplot.subplots(
        1, len(sizes), figsize=(4 * len(sizes), 4), layout="constrained", squeeze=False
    )
    for size, axes in zip(sizes, panels[0], strict=True):
        some = [point for point in points if point.size == size]
        counts = [m * m for m in range(2, 9) if m * m <= max(p.replicas for p in some)]
        for name in topologies(4):
            mine = [p for p in some if p.topology == name]
            (dots,) = axes.plot(
                [p.replicas for p in mine], [1e3 * p.seconds for p in mine], "o", label=name
            )
            line = [Point(name, m, size, topologies(m)[name].count(elements(size))) for m in counts]
            formula = [1e3 * guess(point) for point in line]
            axes.plot(counts, formula, color=dots.get_color(), linewidth=1.2)
        axes.set(title=f"{size:g} MB", xlabel="replicas (M)", xscale="log", yscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        low, high = axes.get_ylim()
        ticks = [lead * 10**power for power in range(6) for lead in (1, 2, 5)]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(low, high)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("processor ms: dots measured, lines by the formula")
    panels[0][0].legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", help="where to draw measurement and formula")
    given = parser.parse_args()
    sizes = {0.01: (4, 16), 1.0: (4,)} if given.quick else SIZES
    print(hardware(), "\n", flush=True)
    points = in_fresh_process(measured, sizes, 2 if given.quick else given.rounds)
    guess = fit(points, TERMS)
    print(f"\n{count_table((16, 64))}\n\n{time_table(points, guess)}\n")
    print(markdown(("", "ms"), [(name, 1e3 * value) for name, value in guess.constants.items()]))
    print(f"\nMean error of the formula: {error(guess, points):.0%}.\n\n{hardware()}\n")
    print(cluster_table(guess.constants))
    if given.plot:
        draw(points, guess, given.plot)
    write_json(given.json, {"points": points, "constants": guess.constants})


if __name__ == "__main__":
    main()

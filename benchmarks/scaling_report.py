"""The tables of ``scaling.py``."""

from __future__ import annotations

from typing import Any

from cost_model import SQUARE, TERMS, Fit, Point, slope
from harness import markdown
from usage import COMPILERS, EXECUTOR, KINDS

Row = dict[str, Any]

GBIT = 10.0
NODES = (16, 32, 64, 96, 128, 256, 512, 1024)
PARAMETERS = 28.0
"""MB: about 7 M parameters, as Inception-v1 has."""


def held_out(point: Point) -> bool:
    """Every second size of the tiny model, the largest apart, and the middle one of the large."""
    if point.size < 1:
        return point.replicas in (4, 32, 128)
    return point.size == 16


def points(found: list[Row], fits: list[Fit]) -> str:
    """Measured, and what each formula says."""
    head = (
        "M, N, P in MB, overhead ms, formula, off, with M N, off,, driver Python CPU ms, JVM CPU ms, "
        "compilers ms, set-up s"
    )
    rows = []
    for row in found:
        point = row["point"]
        told = [(guess(point), guess(point) / point.seconds - 1) for guess in fits]
        rows.append(
            (
                *(point.replicas, point.slices, point.size, point.seconds * 1e3),
                *(value for guess, off in told for value in (guess * 1e3, f"{off:+.0%}")),
                "held out" if held_out(point) else "",
                *(row[kind] * 1e3 for kind in (*KINDS[:2], COMPILERS)),
                row["set-up, s"],
            )
        )
    return markdown([title.strip() for title in head.split(",")], rows)


def constants(fits: list[Fit]) -> str:
    """Of each formula; one that lacks a term has a dash."""
    rows = [
        (name, *(found.constants.get(name, float("nan")) * 1e3 for found in fits))
        for name in TERMS | SQUARE
    ]
    return markdown(("constant, ms", "formula", "with M N"), rows)


def processor(apart: list[Row]) -> str:
    kinds = (KINDS[0], KINDS[1], EXECUTOR, KINDS[2], COMPILERS)
    rows = [(row["point"].replicas, *(row[kind] * 1e3 for kind in kinds)) for row in apart]
    return markdown(("M = N", *kinds), rows)


def memory(found: list[Row]) -> str:
    """What each partition adds, from the fits of the tiny model."""
    tiny = [row for row in found if row["point"].size < 1]
    names = {
        "heap": "heap in use of the JVM (driver and executor)",
        "slabs": "slabs",
        "Python": "driver, Python (private)",
    }
    rows = []
    for key, name in names.items():
        fixed, each = slope([(row["point"].replicas, row[key]) for row in tiny])
        rows.append((name, fixed / 1e6, each / 1e3, tiny[-1][key] / 1e6))
    most = f"at {tiny[-1]['point'].replicas} partitions, MB"
    return markdown(("memory", "fixed, MB", "each partition, KB", most), rows)


def assumed(computing: float) -> str:
    """What the next table takes for granted."""
    return (
        f"Clusters, P = {PARAMETERS:g} MB. Assumed: one replica and one slice a node, on a slot of "
        f"its own; a batch that grows with the nodes and computes for {computing:g} s, no stragglers; "
        "the fixed part is that of M = N = 2 here, less the driver's; the driver's processor time for "
        "a pair of tasks is the same for each node, and nothing hides it; an owner reads one block of "
        f"each replica; each node sends P and receives P twice, at {GBIT:g} Gbit/s each way, and no "
        "switch is the limit. Nothing of this was run on a cluster."
    )


def clusters(guess: Fit, driver: float, computing: float) -> str:
    """Overhead by nodes in ms, and throughput against the fewest nodes."""
    fixed = max(0.0, guess(Point(2, 2, 0.0)) - 2 * driver)
    _, _, replica, owner, *more = guess.constants.values()
    block = max(0.0, *more, 0.0)
    network = 2 * PARAMETERS * 8e-3 / GBIT

    def overhead(nodes: int) -> tuple[float, float, float]:
        blocks = block * 2 * nodes  # the constant is for two slots that share N owners
        moved = max(0.0, (replica + owner / nodes) * PARAMETERS)
        return fixed, driver * nodes, blocks + moved + network

    least = computing + sum(overhead(NODES[0]))
    rows = []
    for nodes in NODES:
        parts = overhead(nodes)
        whole = computing + sum(parts)
        rows.append(
            (
                *(nodes, *(part * 1e3 for part in parts), sum(parts) * 1e3),
                *(f"{part / computing:.1%}" for part in parts[1:]),
                nodes / NODES[0] * least / whole,
                f"{least / whole:.0%}",
            )
        )
    head = (
        "nodes, fixed ms, driver ms, blocks and parameters ms, together ms, driver / computing, "
        f"synchronization / computing, times {NODES[0]} nodes, efficiency"
    )
    return markdown([title.strip() for title in head.split(",")], rows)

"""How large bytes come from the slabs of nodes into this process: see [Note: large bytes] in
:mod:`sparkdl.slab.parts`.

Slabs of this process's own node are mapped and read, with neither a job nor the JVM; those of other
nodes come part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from pyspark import SparkContext

from sparkdl.errors import StaleReferenceError
from sparkdl.slab.pool import Reference, open_pool
from sparkdl.slab.root import SlabConfig, open_root

AT_ONCE_BYTES = 32 << 20
"""The parts that come at once take so much together, whatever Spark lets through."""
LEAST_BYTES = 16 << 10

ReadParts = Callable[[Mapping[int, Reference]], Sequence[bytes]]
"""Gives the bytes of some owners' references, by number, in the order of the numbers."""
Wanted = tuple[int, Reference, np.ndarray]
"""Of an owner, by its number: what to read, and where to write it (as many bytes, uint8)."""


def not_here(slab: SlabConfig, wanted: Sequence[Wanted]) -> list[Wanted]:
    """What is not in slabs of this node; all else has been brought."""
    return [each for each in wanted if not _read_here(slab, each)]


def bring(far: Sequence[Wanted], read: ReadParts, at_once: int) -> None:
    """Bring what is wanted of other nodes, ``at_once`` bytes at a time."""
    queues: dict[int, list[tuple[Reference, np.ndarray]]] = {}
    for number, reference, into in far:
        queues.setdefault(number, []).append((reference, into))
    while queues:
        size = max(LEAST_BYTES, at_once // len(queues))
        some = sorted(queues)[: max(1, at_once // size)]
        parts = {number: queues[number][0] for number in some}
        asked = {n: ref.part(0, min(size, ref.nbytes)) for n, (ref, _) in parts.items()}
        for number, data in zip(some, read(asked), strict=True):
            reference, into = queues[number].pop(0)
            into[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            left = reference.nbytes - len(data)
            if left:
                rest = reference.part(len(data), left), into[len(data) :]
                queues[number].insert(0, rest)
            elif not queues[number]:
                del queues[number]


def most_at_once(context: SparkContext) -> int:
    """How many bytes of results a job may have: half of what Spark lets through, and no more than
    :data:`AT_ONCE_BYTES`."""
    conf = context._jsc.sc().conf()  # type: ignore[union-attr]
    limit = conf.getSizeAsBytes("spark.driver.maxResultSize", "1g")
    return min(AT_ONCE_BYTES, limit // 2) if limit > 0 else AT_ONCE_BYTES


def _read_here(slab: SlabConfig, wanted: Wanted) -> bool:
    """Read it where it lies; False where that is not on this node, or there no more: who is asked for
    it then says what is wrong."""
    _, reference, into = wanted
    try:
        root = open_root(slab)
        if root is None or root.token != reference.token:
            return False
        pool = open_pool(slab)
        into[:] = pool.read(reference)
        pool.check(reference)
    except (OSError, StaleReferenceError):
        return False
    return True

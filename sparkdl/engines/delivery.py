"""The transfer of large byte ranges from slabs to the driver.

See [Note: large bytes] in :mod:`sparkdl.slab.pool` for the reasons.
Slabs on the driver's own node are mapped and read, which takes neither a Spark job nor the JVM.
Bytes from other nodes come in parts.

The validation samples of a fit, and how an engine scores them; and all else that it is built from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark import SparkContext
from torch import nn

from sparkdl.consistency.base import Consistency
from sparkdl.data.batches import BatchSpec
from sparkdl.data.samples import SampleSet
from sparkdl.engines.resources import FitResources
from sparkdl.errors import StaleReferenceError
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.flat import Layout
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.base import ParallelStrategy
from sparkdl.replica.compare import Description
from sparkdl.replica.iteration import Decisions
from sparkdl.replica.run import RunSpec
from sparkdl.settings import Settings
from sparkdl.slab.pool import Reference, open_pool
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.spark.frames import is_local

AT_ONCE_BYTES = 32 << 20
"""The largest total size of the parts fetched at once, even if Spark allows larger results."""
LEAST_BYTES = 16 << 10

ReadParts = Callable[[Mapping[int, Reference]], Sequence[bytes]]
"""A function that returns the bytes of references (by owner number), in order of the numbers."""
Wanted = tuple[int, Reference, np.ndarray]
"""A read from one owner: the owner's number, the reference, and the destination (uint8, same size)."""


def raise_first(results: Iterable[Any]) -> None:
    """Raise the first exception among results."""
    for result in results:
        if isinstance(result, Exception):
            raise result


def not_here(slab: SlabConfig, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Read what lies in slabs of this node, and return the entries that do not."""
    return [each for each in wanted if not _read_here(slab, each)]


def bring(far: Sequence[Wanted], read: ReadParts, at_once: int) -> None:
    """Fetch the entries in ``far`` from other nodes, about ``at_once`` bytes at a time."""
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
    """Return how many bytes of results a job may produce.

    This is half of Spark's limit, and at most :data:`AT_ONCE_BYTES`.
    """
    conf = context._jsc.sc().conf()  # type: ignore[union-attr]
    limit = conf.getSizeAsBytes("spark.driver.maxResultSize", "1g")
    return min(AT_ONCE_BYTES, limit // 2) if limit > 0 else AT_ONCE_BYTES


def _read_here(slab: SlabConfig, wanted: Wanted) -> bool:
    """Read one entry from this node's slabs, and return whether that worked.

    It does not if the bytes are on another node or were overwritten. In the second case, the owner
    reports the error when it is read from next.
    """
    _, reference, into = wanted
    try:
        root = open_root(slab)
        if root is None or root.node_id != reference.node_id:
            return False
        pool = open_pool(slab)
        into[:] = pool.read(reference)
        pool.check(reference)
    except (OSError, StaleReferenceError):
        return False
    return True


@dataclass(frozen=True)
class ValidationSet:
    """The validation samples in slabs, with all that an engine needs to score them."""

    samples: SampleSet
    scorer: Scorer
    batch_spec: BatchSpec
    batch_size: int  # rows of one replica's forward pass


@dataclass(frozen=True, kw_only=True)
class EngineInputs:
    """The inputs that a fit prepares for building an engine."""

    run: RunSpec
    samples: SampleSet
    validation: ValidationSet | None
    recipe: Recipe
    payload: bytes
    module: nn.Module
    layout: Layout
    built: Description
    batch_size: int  # rows of an iteration, local steps included
    consistency: Consistency
    recorded: Mapping[int, Decisions] | None  # to repeat, by number of the iteration
    sums: bool
    resources: FitResources | None  # None inside a gang that one of its ranks leads
    settings: Settings
    strategies: Mapping[str, ParallelStrategy]
    mesh: Mapping[str, int] | None
    resource_profile: Any
    min_ranks: int | None  # the fewest tasks of a gang; None: one per rank
    gang: StartableGroup | None = None

    @property
    def spark(self) -> FitResources:
        """Return the resources of a fit in Spark."""
        assert self.resources is not None
        return self.resources

    @property
    def snapshot_seconds(self) -> float | None:
        """Return the seconds between snapshots; None if there are to be none.

        In local mode no executor can be lost, and in a gang that a rank leads a lost rank ends all of
        them. In a replay a snapshot would end versions that the history has read.
        """
        if self.resources is None or self.recorded is not None or is_local(self.resources.context):
            return None
        return self.settings.snapshot_seconds

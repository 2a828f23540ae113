"""The start of the ranks of a gang, on the nodes that have their samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import RDD
from pyspark.resource import ResourceProfile

from sparkdl.data.fields import SampleHandle
from sparkdl.data.samples import deleted_without_end
from sparkdl.engines.gang.rank import CallMethod, InitRank, frames_of
from sparkdl.engines.gang.rank_messages import RankConfig, RankStatus
from sparkdl.engines.resources import (
    MAX_SUBMISSIONS,
    FitResources,
    samples_changed,
    write_again,
)
from sparkdl.errors import UserError
from sparkdl.gang.driver import Gang
from sparkdl.gang.oversubscribe import Oversubscription
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.replica.compare import check_same
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.spark.frames import zip_frames

DOING = "setting up the ranks"


def start_ranks(
    gang: StartableGroup,
    setup: RankConfig,
    recipe: bytes,
    place_again: Callable[[int], None],
) -> tuple[str, ...]:
    """Start the ranks, let each build what it holds, and check that they can train together."""
    for _ in range(MAX_SUBMISSIONS):
        gang.start()
        setup.recipe.bring(gang, recipe)
        told = gang.call(InitRank(setup), DOING)
        raise_first([each for each in told if isinstance(each, UserError)])
        found: list[RankStatus] = told
        if all(all(standing.here) for standing in found):
            break
        gang.close()
        for number in range(len(found[0].here)):
            if not all(standing.here[number] for standing in found):
                place_again(number)
    else:
        raise deleted_without_end(DOING, setup.run.slab)
    check_same([standing.compared for standing in found])
    for rank, standing in enumerate(found):
        if not standing.unchanged:
            raise samples_changed(DOING, rank)
    locations = tuple(standing.samples for standing in found)
    # only the ranks of a split model read the rows of other ranks
    theirs = locations if setup.parallel.splits_model else ()
    raise_first(gang.call(CallMethod("begin", (theirs,)), DOING))
    setup.recipe.remove(gang)
    return tuple(each.node_id for each in locations)


def gang_of_rdds(
    resources: FitResources,
    name: str,
    samples: Sequence[RDD],
    timeout: float | None,
    profile: ResourceProfile | None = None,
    min_ranks: int | None = None,
) -> tuple[Gang, Callable[[int], None]]:
    """Return a gang for the partitions of samples, and what places these again.

    ``min_ranks`` is the smallest number of task slots that is enough; None: one for each rank.
    """
    frames = samples[0] if len(samples) == 1 else zip_frames(*samples)
    hosting = None
    if min_ranks is not None:
        hosting = Oversubscription(min_ranks, node_of, NodeHere(resources.slab))
    gang = Gang(resources.context, frames, name, timeout=timeout, profile=profile, hosting=hosting)
    resources.closing(gang)
    return gang, lambda number: write_again(samples[number], resources.slab)


def node_of(records: list[Any]) -> str:
    """Return the id of the node that has a partition's samples, or "" if the partition is empty.

    Training samples take precedence over validation samples.
    """
    handles: list[SampleHandle] = [pickle.loads(frame) for frame in frames_of(records)]
    return next((handle.node_id for handle in handles if handle.num_rows), "")


@dataclass(frozen=True)
class NodeHere:
    """A callable that returns the id of the node on which it is called."""

    slab: SlabConfig

    def __call__(self) -> str:
        root = open_root(self.slab, create=True)
        assert root is not None
        return root.node_id


def too_few(slots: int, ranks: int) -> str:
    """Return the message that there are fewer task slots than ranks."""
    return f"{slots} task slot{'s' * (slots > 1)} now do{'es' * (slots == 1)} the work of {ranks} ranks"


def raise_first(results: Sequence[Exception | None]) -> None:
    """Raise the first exception among the ranks' results."""
    for problem in results:
        if problem is not None:
            raise problem

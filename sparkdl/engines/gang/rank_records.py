"""What the driver and the ranks of a gang tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.data.batches import Batch
from sparkdl.data.fields import SampleHandle
from sparkdl.engines.gang.recipe_files import RecipeSource
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compare import Compared, Description
from sparkdl.replica.iteration import ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec


@dataclass(frozen=True)
class RankConfig:
    """What a rank begins with. ``recipe``: where it is. ``built``: what the driver has made of it.
    ``spare``: a few rows of the data, for a rank that has none in an iteration. ``checksums``: of the
    partitions of training samples. ``weighted_batches``: whether a mini-batch may count for
    something else than its rows, so that ranks have to tell. ``sums``: whether the loss returns
    ``(sum, count)``."""

    run: RunSpec
    recipe: RecipeSource
    built: Description
    spare: Batch
    checksums: tuple[int, ...]
    parallel: ParallelPlan
    weighted_batches: bool
    sums: bool


@dataclass(frozen=True)
class SampleLocation:
    """Where a rank's training samples are: the token of its node, and what is known of them."""

    token: str
    handle: SampleHandle


@dataclass(frozen=True)
class RankStatus:
    """What a rank finds where it is: its samples, how its model compares with the driver's, which
    of its partitions are on the node, and whether the training rows are those of before."""

    samples: SampleLocation
    compared: Compared
    here: tuple[bool, ...]
    unchanged: bool


@dataclass(frozen=True)
class RankReport:
    """What a rank did in an iteration; ``slices``: of those it answers for, where they have more to
    tell than that they were updated. ``writing``: whether something is still done in the background.
    ``loss_rank``: the rank whose report has the loss."""

    report: ReplicaReport
    slices: list[SliceReport]
    writing: bool
    loss_rank: int

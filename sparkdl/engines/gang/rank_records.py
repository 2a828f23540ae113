"""What the driver and the ranks of a gang tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.data.batches import Batch
from sparkdl.data.fields import SampleHandle
from sparkdl.engines.gang.recipe_files import RecipeSource
from sparkdl.parallel.plan import Parallel
from sparkdl.replica.compare import Compared, Description
from sparkdl.replica.iteration import ReplicaReport, SliceReport
from sparkdl.replica.run import Run


@dataclass(frozen=True)
class Setup:
    """What a rank begins with. ``recipe``: where it is. ``built``: what the driver has made of it.
    ``spare``: a few rows of the data, for a rank that has none in an iteration. ``checksums``: of the
    partitions of training samples. ``weighs``: whether a mini-batch may count for something else than
    its rows, so that ranks have to tell. ``sums``: whether the loss returns ``(sum, count)``."""

    run: Run
    recipe: RecipeSource
    built: Description
    spare: Batch
    checksums: tuple[int, ...]
    parallel: Parallel
    weighs: bool
    sums: bool


@dataclass(frozen=True)
class Samples:
    """Where a rank's training samples are: the token of its node, and what is known of them."""

    token: str
    handle: SampleHandle


@dataclass(frozen=True)
class Standing:
    """What a rank finds where it is: its samples, how its model compares with the driver's, which
    of its partitions are on the node, and whether the training rows are those of before."""

    samples: Samples
    compared: Compared
    here: tuple[bool, ...]
    unchanged: bool


@dataclass(frozen=True)
class RankStep:
    """What a rank did in an iteration; ``slices``: of those it answers for, where they have more to
    tell than that they were updated. ``writing``: whether something is still done in the background.
    ``teller``: the rank whose report has the loss."""

    report: ReplicaReport
    slices: list[SliceReport]
    writing: bool
    teller: int

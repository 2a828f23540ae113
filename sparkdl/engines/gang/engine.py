"""The gang engine: all ranks run at once, joined by ``torch.distributed`` and directed by the driver.

The ranks hold the model and its state in memory during the whole fit. An iteration is one message
to each rank and one report from it, without a Spark job. Between iterations the loop does the same
as with the other engines.
"""

from __future__ import annotations

import math
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pyspark.core.rdd import RDD
from pyspark.resource import ResourceProfile

from sparkdl.codec.packed import ByParameter
from sparkdl.data.batches import Batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.fields import SampleHandle
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import AT_ONCE_BYTES, Wanted, bring, not_here
from sparkdl.engines.gang.background import BackgroundResult
from sparkdl.engines.gang.in_flight import InFlight
from sparkdl.engines.gang.rank import CallMethod, InitRank, frames_of
from sparkdl.engines.gang.rank_messages import RankConfig, RankReport, RankStatus
from sparkdl.engines.gang.recipe_files import RecipeSource
from sparkdl.engines.resources import MAX_SUBMISSIONS, FitResources, compute_again, samples_changed
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.errors import StalledError, StateLostError, TrainingError, UserError
from sparkdl.gang.driver import Gang
from sparkdl.gang.oversubscribe import Oversubscription
from sparkdl.loop.engine import (
    CURRENT,
    IterationResult,
    ReadResiduals,
    ReadState,
    StateWork,
    StateWorkResult,
    slowest,
    summarize,
)
from sparkdl.model.flat import Layout
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compare import Description, check_same
from sparkdl.replica.iteration import Iteration, IterationRows, ReplicaReport
from sparkdl.replica.run import RunSpec
from sparkdl.slab.parts import Left
from sparkdl.slab.pool import Reference
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.spark.frames import zip_frames


@dataclass(frozen=True)
class NodeFiles:
    """A snapshot: files that the first rank of each node has written there.

    Attributes:
        name: The name of the snapshot, which is part of the file names.
        holders: The first rank of each node.
    """

    name: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class InBackground:
    """Work that the ranks of ``engine`` do in the background.

    Implements :class:`sparkdl.loop.engine.PendingStateWork`.
    """

    engine: GangEngine
    name: str
    count: int

    @property
    def ready(self) -> bool:
        return not self.engine.writing

    def used(self) -> StateWorkResult | None:
        return self.engine.collect(self.name, self.count)


class GangEngine:
    """The engine that trains on a gang of ranks. See the note in :mod:`sparkdl.engines.gang.rank`."""

    begins_ahead = True

    def __init__(
        self,
        samples: SampleSet,
        validation: ValidationSet | None,
        layout: Layout,
        run: RunSpec,
        recipe: bytes,
        built: Description,
        spare: Batch,
        batch_size: int,
        resources: FitResources,
        timeout: float | None,
        parallel: ParallelPlan,
        weighted_batches: bool,
        sums: bool,
        profile: ResourceProfile | None = None,
        min_ranks: int | None = None,
    ) -> None:
        """Create the engine without starting the ranks.

        Args:
            spare: See :class:`sparkdl.engines.gang.rank_messages.RankConfig`.
            weighted_batches: See :class:`sparkdl.engines.gang.rank_messages.RankConfig`.
            sums: See :class:`sparkdl.engines.gang.rank_messages.RankConfig`.
            min_ranks: The smallest number of task slots that is enough. None means one for each rank.
        """
        self.plan = EpochPlan(samples.counts, batch_size)
        self._layout, self._run, self._validation = layout, run, validation
        assert samples.rdd is not None
        self._samples: list[RDD] = [samples.rdd]
        if validation is not None:
            assert validation.samples.rdd is not None
            self._samples.append(validation.samples.rdd)
        checksums = tuple(handle.checksum for handle in samples.handles)
        self._recipe, source = recipe, RecipeSource.of(run.slab, recipe)
        self._setup = RankConfig(
            run, source, built, spare, checksums, parallel, weighted_batches, sums
        )
        self._tokens: tuple[str, ...] = ()
        self._writing = False
        self._times_left = 0  # the number of requests whose results may have been left in slabs
        frames = self._samples[0]
        if validation is not None:
            frames = zip_frames(frames, self._samples[1])
        name = f"{run.slab.name}-gang"
        hosting = None
        if min_ranks is not None:
            hosting = Oversubscription(min_ranks, node_of, NodeHere(run.slab))
        self._gang = Gang(
            resources.context, frames, name, timeout=timeout, profile=profile, hosting=hosting
        )
        self._asked = InFlight(self._gang, self._step)
        resources.closing(self._gang)

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """See :class:`sparkdl.loop.engine.Engine`."""
        if read is None and which == CURRENT:
            self._gang.leave()  # ranks that have trained no longer have the recipe's weights
        self._ready()
        results = self._call("setting up the ranks", "read", read, reported, which)
        _raise_first(results)
        self._call("setting up the ranks", "place")

    def _ready(self) -> None:
        """Start the gang, if it is not running, on the nodes that have its samples."""
        if self._gang.running:
            return
        self._asked.forget()
        for _ in range(MAX_SUBMISSIONS):
            self._gang.start()
            self._setup.recipe.bring(self._gang, self._recipe)
            told = self._gang.call(InitRank(self._setup), "setting up the ranks")
            _raise_first([each for each in told if isinstance(each, UserError)])
            found: list[RankStatus] = told
            if all(all(standing.here) for standing in found):
                break
            self._gang.close()
            for number, rdd in enumerate(self._samples):
                if not all(standing.here[number] for standing in found):
                    compute_again(rdd)
        else:
            raise TrainingError(
                f"setting up the ranks: after {MAX_SUBMISSIONS} times some still find themselves on "
                "other nodes than their samples."
            )
        check_same([standing.compared for standing in found])
        for rank, standing in enumerate(found):
            if not standing.unchanged:
                raise samples_changed("setting up the ranks", rank)
        samples = tuple(standing.samples for standing in found)
        self._tokens = tuple(each.token for each in samples)
        # only the ranks of a split model read the rows of other ranks
        theirs = samples if self._setup.parallel.splits_model else ()
        _raise_first(self._call("setting up the ranks", "begin", theirs))
        self._setup.recipe.remove(self._gang)

    @property
    def capacity_note(self) -> str:
        """See :class:`sparkdl.engines.recovery.RestorableEngine`."""
        gang = self._gang
        return too_few(gang.tasks, gang.size) if gang.tasks < gang.size else ""

    def _call(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        self._asked.settle()
        return self._gang.call(CallMethod(method, arguments), doing)

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Run an iteration with one message to every rank and one report from it.

        The iterations in ``then`` are sent with it, so that the ranks go on without waiting for the
        driver.
        """
        self._asked.ask([iteration, *then])
        answer = self._asked.answer(iteration)
        done = answer.results
        self._writing = any(one.writing for one in done)
        reports = [_told(one, done) for one in done]
        slices = sorted((s for one in done for s in one.slices), key=lambda s: s.index)
        seconds = slowest([report.seconds for report in reports])
        working = max(sum(report.seconds.values()) for report in reports)
        schedule = max(0.0, answer.seconds - working)
        seconds = {"schedule": schedule, **seconds, "iteration": answer.seconds}
        taking_part = [report for report in reports if report.count or report.not_finite]
        result = summarize(taking_part, slices, self._layout, seconds)
        return replace(result, ended=answer.ended)

    def _step(self, iteration: Iteration) -> IterationRows:
        return iteration.with_rows(self.plan.rows(iteration.batch))

    def score(self) -> list[Any]:
        """Score the validation samples, every rank its own partition."""
        validation = self._validation
        assert validation is not None
        how = (validation.scorer, validation.assembly, validation.batch_size)
        found = self._call("validation", "score", *how)
        return validation.scorer.merge([states for states in found if states is not None])

    def keep_best(self) -> None:
        """Keep a copy of the current weights on the ranks."""
        self._call("keeping the best weights", "keep_best")

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """Return the weights, read from the ranks that answer for the slices."""
        doing = "reading the weights"
        found = self._ask_for_large(doing, "weights", which)
        sizes = [one.reference.nbytes if isinstance(one, Left) else one.nbytes for one in found]
        flat = np.empty(sum(sizes), dtype=np.uint8)
        wanted: list[Wanted] = []
        for n, place in enumerate(np.split(flat, np.cumsum(sizes)[:-1])):
            if isinstance(found[n], Left):
                wanted.append((n, found[n].reference, place))
            else:
                place[:] = found[n].view(np.uint8)
        self._bring(doing, wanted)
        return torch.from_numpy(flat).view(self._layout.dtype)

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Call ``use`` for every slice, on the rank that answers for it, and return the results."""
        doing = "reading the state"
        results = self._ask_for_large(doing, "map_slices", use, which)
        for n, result in enumerate(results):
            if isinstance(result, Left):
                data = np.empty(result.reference.nbytes, dtype=np.uint8)
                self._bring(doing, [(n, result.reference, data)])
                results[n] = data.tobytes()
        return results

    def _of_slices(self, results: Sequence[Mapping[int, Any]]) -> list[Any]:
        found = {n: result for some in results for n, result in some.items()}
        return [found[n] for n in range(self._run.slices)]

    def _ask_for_large(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Return a method's results in the order of the slices.

        The ranks leave large results in slabs.
        """
        self._times_left += 1
        return self._of_slices(self._call(doing, method, *arguments, self._times_left))

    def _bring(self, doing: str, wanted: Sequence[Wanted]) -> None:
        """Fetch the results that ranks have left in slabs."""

        def read(parts: Mapping[int, Reference]) -> list[bytes]:
            told = self._call(doing, "read_parts", parts)
            return [some[n] for n in sorted(parts) for some in told if n in some]

        bring(not_here(self._run.slab, wanted), read, AT_ONCE_BYTES)

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """Load the compression residuals, every rank its own."""
        self._ready()
        results = self._call("setting up the ranks", "load_residuals", read, reported)
        _raise_first(results)

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Call ``use`` for the residuals of every rank, on that rank, and return the results."""
        found = self._call("reading what the ranks keep", "map_residuals", use)
        return [result for results in found for result in results]

    def in_background(self, uses: StateWork) -> InBackground:
        """Start ``uses`` on the ranks, with copies of the current state."""
        name = secrets.token_hex(8)
        self._call("copying the state", "begin_background", name, uses)
        self._writing = True
        return InBackground(self, name, len(uses.states))

    @property
    def writing(self) -> bool:
        """Return whether a rank was busy in the background at its last report."""
        return self._writing and self._gang.running

    def collect(self, name: str, count: int) -> StateWorkResult | None:
        """Wait for background work and return its results.

        See :meth:`sparkdl.loop.engine.PendingStateWork.used`.

        Args:
            name: The name of the work.
            count: The number of its uses of the state.
        """
        self._ready()
        found: list[BackgroundResult | None] = self._call("writing the state", "background", name)
        self._writing = False
        known = [results for results in found if results is not None]
        if len(known) < len(found):
            return None
        _raise_first([results.error for results in known])
        states = tuple(self._of_slices([r.states[k] for r in known]) for k in range(count))
        return StateWorkResult(states, [kept for results in known for kept in results.residuals])

    def take_snapshot(self) -> NodeFiles:
        """Write files on every node, which outlive ranks and executors.

        See :class:`sparkdl.engines.recovery.RestorableEngine`.
        """
        holders = tuple(self._tokens.index(token) for token in dict.fromkeys(self._tokens))
        files = NodeFiles(f"snapshot-{secrets.token_hex(8)}", holders)
        try:
            found = self._call("taking a snapshot", "snapshots.save", files.name, files.holders)
        except (StateLostError, StalledError):
            raise
        except TrainingError as error:  # it ended the ranks, so their state is lost
            raise StateLostError(str(error)) from error
        problem = next(filter(None, found), None)
        if problem is not None:
            self.drop(files)
            raise TrainingError(f"taking a snapshot: {problem}")
        return files

    def drop(self, snapshot: NodeFiles) -> None:
        if self._gang.running:
            self._call("taking a snapshot", "snapshots.drop", snapshot.name, snapshot.holders)

    def forget(self) -> None:
        self._gang.leave()
        self._asked.forget()

    def restore(self, snapshot: NodeFiles) -> None:
        self._ready()
        found: Sequence[list[bool]] = self._call(
            "restoring a snapshot", "snapshots.there", snapshot.name
        )
        sources = []
        for n in range(len(found[0])):
            having = [rank for rank, has in enumerate(found) if has[n]]
            if not having:
                raise StateLostError(f"restoring a snapshot: no node has part {n} of it.")
            sources.append(having[0])
        self._call("restoring a snapshot", "snapshots.load", snapshot.name, tuple(sources))


def node_of(records: list[Any]) -> str:
    """Return the token of the node that has a partition's samples, or "" if the partition is empty.

    Training samples take precedence over validation samples.
    """
    handles: list[SampleHandle] = [pickle.loads(frame) for frame in frames_of(records)]
    return next((handle.token for handle in handles if handle.num_rows), "")


@dataclass(frozen=True)
class NodeHere:
    """A callable that returns the token of the node on which it is called."""

    slab: SlabConfig

    def __call__(self) -> str:
        root = open_root(self.slab, create=True)
        assert root is not None
        return root.token


def too_few(slots: int, ranks: int) -> str:
    """Return the message that there are fewer task slots than ranks."""
    return f"{slots} task slot{'s' * (slots > 1)} now do{'es' * (slots == 1)} the work of {ranks} ranks"


def _told(one: RankReport, done: Sequence[RankReport]) -> ReplicaReport:
    """Return the report of ``one``, with the loss as the rank that knows it reports it."""
    report, loss_rank = one.report, one.loss_rank
    if loss_rank == report.replica or not report.count:
        return report
    loss, problem = done[loss_rank].report.loss, report.not_finite
    if not math.isfinite(loss):
        problem = f"the loss ({loss})"
    return replace(report, loss=loss, not_finite=problem)


def _raise_first(results: Sequence[Exception | None]) -> None:
    for problem in results:
        if problem is not None:
            raise problem

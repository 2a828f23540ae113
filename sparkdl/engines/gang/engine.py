"""The gang engine: all ranks run at once, joined by ``torch.distributed`` and directed by the driver.

The ranks hold the model and its state in memory during the whole fit. An iteration is one message
to each rank and one report from it, without a Spark job. Between iterations the loop does the same
as with the other engines.

Iterations that the ranks of a gang have been asked to run, some of them ahead of time.

The ranks' results about slices, which the driver brings together.

The start of the ranks of a gang, on the nodes that have their samples.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.batches import preview_batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.fields import SampleHandle
from sparkdl.data.ragged import Ragged
from sparkdl.data.samples import SampleSet, deleted_without_end
from sparkdl.engines.delivery import (
    AT_ONCE_BYTES,
    EngineInputs,
    Wanted,
    bring,
    not_here,
    raise_first,
)
from sparkdl.engines.gang.rank import CallMethod, frames_of, init_rank
from sparkdl.engines.gang.rank_messages import (
    RankConfig,
    RankReport,
    RankStatus,
    RecipeSource,
    node_id_of,
)
from sparkdl.engines.gang.snapshots import BackgroundResult, NodeFiles
from sparkdl.engines.resources import MAX_SUBMISSIONS, samples_changed, write_again
from sparkdl.errors import StalledError, StateLostError, TrainingError
from sparkdl.gang.driver import Gang
from sparkdl.gang.oversubscribe import Oversubscription
from sparkdl.gang.rank_group import RankGroup, StartableGroup
from sparkdl.gang.slots import too_few
from sparkdl.loop.advance import IterationResult, slowest, summarize
from sparkdl.loop.engine import CURRENT, ReadResiduals, ReadState, StateWork, StateWorkResult
from sparkdl.model.loss import ClassLoss, Loss
from sparkdl.parallel.plan import parallel_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compare import check_same
from sparkdl.replica.compute import to_tensors
from sparkdl.replica.iteration import Iteration, IterationRows
from sparkdl.slab.pool import Left, Reference
from sparkdl.slab.root import SlabConfig
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.spark.frames import zip_frames


class InFlight:
    """A queue of iterations whose reports have not been fetched, the oldest first."""

    def __init__(self, gang: RankGroup, step: Callable[[Iteration], IterationRows]) -> None:
        self._gang, self._step = gang, step
        self._waiting: deque[tuple[Iteration, float]] = deque()  # with when it was asked for
        self._reports: deque[tuple[list[RankReport], float]] = deque()  # of the first in the queue
        self._ended = 0.0

    def ask(self, iterations: Sequence[Iteration]) -> None:
        """Send the ranks those of ``iterations`` that they have not been sent yet."""
        last = self._waiting[-1][0].index if self._waiting else -1
        new = [each for each in iterations if each.index > last]
        if new:
            begun = time.monotonic()
            self._gang.send([CallMethod("run", (self._step(each),)) for each in new])
            self._waiting.extend((each, begun) for each in new)

    def answer(self, iteration: Iteration) -> tuple[list[RankReport], float, float]:
        """Wait for the reports of ``iteration``, which must be the oldest in the queue.

        Return these, the seconds that it took beyond those of earlier ones, and when it ended.
        """
        self.settle(1)
        (oldest, begun), (results, ended) = self._waiting.popleft(), self._reports.popleft()
        assert oldest.index == iteration.index
        before, self._ended = self._ended, max(ended, self._ended)
        return results, self._ended - max(begun, before), self._ended

    def settle(self, count: int | None = None) -> None:
        """Wait until the ranks have finished the first ``count`` iterations in the queue, or all."""
        for asked, _ in list(self._waiting)[len(self._reports) : count]:
            doing = f"iteration {asked.index + 1}, epoch {asked.epoch + 1}"
            self._reports.append(self._gang.answers(doing))

    def forget(self) -> None:
        """Clear the queue, because the ranks that were asked no longer exist."""
        self._waiting.clear()
        self._reports.clear()


class SliceResults:
    """Calls of the ranks' methods that have a result for each slice."""

    def __init__(self, call: Callable[..., list[Any]], slab: SlabConfig, slices: int) -> None:
        self._call, self._slab, self._slices = call, slab, slices
        self._times_left = 0  # the number of requests whose results may have been left in slabs

    def arrays(self, doing: str, method: str, *arguments: Any) -> np.ndarray:
        """Return the bytes of the arrays that the slices have as results, one after another."""
        found = self._ask(doing, method, *arguments)
        sizes = [one.reference.nbytes if isinstance(one, Left) else one.nbytes for one in found]
        flat = np.empty(sum(sizes), dtype=np.uint8)
        wanted: list[Wanted] = []
        for n, place in enumerate(np.split(flat, np.cumsum(sizes)[:-1])):
            if isinstance(found[n], Left):
                wanted.append((n, found[n].reference, place))
            else:
                place[:] = found[n].view(np.uint8)
        self._bring(doing, wanted)
        return flat

    def values(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Return the results in the order of the slices."""
        results = self._ask(doing, method, *arguments)
        for n, result in enumerate(results):
            if isinstance(result, Left):
                data = np.empty(result.reference.nbytes, dtype=np.uint8)
                self._bring(doing, [(n, result.reference, data)])
                results[n] = data.tobytes()
        return results

    def in_order(self, results: Sequence[Mapping[int, Any]]) -> list[Any]:
        """Return the results of all ranks, by slice, in the order of the slices."""
        found = {n: result for some in results for n, result in some.items()}
        return [found[n] for n in range(self._slices)]

    def _ask(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Return a method's results in the order of the slices. Large ones are left in slabs."""
        self._times_left += 1
        return self.in_order(self._call(doing, method, *arguments, self._times_left))

    def _bring(self, doing: str, wanted: Sequence[Wanted]) -> None:
        """Fetch the results that ranks have left in slabs."""

        def read(parts: Mapping[int, Reference]) -> list[bytes]:
            told = self._call(doing, "state.read_parts", parts)
            return [some[n] for n in sorted(parts) for some in told if n in some]

        bring(not_here(self._slab, wanted), read, AT_ONCE_BYTES)


DOING = "setting up the ranks"


def start_ranks(
    gang: StartableGroup, setup: RankConfig, recipe: bytes, place_again: Callable[[int], None]
) -> tuple[str, ...]:
    """Start the ranks, let each build what it holds, and check that they can train together."""
    for _ in range(MAX_SUBMISSIONS):
        gang.start()
        setup.recipe.bring(gang, recipe)
        told = gang.call(partial(init_rank, setup), DOING)
        raise_first(told)
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


def gang_of_rdds(inputs: EngineInputs) -> tuple[StartableGroup, Callable[[int], None]]:
    """Return a gang for the partitions of samples, and what places these again."""
    resources, fewest = inputs.spark, inputs.min_ranks
    sets = [inputs.samples, *([] if inputs.validation is None else [inputs.validation.samples])]
    samples = [each.rdd for each in sets if each.rdd is not None]
    frames = samples[0] if len(samples) == 1 else zip_frames(*samples)
    hosting = None
    if fewest is not None:
        hosting = Oversubscription(fewest, node_of, partial(node_id_of, resources.slab))
    gang = Gang(
        resources.context,
        frames,
        f"{inputs.run.slab.name}-gang",
        timeout=inputs.settings.timeout,
        profile=inputs.resource_profile,
        hosting=hosting,
    )
    resources.closing(gang)
    return gang, lambda number: write_again(samples[number], resources.slab)


def _stay(number: int) -> None:
    """Raise an error: a rank that has written its samples itself finds them."""
    raise StateLostError("the samples of a rank are no longer on its node.")


def _labels_differ(loss: Loss, samples: SampleSet) -> bool:
    """Return whether ``loss`` may weigh labels unequally, so that replicas' shares differ."""
    how = ClassLoss.of(loss)
    if how is None or not how.averages or samples.num_labels != 1:
        return False
    # For integers, the preview holds the smallest and the largest value of all samples.
    label = samples.preview[samples.num_features]
    if isinstance(label, Ragged) or label.ndim > 1 or how.weight is not None:
        return label.dtype.kind != "f"
    if label.dtype.kind == "i":
        return bool(label.min() <= how.ignored <= label.max())
    return label.dtype.kind == "u"


def node_of(records: list[Any]) -> str:
    """Return the id of the node that has a partition's samples, or "" if the partition is empty.

    Training samples take precedence over validation samples.
    """
    handles: list[SampleHandle] = [pickle.loads(frame) for frame in frames_of(records)]
    return next((handle.node_id for handle in handles if handle.num_rows), "")


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

    def __init__(self, inputs: EngineInputs) -> None:
        """Create the engine without starting the ranks.

        The record of a rank has the handle of its training samples or, with validation, a pair of
        handles. ``place_again`` has samples placed again that do not lie on the nodes of their
        ranks: 0 for those of the training, 1 for those of the validation.
        """
        run, samples, recipe = inputs.run, inputs.samples, inputs.recipe
        how = replace(run.batch_spec, augment=recipe.augment)
        with seeded(run.seed):
            spare = preview_batch(how, samples.preview, augment=True)
        parallel = parallel_of(inputs.strategies, inputs.mesh, run.replicas)
        parallel = parallel.planned(inputs.module, to_tensors(spare.inputs), recipe.options)
        self._gang, self._place_again = (
            (inputs.gang, _stay) if inputs.gang else gang_of_rdds(inputs)
        )
        self.plan = EpochPlan(samples.counts, inputs.batch_size)
        self._layout, self._validation, self._recipe = (
            inputs.layout,
            inputs.validation,
            inputs.payload,
        )
        self._setup = RankConfig(
            run,
            RecipeSource.of(run.slab, inputs.payload),
            inputs.built,
            spare,
            tuple(handle.checksum for handle in samples.handles),
            parallel,
            recipe.options.weighted or _labels_differ(recipe.loss, samples),
            inputs.sums,
        )
        self._node_ids: tuple[str, ...] = ()
        self._writing = False
        self._results = SliceResults(self._call, run.slab, run.slices)
        self._asked = InFlight(self._gang, self._step)

    @property
    def begins_ahead(self) -> bool:
        return self._gang.ahead

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        if read is None and which == CURRENT:
            self._gang.leave()  # ranks that have trained no longer have the recipe's weights
        self._ready()
        results = self._call("setting up the ranks", "state.read", read, which)
        raise_first(results)
        self._call("setting up the ranks", "state.place")

    def _ready(self) -> None:
        """Start the gang, if it is not running."""
        if not self._gang.running:
            self._asked.forget()
            self._node_ids = start_ranks(self._gang, self._setup, self._recipe, self._place_again)

    @property
    def capacity_note(self) -> str:
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
        done, taken, ended = self._asked.answer(iteration)
        self._writing = any(one.writing for one in done)
        reports = [one.with_loss(done) for one in done]
        slices = sorted((s for one in done for s in one.slices), key=lambda s: s.index)
        seconds = slowest([report.seconds for report in reports])
        working = max(sum(report.seconds.values()) for report in reports)
        seconds = {"schedule": max(0.0, taken - working), **seconds, "iteration": taken}
        taking_part = [report for report in reports if report.count or report.not_finite]
        result = summarize(taking_part, slices, self._layout, seconds)
        return replace(result, ended=ended)

    def _step(self, iteration: Iteration) -> IterationRows:
        return iteration.with_rows(self.plan.rows(iteration.batch))

    def score(self) -> list[Any]:
        """Score the validation samples, every rank its own partition."""
        validation = self._validation
        assert validation is not None
        how = (validation.scorer, validation.batch_spec, validation.batch_size)
        found = self._call("validation", "score", *how)
        return validation.scorer.merge([states for states in found if states is not None])

    def keep_best(self) -> None:
        """Keep a copy of the current weights on the ranks."""
        self._call("keeping the best weights", "state.keep_best")

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """Return the weights, read from the ranks that answer for the slices."""
        flat = self._results.arrays("reading the weights", "state.weights", which)
        return torch.from_numpy(flat).view(self._layout.dtype)

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Call ``use`` for every slice, on the rank that answers for it, and return the results."""
        return self._results.values("reading the state", "state.map_slices", use, which)

    def load_residuals(self, read: ReadResiduals) -> None:
        """Load the compression residuals, every rank its own."""
        self._ready()
        results = self._call("setting up the ranks", "state.load_residuals", read)
        raise_first(results)

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Call ``use`` for the residuals of every rank, on that rank, and return the results."""
        found = self._call("reading what the ranks keep", "state.map_residuals", use)
        return [result for results in found for result in results]

    def in_background(self, uses: StateWork) -> InBackground:
        """Start ``uses`` on the ranks, with copies of the current state."""
        name = secrets.token_hex(8)
        self._call("copying the state", "state.begin_background", name, uses)
        self._writing = True
        return InBackground(self, name, len(uses.states))

    @property
    def writing(self) -> bool:
        """Return whether a rank was busy in the background at its last report."""
        return self._writing and self._gang.running

    def collect(self, name: str, count: int) -> StateWorkResult | None:
        """Wait for background work and return its results.

        See :meth:`sparkdl.loop.engine.PendingStateWork.used`.
        """
        self._ready()
        found: list[BackgroundResult | None] = self._call(
            "writing the state", "state.background", name
        )
        self._writing = False
        known = [results for results in found if results is not None]
        if len(known) < len(found):
            return None
        raise_first([results.error for results in known])
        states = tuple(self._results.in_order([r.states[k] for r in known]) for k in range(count))
        return StateWorkResult(states, [kept for results in known for kept in results.residuals])

    def take_snapshot(self) -> NodeFiles:
        """Write files on every node, which outlive ranks and executors.

        See :class:`sparkdl.loop.engine.RestorableEngine`.
        """
        holders = tuple(self._node_ids.index(node_id) for node_id in dict.fromkeys(self._node_ids))
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

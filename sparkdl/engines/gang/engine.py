"""The gang engine: all ranks run at once, joined by ``torch.distributed`` and directed by the driver.

The ranks hold the model and its state in memory during the whole fit. An iteration is one message
to each rank and one report from it, without a Spark job. Between iterations the loop does the same
as with the other engines.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.batches import Batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.gang.background import BackgroundResult
from sparkdl.engines.gang.in_flight import InFlight
from sparkdl.engines.gang.rank import CallMethod
from sparkdl.engines.gang.rank_messages import RankConfig
from sparkdl.engines.gang.recipe_files import RecipeSource
from sparkdl.engines.gang.slice_results import SliceResults
from sparkdl.engines.gang.snapshots import NodeFiles
from sparkdl.engines.gang.start import raise_first, start_ranks, too_few
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.errors import StalledError, StateLostError, TrainingError
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.loop.engine import CURRENT, ReadResiduals, ReadState, StateWork, StateWorkResult
from sparkdl.loop.iteration_result import IterationResult, slowest, summarize
from sparkdl.model.layout import Layout
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.replica.compare import Description
from sparkdl.replica.iteration import Iteration, IterationRows
from sparkdl.replica.run import RunSpec
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState


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

    def __init__(
        self,
        gang: StartableGroup,
        place_again: Callable[[int], None],
        samples: SampleSet,
        validation: ValidationSet | None,
        layout: Layout,
        run: RunSpec,
        recipe: bytes,
        built: Description,
        spare: Batch,
        batch_size: int,
        parallel: ParallelPlan,
        weighted_batches: bool,
        sums: bool,
    ) -> None:
        """Create the engine without starting the ranks.

        The record of a rank has the handle of its training samples or, with validation, a pair of
        handles. ``place_again`` has samples placed again that do not lie on the nodes of their
        ranks: 0 for those of the training, 1 for those of the validation.
        """
        self.plan = EpochPlan(samples.counts, batch_size)
        self._layout, self._run, self._validation = layout, run, validation
        checksums = tuple(handle.checksum for handle in samples.handles)
        self._recipe, source = recipe, RecipeSource.of(run.slab, recipe)
        self._setup = RankConfig(
            run, source, built, spare, checksums, parallel, weighted_batches, sums
        )
        self._node_ids: tuple[str, ...] = ()
        self._writing = False
        self._results = SliceResults(self._call, run.slab, run.slices)
        self._gang, self._place_again = gang, place_again
        self._asked = InFlight(self._gang, self._step)

    @property
    def begins_ahead(self) -> bool:
        """See :class:`sparkdl.loop.engine.Engine`."""
        return self._gang.ahead

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
        results = self._call("setting up the ranks", "state.read", read, reported, which)
        raise_first(results)
        self._call("setting up the ranks", "state.place")

    def _ready(self) -> None:
        """Start the gang, if it is not running."""
        if not self._gang.running:
            self._asked.forget()
            self._node_ids = start_ranks(self._gang, self._setup, self._recipe, self._place_again)

    @property
    def capacity_note(self) -> str:
        """See :class:`sparkdl.loop.engine.RestorableEngine`."""
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
        reports = [one.with_loss(done) for one in done]
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

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """Load the compression residuals, every rank its own."""
        self._ready()
        results = self._call("setting up the ranks", "state.load_residuals", read, reported)
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

"""What a rank of the gang engine holds and does; every method is a command of the driver.

[Note: the gang's iteration] Each rank goes forward and backward over its rows, and torch's
DistributedDataParallel (Li et al., 2020) sums the gradients, bucket by bucket while backward goes on,
each rank's times its share of the global batch; or the ranks exchange them, where they are compressed
or rows of tables (:mod:`sparkdl.engines.gang.strategies.sections`). What follows is as in the other
engines: the owner of a slice regularises, clips and updates it. With the strategy "ddp" there is
one slice, and every rank updates all of it; with "zero1" rank n owns slice n alone, keeps the
optimizer's state of it (ZeRO, stage 1: Rajbhandari et al., 2020), and sends its new weights to the
others. With "fsdp" a rank has its shards of all parameters, and updates these
(:mod:`sparkdl.engines.gang.strategies.fsdp`); with "tensor" it has its part of the layers that are
cut (:mod:`sparkdl.engines.gang.strategies.tensor`); with "pipeline" it has some layers
(:mod:`sparkdl.engines.gang.strategies.pipeline`). Copies of a model that is cut update all of their
part each, or, with "zero1" beside these, some of it.
"""

from __future__ import annotations

import functools
import math
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.batches import BatchSpec
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import close_partitions, lies_here, open_partition
from sparkdl.engines.gang.background import (
    Background,
    BackgroundResult,
    copied_residuals,
    on_copies,
)
from sparkdl.engines.gang.build_turn import Turn
from sparkdl.engines.gang.node_files import SnapshotFiles
from sparkdl.engines.gang.rank_messages import RankConfig, RankReport, RankStatus, SampleLocation
from sparkdl.engines.gang.rank_state import States
from sparkdl.engines.gang.snapshots import Snapshots
from sparkdl.engines.gang.strategies.base import gathered
from sparkdl.engines.gang.strategies.build import hold
from sparkdl.errors import ModelError, SessionError, UserError
from sparkdl.gang.rank_task import RankContext
from sparkdl.loop.engine import BEST, ReadResiduals, ReadState, StateWork, weights_of
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.recipe import Recipe
from sparkdl.process.determinism import generators_lent
from sparkdl.process.memory import memory_given_back
from sparkdl.process.numerics import put_back
from sparkdl.replica.compare import Compared, compared
from sparkdl.replica.iteration import Clock, IterationRows, ReplicaReport, SliceReport
from sparkdl.replica.score import score_partition
from sparkdl.replica.step import ReplicaIteration, to_mini_batch
from sparkdl.slab.parts import Left, left_where_large, read_part
from sparkdl.slab.pool import Reference, open_pool
from sparkdl.slab.root import open_root
from sparkdl.slices.optimizer_step import wants_loss
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.slices.update import SliceUpdater
from sparkdl.usercode.travel import model_needs


@dataclass(frozen=True)
class CallMethod:
    """The command that calls a method of the rank, or of what it has: "snapshots.save"."""

    method: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, member: RankContext) -> Any:
        return operator.attrgetter(self.method)(member.kept["rank"])(*self.arguments)


@dataclass(frozen=True)
class InitRank:
    """The first command: build the replica; a :class:`RankStatus`, or the mistake of the user's
    that was found meanwhile."""

    setup: RankConfig

    def __call__(self, member: RankContext) -> RankStatus | UserError:
        torch.set_num_threads(self.setup.run.threads)
        self.setup.run.numerics.use()
        member.at_end.callback(put_back)
        member.at_end.enter_context(generators_lent())
        try:
            rank = member.kept["rank"] = Rank(self.setup, member)
            member.at_end.callback(close_partitions)
            return rank.standing()
        except UserError as error:
            return error
        except ModuleNotFoundError as error:
            return model_needs(error, "the ranks")


class Rank:
    """See the note above. ``_read``: which state the driver had it read, to be placed."""

    def __init__(self, setup: RankConfig, member: RankContext) -> None:
        self._setup, self._run, self._member = setup, setup.run, member
        root = open_root(self._run.slab, create=True)
        assert root is not None
        self._token, self._folder = root.token, root.directories[-1]
        self._load: Callable[[], Recipe] = setup.recipe.load
        files, residuals = SnapshotFiles(self._folder), member.size * self._run.compressed
        self.snapshots = Snapshots(files, member.rank, self._run.slices, residuals)
        handles = [pickle.loads(frame) for frame in frames_of(member.frames)]
        self._handles: list[SampleHandle] = handles
        self._partition: Any = None
        self._read: tuple[str, States] | None = None
        self._before: Mapping[str, float] = {}
        self._background: Background | None = None

    def standing(self) -> RankStatus:
        """What the driver checks before it goes on."""
        train = self._handles[0]
        return RankStatus(
            SampleLocation(self._token, train),
            self._compared(),
            tuple(lies_here(handle, self._token) for handle in self._handles),
            train.checksum == self._setup.checksums[self._member.rank],
        )

    def _compared(self) -> Compared:
        """What is built here beside what the driver has built. A model that is cut is read and built in
        turn, and let go of."""
        if self._setup.parallel.cuts:
            with memory_given_back(), Turn(self._folder):
                return compared(self._load().build(), self._setup.built)
        recipe = self._load()
        self._load = lambda: recipe
        return compared(recipe.build(), self._setup.built)

    def begin(self, samples: Sequence[SampleLocation]) -> ModelError | SessionError | None:
        """All ranks are where their ``samples`` are: make them one. What is wrong with how the model is
        cut, or where, is the result."""
        if self._handles[0].num_rows:
            self._partition = open_partition(self._handles[0])
        try:
            self._held, self._way = hold(self._load, self._setup, samples, self._member)
        except (ModelError, SessionError) as error:
            return error
        self._load = self._setup.recipe.load  # what was read is let go of
        self.snapshots.begin(self._held, self._way)
        policy, owners = self._held.live.recipe.policy, self._held.owners.values()
        kinds = [type(o) for owner in owners for o in owner.optimizer.schedule_targets()]
        leaves_out = policy.on_nan == "skip" or policy.scales_loss
        self._way.needs_all_losses = (
            leaves_out or self._setup.sums or any(wants_loss(kind) for kind in kinds)  # type: ignore[arg-type]
        )
        return None

    def answers_for(self, number: int) -> bool:
        """Whether this rank, of those that own slice ``number``, speaks for it."""
        return number in self._held.owners and (self._run.slices > 1 or self._member.rank == 0)

    def read(
        self, read: ReadState | None, reported: tuple[type[Exception], ...], which: str
    ) -> Any:
        """Read the slices to begin with; an exception of ``reported`` is the result."""
        self._read = None
        if read is None:
            return None
        held, found = self._held, {}
        for n in held.owners:
            try:
                found[n] = read(held.slices[n], held.live.flat.layout.dtype)
            except reported as error:
                return error
        self._read = which, found
        return None

    def place(self) -> None:
        """Begin with what was read, or with the recipe's weights."""
        if self._read is None:
            self._held.begin()
            return
        which, found = self._read
        self._read = None
        if which == BEST:
            self._held.place_best(found)
        else:
            self._held.place(found)

    def run(self, step: IterationRows) -> RankReport:
        """One iteration; the state of this rank's slices is then the next version."""
        clock, rank, live = Clock(), self._member.rank, self._held.live
        start, stop = step.rows[rank]
        work, batch = ReplicaIteration(step, rank, self._run.assembly, self._run.shares[rank]), None
        if stop > start:
            (arrays,) = work.mini_batches(live, self._partition)
            batch = to_mini_batch(arrays, live)
        weight = batch.weight if batch is not None else 0.0
        weights = self._weights(step, weight)
        clock.lap("data")
        loss, problem = self._way.compute(work, batch, weights, clock)
        if self._setup.sums:
            weight = self._way.count
        finish = functools.partial(self._finish, step, weights, loss, bool(problem))
        slices: list[SliceReport] = []
        if live.recipe.policy.clips_norm or step.histograms:
            slices = finish(clock)
        else:  # nothing of it is reported: it is done while the driver prepares what comes next
            self._member.afterwards = functools.partial(self._finish_later, finish)
        count, seconds = stop - start, {**self._before, **clock.seconds}
        self._before = {}
        report = ReplicaReport(rank, count, weight, loss, self._token, seconds, problem)
        writing = self._background is not None and self._background.busy
        return RankReport(report, slices, writing, self._way.loss_rank)

    def _finish_later(self, finish: Callable[[Clock], Any]) -> None:
        """When the result has been sent; the time it takes is told with the next."""
        clock = Clock()
        finish(clock)
        self._before = clock.seconds

    def _finish(
        self, step: IterationRows, weights: Sequence[float], loss: float, failed: bool, clock: Clock
    ) -> list[SliceReport]:
        """Update, unless the loss or a gradient of some rank is not finite and that is to be left out;
        where the driver ends the run for it, the state does not matter any more."""
        found = [[0.0, 0.0] for _ in weights]
        if self._setup.sums:
            found = gathered([loss, float(failed), self._way.count])
            weights = [count for _, _, count in found]
        elif self._way.needs_all_losses:
            found = gathered([loss, float(failed)])
        if any(one[1] for one in found):
            self._held.live.flat.refresh()
            return []
        contributions = self._way.contributions(step.rows, weights)
        self._way.committed()
        clock.lap("reduce")
        total = sum(weights)
        mean = sum(one[0] * w for one, w in zip(found, weights, strict=True) if w)
        return self._update(step, contributions, mean / total if total else 0.0, clock)

    def _weights(self, step: IterationRows, weight: float) -> list[float]:
        """What each rank's mini-batch counts for."""
        if not self._setup.weighted_batches:
            return [float(stop - start) for start, stop in step.rows]
        return [found for (found,) in gathered([weight])]

    def _update(
        self,
        step: IterationRows,
        contributions: Mapping[int, list[Section]],
        loss: float,
        clock: Clock,
    ) -> list[SliceReport]:
        """Regularise, clip and update this rank's slices; send their weights to the others."""
        known: dict[int, ReducedGradient] = {}
        squares = [0.0] * self._run.slices
        for n, owner in self._held.owners.items():
            if owner.clips_norm:
                state = self._held.states[n]
                known[n] = owner.reduce(contributions[n], state.weights, _dense(owner, state))
                squares[n] = self._held.counted[n].squared_norm(known[n])
        if known and self._run.slices > 1:
            mine = squares if self._held.first else [0.0] * len(squares)
            squares = [many[r] for r, many in enumerate(gathered(mine))]
        slices = []
        for n, owner in self._held.owners.items():
            state = self._held.states[n]
            updated = owner.update(
                state,
                state,
                contributions[n],
                step.hyperparameters,
                known=known.get(n),
                squares=squares,
                loss=loss,
                seed=step.update_seed(self._run.seed),
                keep=_dense(owner, state) if step.histograms else None,
            )
            told = self._held.counted[n]
            histograms = told.histograms(state, updated.reduced) if step.histograms else {}
            clock.lap("update")
            if self._held.first:
                slices.append(
                    SliceReport(n, self._token, None, norm=updated.norm, histograms=histograms)
                )
        self._held.share()
        clock.lap("publish")
        return slices

    def score(self, scorer: Scorer, assembly: BatchSpec, batch_size: int) -> list[Any] | None:
        """The scorer's states over this rank's partition of the validation's samples."""
        handle = self._handles[1]

        def score() -> list[Any] | None:
            if not handle.num_rows:
                return None
            partition = open_partition(handle)
            return score_partition(self._held.live, partition, scorer, assembly, batch_size)

        return self._way.scored(math.ceil(handle.num_rows / batch_size), score)

    def keep_best(self) -> None:
        """Keep a copy of the weights as they stand."""
        states = self._held.states
        self._held.best = {n: SliceState(state.weights.clone()) for n, state in states.items()}

    def weights(self, which: str, tick: int) -> dict[int, np.ndarray | Left]:
        """Of the slices that this rank answers for; as arrays, which travel with fewer copies."""
        held, pool = self._held, open_pool(self._run.slab)
        states = held.best if which == BEST else held.states
        slices = held.as_slices({n: SliceState(weights_of(s, which)) for n, s in states.items()})
        return {
            n: left_where_large(pool, s.weights.numpy(), tick)
            for n, s in slices.items()
            if self.answers_for(n)
        }

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str, tick: int
    ) -> dict[int, Any]:
        """``use(index, plan, state)`` of the slices that this rank answers for."""
        plans, states, pool = self._held.slices, self._slices(which), open_pool(self._run.slab)
        return {
            n: left_where_large(pool, use(n, plans[n], state), tick) for n, state in states.items()
        }

    def read_parts(self, parts: Mapping[int, Reference]) -> dict[int, bytes]:
        """Of what this rank has left in slabs."""
        pool = open_pool(self._run.slab)
        return {n: read_part(pool, part) for n, part in parts.items() if self.answers_for(n)}

    def _slices(self, which: str) -> States:
        """Those that this rank answers for."""
        held = self._held
        states = held.as_slices(held.best if which == BEST else held.states)
        return {n: state for n, state in states.items() if self.answers_for(n)}

    def begin_background(self, name: str, uses: StateWork) -> None:
        """Use copies of the state in the background, one such work at a time."""
        plans = dict(enumerate(self._held.slices))
        states = [on_copies(use, plans, self._slices(which)) for use, which in uses.states]
        residuals = []
        if self._way.kept is not None:
            kept = copied_residuals(self._way.kept)
            residuals.append(functools.partial(uses.residuals, self._member.rank, kept))
        self._background = Background(name, states, residuals)

    def background(self, name: str) -> BackgroundResult | None:
        """What came of it; None where this rank knows nothing of it, being new."""
        found, self._background = self._background, None
        return found.results() if found is not None and found.name == name else None

    def load_residuals(self, read: ReadResiduals, reported: tuple[type[Exception], ...]) -> Any:
        """See :class:`sparkdl.loop.engine.Engine`; an exception of ``reported`` is the result."""
        try:
            self._way.kept = read(self._member.rank)
        except reported as error:
            return error
        return None

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """``use(rank, kept)``, in a list; empty where this rank keeps nothing."""
        kept = self._way.kept
        return [] if kept is None else [use(self._member.rank, kept)]


def _dense(owner: SliceUpdater, state: SliceState) -> torch.Tensor:
    """Memory for the dense gradient of what ``owner`` updates."""
    length, device = owner.plan.dense_length, state.weights.device
    return torch.empty(length, dtype=owner.dtype, device=device)


def frames_of(records: Sequence[Any]) -> list[bytes]:
    """The frames of a partition's one record: samples, or (training, validation) samples."""
    (record,) = records
    return list(record) if isinstance(record, tuple) else [record]

"""The state and the work of one rank of the gang engine.

Every public method is a command of the driver.

[Note: the gang's iteration] Each rank runs forward and backward on its rows, and torch's
DistributedDataParallel (Li et al., 2020) sums the gradients, bucket by bucket while backward still
runs. Each rank's gradients are multiplied by its share of the global batch. If gradients are
compressed, or are rows of tables, the ranks exchange them instead
(:mod:`sparkdl.engines.gang.strategies.ddp`). The rest is as in the other engines: the owner of
a slice regularizes, clips and updates it.

With the strategy "ddp" there is one slice, and every rank updates all of it. With "zero1", rank n
owns only slice n, holds the optimizer state of that slice (ZeRO, stage 1: Rajbhandari et al.,
2020), and sends its new weights to the others. With "fsdp" a rank holds and updates its shards of
all parameters (:mod:`sparkdl.engines.gang.strategies.fsdp`); with "tensor" it holds its part of the
layers that are split (:mod:`sparkdl.engines.gang.strategies.tensor`); with "pipeline" it holds some
of the layers (:mod:`sparkdl.engines.gang.strategies.pipeline`). If there are several copies of a
split model, each rank updates all of its part, or, with "zero1" as well, some of it.

The update of the slices that a rank owns, and of its copies of what other ranks own.

The commands of the driver that read or replace the state of a rank.
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
from sparkdl.engines.gang.model_group import BuildLock
from sparkdl.engines.gang.rank_messages import (
    RankConfig,
    RankReport,
    RankStatus,
    SampleLocation,
    gathered,
)
from sparkdl.engines.gang.rank_state import RankState, States, evaluated, needs_all_losses
from sparkdl.engines.gang.snapshots import (
    Background,
    BackgroundResult,
    SnapshotFiles,
    Snapshots,
    copied_residuals,
    on_copies,
)
from sparkdl.engines.gang.strategies.base import GradientSync, RankPass, build_rank
from sparkdl.errors import DamagedCheckpoint, ModelError, SessionError, UserError
from sparkdl.gang.rank_task import RankContext
from sparkdl.loop.engine import BEST, ReadResiduals, ReadState, StateWork, weights_of
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.recipe import Recipe
from sparkdl.process.determinism import generators_lent, put_back
from sparkdl.process.memory import memory_given_back
from sparkdl.process.system import label_output
from sparkdl.replica.compare import Compared, compared
from sparkdl.replica.compute import MiniBatch
from sparkdl.replica.iteration import Clock, IterationRows, ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec, full_gpu_explained
from sparkdl.replica.step import ReplicaIteration, score_partition, to_mini_batch
from sparkdl.slab.pool import Left, Reference, left_where_large, open_pool, read_part
from sparkdl.slab.root import open_root
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.usercode.travel import model_needs


def update_slices(
    held: RankState,
    run: RunSpec,
    node_id: str,
    step: IterationRows,
    sections: Mapping[int, list[Section]],
    loss: float,
    clock: Clock,
) -> list[SliceReport]:
    """Regularize, clip and update this rank's slices, and send their weights to the other ranks.

    Slices without sections stay as they are. The reports are on those that no earlier rank updates.
    """
    known: dict[int, ReducedGradient] = {}
    squares = [0.0] * run.slices
    for n, owner in held.owners.items():
        if owner.clips_norm:
            state = held.states[n]
            length, device = owner.plan.dense_length, state.weights.device
            memory = torch.empty(length, dtype=owner.dtype, device=device)
            known[n] = owner.reduce(sections[n], state.weights, memory)
            squares[n] = held.counted[n].squared_norm(known[n])
    if known and run.slices > 1:
        mine = squares if held.first else [0.0] * len(squares)
        squares = [many[r] for r, many in enumerate(gathered(mine))]
    slices = []
    for n in sections:
        owner, state = held.owners[n], held.states[n]
        updated = owner.update(
            state,
            state,
            sections[n],
            step.hyperparameters,
            known=known.get(n),
            squares=squares,
            loss=loss,
            seed=step.update_seed(run.seed),
            shown=held.counted[n].plan.parameters if step.histograms else (),
        )
        clock.lap("update")
        if held.first:
            found = updated.histograms
            slices.append(SliceReport(n, node_id, None, norm=updated.norm, histograms=found))
    held.share()
    clock.lap("publish")
    return slices


class StateCommands:
    """The use of a rank's state by the driver. Every public method is one of its commands.

    ``_read`` is the state that :meth:`read` has read and :meth:`place` has still to place.
    """

    def __init__(self, held: RankState, sync: GradientSync, run: RunSpec, rank: int) -> None:
        self._held, self._sync, self._run, self._rank = held, sync, run, rank
        self._read: tuple[str, States] | None = None
        self._background: Background | None = None

    @property
    def writing(self) -> bool:
        """Return whether background work is still running."""
        return self._background is not None and self._background.busy

    def _answers_for(self, number: int) -> bool:
        """Return whether this rank reports on slice ``number``, which several ranks may own."""
        return number in self._held.owners and (self._run.slices > 1 or self._rank == 0)

    def read(self, read: ReadState | None, which: str) -> DamagedCheckpoint | None:
        """Read the initial slices, without placing them; None: the recipe's weights.

        Returns DamagedCheckpoint instead of raising it, as the next one does.
        """
        self._read = None
        if read is None:
            return None
        held, found = self._held, {}
        for n in held.owners:
            try:
                found[n] = read(held.slices[n], held.live.flat.layout.dtype)
            except DamagedCheckpoint as error:
                return error
        self._read = which, found
        return None

    def place(self) -> None:
        """Place the state that was read or, if none was, the recipe's weights."""
        if self._read is None:
            self._held.begin()
            return
        which, found = self._read
        self._read = None
        if which == BEST:
            self._held.place_best(found)
        else:
            self._held.place(found)

    def keep_best(self) -> None:
        """Keep a copy of the current weights."""
        self._sync.settle()
        self._held.keep_best()

    def weights(self, which: str, submission: int) -> dict[int, np.ndarray | Left]:
        """Return the weights of the slices that this rank answers for, as NumPy arrays.

        Arrays travel with fewer copies than tensors. ``which`` may also be the moving average. For
        the arguments see :meth:`map_slices`.
        """
        self._sync.settle()
        held, pool = self._held, open_pool(self._run.slab)
        states = held.best if which == BEST else held.states
        slices = held.as_slices({n: SliceState(weights_of(s, which)) for n, s in states.items()})
        return {
            n: left_where_large(pool, s.weights.numpy(), submission)
            for n, s in slices.items()
            if self._answers_for(n)
        }

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str, submission: int
    ) -> dict[int, Any]:
        """Use the states of the slices that this rank answers for; large results stay in slabs."""
        plans, states, pool = self._held.slices, self._slices(which), open_pool(self._run.slab)
        return {
            n: left_where_large(pool, use(n, plans[n], state), submission)
            for n, state in states.items()
        }

    def read_parts(self, parts: Mapping[int, Reference]) -> dict[int, bytes]:
        """Read parts of what this rank has left in slabs."""
        pool = open_pool(self._run.slab)
        return {n: read_part(pool, part) for n, part in parts.items() if self._answers_for(n)}

    def _slices(self, which: str) -> States:
        """Return the states of the slices that this rank answers for."""
        self._sync.settle()
        held = self._held
        states = held.as_slices(held.best if which == BEST else held.states)
        return {n: state for n, state in states.items() if self._answers_for(n)}

    def begin_background(self, name: str, uses: StateWork) -> None:
        """Start to use copies of the state in the background. Only one such work runs at a time."""
        plans = dict(enumerate(self._held.slices))
        states = [on_copies(use, plans, self._slices(which)) for use, which in uses.states]
        residuals = []
        if self._sync.kept is not None:
            kept = copied_residuals(self._sync.kept)
            residuals.append(functools.partial(uses.residuals, self._rank, kept))
        self._background = Background(name, states, residuals)

    def background(self, name: str) -> BackgroundResult | None:
        """Return the results of background work, or None if this rank is new and does not know it."""
        found, self._background = self._background, None
        return found.results() if found is not None and found.name == name else None

    def load_residuals(self, read: ReadResiduals) -> DamagedCheckpoint | None:
        """Load this rank's residuals. See :class:`sparkdl.loop.engine.Engine`."""
        try:
            self._sync.place_kept(read(self._rank))
        except DamagedCheckpoint as error:
            return error
        return None

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Return ``[use(rank, kept)]``, or an empty list if this rank has no residuals."""
        kept = self._sync.kept
        return [] if kept is None else [use(self._rank, kept)]


@dataclass(frozen=True)
class CallMethod:
    """The command that calls a method of the rank, or of one of its attributes: "snapshots.save"."""

    method: str
    arguments: tuple[Any, ...] = ()

    @full_gpu_explained()
    def __call__(self, member: RankContext) -> Any:
        return operator.attrgetter(self.method)(member.kept["rank"])(*self.arguments)


def init_rank(setup: RankConfig, member: RankContext) -> RankStatus | UserError:
    """Build the replica, as the first command; return its status, or the user error that was found."""
    torch.set_num_threads(setup.run.threads)
    setup.run.numerics.use()
    member.at_end.callback(put_back)
    member.at_end.enter_context(generators_lent())
    try:
        rank = member.kept["rank"] = Rank(setup, member)
        member.at_end.callback(close_partitions)
        return rank.standing()
    except UserError as error:
        return error
    except ModuleNotFoundError as error:
        return model_needs(error, "the ranks")


class Rank:
    """One rank of the gang. See the note above."""

    state: StateCommands

    def __init__(self, setup: RankConfig, member: RankContext) -> None:
        self._setup, self._run, self._member = setup, setup.run, member
        root = open_root(self._run.slab, create=True)
        assert root is not None
        self._node_id, self._folder = root.node_id, root.directories[-1]
        self._load: Callable[[], Recipe] = setup.recipe.load
        files, residuals = SnapshotFiles(self._folder), member.size * self._run.keeps_tensors
        self.snapshots = Snapshots(files, member.rank, self._run.slices, residuals)
        handles = [pickle.loads(frame) for frame in frames_of(member.frames)]
        self._handles: list[SampleHandle] = handles
        self._partition: Any = None
        self._before: Mapping[str, float] = {}

    def standing(self) -> RankStatus:
        """Return the status that the driver checks before it continues."""
        train = self._handles[0]
        return RankStatus(
            SampleLocation(self._node_id, train),
            self._compared(),
            tuple(lies_here(handle, self._node_id) for handle in self._handles),
            train.checksum == self._setup.checksums[self._member.rank],
        )

    def _compared(self) -> Compared:
        """Return how the model that is built here compares with the driver's.

        Ranks read and build a model that is to be split in turn, and free it afterwards.
        """
        if self._setup.parallel.splits_model:
            with memory_given_back(), BuildLock(self._folder):
                return compared(self._load().build(), self._setup.built)
        recipe = self._load()
        self._load = lambda: recipe
        return compared(recipe.build(), self._setup.built)

    def begin(self, samples: Sequence[SampleLocation]) -> ModelError | SessionError | None:
        """Build what this rank holds, once all ranks are on the nodes of their samples.

        ``samples`` is empty if the model is not split. Returns an error in the split, or None.
        """
        if self._handles[0].num_rows:
            self._partition = open_partition(self._handles[0])
        try:
            self._held, self._sync = build_rank(self._load, self._setup, samples, self._member)
        except (ModelError, SessionError) as error:
            return error
        self._load = self._setup.recipe.load  # this frees the recipe that was read
        self.snapshots.begin(self._held, self._sync)
        self.state = StateCommands(self._held, self._sync, self._run, self._member.rank)
        self._needs_all_losses = needs_all_losses(self._held, self._setup.sums)
        return None

    def run(self, step: IterationRows) -> RankReport:
        """Run one iteration, after which this rank's slices have the next version."""
        clock, rank, live = Clock(), self._member.rank, self._held.live
        label_output(f"rank {rank}, iteration {step.index + 1}")
        start, stop = step.rows[rank]
        work = ReplicaIteration(step, rank, self._run.batch_spec, self._run.shares[rank])
        batches: list[MiniBatch] = []
        if stop > start:
            arrays = work.mini_batches(live, self._partition, self._sync.steps)
            batches = [to_mini_batch(each, live) for each in arrays]
        weight = sum((batch.weight for batch in batches), 0.0)
        weights = self._weights(step, weight)
        clock.lap("data")
        loss, problem = self._sync.compute(RankPass(work, batches, weights, clock))
        if self._setup.sums:
            weight = self._sync.count
        finish = functools.partial(self._finish, step, weights, loss, bool(problem))
        slices: list[SliceReport] = []
        reported = live.recipe.options.clips_norm or step.histograms
        if reported or self._sync.ends_before_report:
            slices = finish(clock)
        else:  # there is nothing to report: update while the driver prepares the next iteration
            self._member.defer(functools.partial(self._finish_later, finish))
        count, seconds = stop - start, {**self._before, **clock.seconds}
        self._before = {}
        report = ReplicaReport(
            rank, count, weight, loss, self._node_id, seconds, problem, losses=self._sync.losses
        )
        return RankReport(report, slices, self.state.writing, self._sync.loss_rank)

    @full_gpu_explained()
    def _finish_later(self, finish: Callable[[Clock], Any]) -> None:
        """Finish an iteration after its report was sent.

        The next report includes the time that it takes.
        """
        clock = Clock()
        finish(clock)
        self._before = clock.seconds

    def _finish(
        self, step: IterationRows, weights: Sequence[float], loss: float, failed: bool, clock: Clock
    ) -> list[SliceReport]:
        """Update the slices.

        Skip the update if the loss or a gradient of any rank is not finite and such iterations are
        skipped. If the driver ends the run because of it, the state no longer matters.
        """
        found = [[0.0, 0.0] for _ in weights]
        if self._setup.sums:
            found = gathered([loss, float(failed), self._sync.count])
            weights = [count for _, _, count in found]
        elif self._needs_all_losses:
            found = gathered([loss, float(failed)])
        if any(one[1] for one in found):
            self._held.live.flat.refresh()
            return []
        sections = self._sync.sections(step.rows, weights)
        self._sync.committed()
        clock.lap("reduce")
        total = sum(weights)
        mean = sum(one[0] * w for one, w in zip(found, weights, strict=True) if w)
        loss = mean / total if total else 0.0
        return update_slices(self._held, self._run, self._node_id, step, sections, loss, clock)

    def _weights(self, step: IterationRows, weight: float) -> list[float]:
        """Return the weight of each rank's rows."""
        if not self._setup.weighted_batches:
            return [float(stop - start) for start, stop in step.rows]
        return [found for (found,) in gathered([weight])]

    def score(self, scorer: Scorer, batch_spec: BatchSpec, batch_size: int) -> list[Any] | None:
        """Return the scorer's states for this rank's validation samples; None without samples."""
        handle = self._handles[1]
        label_output(f"rank {self._member.rank}, validation")

        def score() -> list[Any] | None:
            if not handle.num_rows:
                return None
            partition = open_partition(handle)
            return score_partition(self._held.live, partition, scorer, batch_spec, batch_size)

        self._sync.settle()
        batches = math.ceil(handle.num_rows / batch_size)
        with evaluated(self._held):
            return self._sync.scored(batches, score, outputs=bool(scorer.metrics))


def frames_of(records: Sequence[Any]) -> list[bytes]:
    """Return the frames in a partition's single record: samples, or (training, validation) samples."""
    (record,) = records
    return list(record) if isinstance(record, tuple) else [record]

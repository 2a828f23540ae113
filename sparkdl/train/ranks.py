"""What a rank of the gang engine holds and does; every method is a command of the driver.

[Note: the gang's iteration] Each rank goes forward and backward over its rows, and torch's
DistributedDataParallel (Li et al., 2020) sums the gradients, bucket by bucket while backward goes on,
each rank's times its share of the global batch; or the ranks exchange them, where they are compressed
or rows of tables (:mod:`sparkdl.train.exchanged`). What follows is as in the other engines: the owner
of a slice regularises, clips and updates it. With the strategy "ddp" there is one slice, and every
rank updates all of it; with "zero1" rank n owns slice n alone, keeps the optimizer's state of it (ZeRO,
stage 1: Rajbhandari et al., 2020), and sends its new weights to the others.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.clock import Clock
from sparkdl.data.assemble import Assembly, Batch
from sparkdl.data.handle import SampleHandle
from sparkdl.data.mapped import close_partitions, open_partition
from sparkdl.gang.member import Member
from sparkdl.infer.scoring import Scorer
from sparkdl.infer.validate import score_partition
from sparkdl.replica.live import LiveReplica
from sparkdl.replica.recipe import weights_digest
from sparkdl.replica.run import Run
from sparkdl.slab.root import open_root
from sparkdl.step.compressing import ReadResiduals
from sparkdl.step.job import lies_here
from sparkdl.step.replica import Work, to_mini_batch
from sparkdl.step.streaming import streams
from sparkdl.sync.contribution import Contribution
from sparkdl.sync.gradient import Reduced
from sparkdl.sync.packing import ByParameter
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.plans import RunPlans
from sparkdl.sync.records import ReplicaReport, SliceReport, Step
from sparkdl.sync.state import SliceState
from sparkdl.train.data_parallel import Summed
from sparkdl.train.engine import BEST, CURRENT, ReadState, weights_of
from sparkdl.train.exchanged import Exchanged
from sparkdl.train.node_files import (
    SnapshotFiles,
    broadcast_bytes,
    pack,
    pack_kept,
    unpack,
    unpack_kept,
)


@dataclass(frozen=True)
class Setup:
    """What a rank begins with. ``recipe``: pickled. ``spare``: a few rows of the data, for a rank
    that has none in an iteration. ``checksums``: of the partitions of training samples."""

    run: Run
    recipe: bytes
    spare: Batch
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Standing:
    """What a rank finds where it is: its node's token, a digest of the initial weights, which of its
    partitions are on the node, and whether the training rows are those of before."""

    token: str
    digest: str
    here: tuple[bool, ...]
    unchanged: bool


@dataclass(frozen=True)
class RankStep:
    """What a rank did in an iteration; ``slices``: of those it answers for, where they have more to
    tell than that they were updated."""

    report: ReplicaReport
    slices: list[SliceReport]


@dataclass(frozen=True)
class Do:
    """The command that calls a method of the rank."""

    method: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, member: Member) -> Any:
        return getattr(member.kept["rank"], self.method)(*self.arguments)


@dataclass(frozen=True)
class SetUp:
    """The first command: build the replica; a :class:`Standing`."""

    setup: Setup

    def __call__(self, member: Member) -> Standing:
        torch.set_num_threads(self.setup.run.threads)
        rank = member.kept["rank"] = Rank(self.setup, member)
        member.at_end.callback(close_partitions)
        return rank.standing()


class Rank:
    """See the note above. ``_states``: of the slices that this rank updates, by number; their weights
    are views of the live replica's flat vector, where that is on the device they are updated on."""

    def __init__(self, setup: Setup, member: Member) -> None:
        self._setup, self._run, self._member = setup, setup.run, member
        root = open_root(self._run.slab, create=True)
        assert root is not None
        self._token, self._files = root.token, SnapshotFiles(root.directories[-1])
        self._live = LiveReplica.of(pickle.loads(setup.recipe), member.device)
        self._plans = RunPlans.of(self._live, self._run)
        self._mine = [
            n for n in range(self._run.slices) if self._run.slices == 1 or n == member.rank
        ]
        self._states: dict[int, SliceState] = {}
        self._best: dict[int, SliceState] = {}
        handles = [pickle.loads(frame) for frame in _frames(member.frames)]
        self._handles: list[SampleHandle] = handles
        self._partition: Any = None
        self._way: Summed | Exchanged | None = None
        self._before: Mapping[str, float] = {}

    def standing(self) -> Standing:
        """What the driver checks before it goes on."""
        train = self._handles[0]
        return Standing(
            self._token,
            weights_digest(self._live.recipe.build()),
            tuple(lies_here(handle, self._token) for handle in self._handles),
            train.checksum == self._setup.checksums[self._member.rank],
        )

    def begin(self) -> None:
        """All ranks are where their samples are: make them one."""
        if self._handles[0].num_rows:
            self._partition = open_partition(self._handles[0])
        how = self._live, self._plans, self._mine, self._member.rank
        if streams(self._live):
            self._way = Summed(*how, self._setup.spare)
        else:
            self._way = Exchanged(*how)

    def answers_for(self, number: int) -> bool:
        """Whether this rank, of those that update slice ``number``, speaks for it."""
        return number in self._mine and (self._run.slices > 1 or self._member.rank == 0)

    def start(
        self, read: ReadState | None, reported: tuple[type[Exception], ...], which: str
    ) -> Any:
        """See :class:`sparkdl.train.engine.Engine`; an exception of ``reported`` is the result."""
        flat = self._live.flat.flat
        for n in self._mine:
            plan = self._plans.slices[n]
            place = flat[plan.start : plan.stop]
            try:
                state = SliceState(place.clone()) if read is None else read(plan, flat.dtype)
            except reported as error:
                return error
            if which == BEST:
                self._best[n] = state
            else:
                self._states[n] = self._placed(plan, state)
        return None

    def _placed(self, plan: SlicePlan, state: SliceState) -> SliceState:
        """The state where this rank updates it, its weights in the flat vector if that is there."""
        flat = self._live.flat.flat
        home = flat.device if streams(self._live) else torch.device("cpu")
        place = flat[plan.start : plan.stop]
        with torch.no_grad():
            place.copy_(state.weights)
        state.weights = place.to(home)
        state.arrays = {name: array.to(home) for name, array in state.arrays.items()}
        return state

    def share_weights(self) -> None:
        """Send every slice's weights to all ranks, from where they were updated."""
        flat = self._live.flat.flat
        for n, state in self._states.items():
            if state.weights.device != flat.device:
                plan = self._plans.slices[n]
                flat[plan.start : plan.stop].copy_(state.weights)
        if self._run.slices > 1:
            sent = [
                dist.broadcast(flat[plan.start : plan.stop], plan.index, async_op=True)
                for plan in self._plans.slices
                if plan.length
            ]
            for work in sent:
                work.wait()
        self._live.flat.refresh()

    def step(self, step: Step) -> RankStep:
        """One iteration; the state of this rank's slices is then the next version."""
        clock, rank, live = Clock(), self._member.rank, self._live
        start, stop = step.rows[rank]
        work, batch = Work(step, rank, self._run.assembly, self._run.shares[rank]), None
        if stop > start:
            (arrays,) = work.mini_batches(live, self._partition)
            batch = to_mini_batch(arrays, live)
        weight = batch.weight if batch is not None else 0.0
        weights = self._weights(step, weight)
        clock.lap("data")
        assert self._way is not None
        loss, problem = self._way.compute(work, batch, weights, clock)
        finish = functools.partial(self._finish, step, weights, loss, bool(problem))
        slices: list[SliceReport] = []
        if live.recipe.policy.clips_norm or step.histograms:
            slices = finish(clock)
        else:  # nothing of it is reported: it is done while the driver prepares what comes next
            self._member.afterwards = functools.partial(self._finish_later, finish)
        count, seconds = stop - start, {**self._before, **clock.seconds}
        self._before = {}
        report = ReplicaReport(rank, count, weight, loss, self._token, seconds, problem)
        return RankStep(report, slices)

    def _finish_later(self, finish: Callable[[Clock], Any]) -> None:
        """When the result has been sent; the time it takes is told with the next."""
        clock = Clock()
        finish(clock)
        self._before = clock.seconds

    def _finish(
        self, step: Step, weights: Sequence[float], loss: float, failed: bool, clock: Clock
    ) -> list[SliceReport]:
        """Update, unless the loss or a gradient of some rank is not finite; then all leave it out."""
        found = self._gathered([loss, float(failed)])
        if any(flag for _, flag in found):
            self._live.flat.refresh()
            return []
        assert self._way is not None
        contributions = self._way.contributions(step.rows, weights)
        self._way.committed()
        clock.lap("reduce")
        total = sum(weights)
        mean = sum(one * w for (one, _), w in zip(found, weights, strict=True) if w)
        return self._update(step, contributions, mean / total if total else 0.0, clock)

    def _weights(self, step: Step, weight: float) -> list[float]:
        """What each rank's mini-batch counts for."""
        if not self._run.assembly.weighted and self._live.recipe.policy.class_weights is None:
            return [float(stop - start) for start, stop in step.rows]
        return [found for (found,) in self._gathered([weight])]

    def _gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Some numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self._member.size)]
        dist.all_gather(found, mine)
        return [row.tolist() for row in found]

    def _update(
        self,
        step: Step,
        contributions: Mapping[int, list[Contribution]],
        loss: float,
        clock: Clock,
    ) -> list[SliceReport]:
        """Regularise, clip and update this rank's slices; send their weights to the others."""
        known: dict[int, Reduced] = {}
        squares = [0.0] * self._run.slices
        for n in self._mine:
            owner, weights = self._plans.owners[n], self._states[n].weights
            if owner.clips_norm:
                length, device = owner.plan.dense_length, weights.device
                out = torch.empty(length, dtype=owner.dtype, device=device)
                known[n] = owner.reduce(contributions[n], weights, out)
                squares[n] = owner.squared_norm(known[n])
        if known and self._run.slices > 1:
            squares = [many[r] for r, many in enumerate(self._gathered(squares))]
        slices = []
        for n in self._mine:
            owner, state, keep = self._plans.owners[n], self._states[n], None
            if step.histograms:
                length, device = owner.plan.dense_length, state.weights.device
                keep = torch.empty(length, dtype=owner.dtype, device=device)
            updated = owner.update(
                state,
                state,
                contributions[n],
                step.hyperparameters,
                known=known.get(n),
                squares=squares,
                loss=loss,
                keep=keep,
            )
            histograms = owner.histograms(state, updated.reduced) if step.histograms else {}
            clock.lap("update")
            if self.answers_for(n):
                slices.append(
                    SliceReport(n, self._token, None, norm=updated.norm, histograms=histograms)
                )
        self.share_weights()
        clock.lap("publish")
        return slices

    def score(self, scorer: Scorer, assembly: Assembly, batch_size: int) -> list[Any] | None:
        """The scorer's states over this rank's partition of the validation's samples."""
        handle = self._handles[1]
        if not handle.num_rows:
            return None
        partition = open_partition(handle)
        return score_partition(self._live, partition, scorer, assembly, batch_size)

    def keep_best(self) -> None:
        """Keep a copy of the weights as they stand."""
        self._best = {n: SliceState(state.weights.clone()) for n, state in self._states.items()}

    def with_states(
        self, use: Callable[[int, SlicePlan, SliceState], Any], which: str = CURRENT
    ) -> dict[int, Any]:
        """``use(index, plan, state)`` of the slices that this rank answers for."""
        states = self._best if which == BEST else self._states
        return {
            n: use(n, self._plans.slices[n], on_cpu(state))
            for n, state in states.items()
            if self.answers_for(n)
        }

    def start_residuals(self, read: ReadResiduals, reported: tuple[type[Exception], ...]) -> Any:
        """See :class:`sparkdl.train.engine.Engine`; an exception of ``reported`` is the result."""
        try:
            kept = read(self._member.rank)
        except reported as error:
            return error
        if isinstance(self._way, Exchanged):
            self._way.kept = kept
        return None

    def with_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """``use(rank, kept)``, in a list; empty where this rank keeps nothing."""
        return [] if self._kept is None else [use(self._member.rank, self._kept)]

    @property
    def _kept(self) -> ByParameter | None:
        return self._way.kept if isinstance(self._way, Exchanged) else None

    @property
    def _parts(self) -> int:
        """Of a snapshot: the slices, and what each rank keeps, where gradients are compressed."""
        compresses = self._live.recipe.compression is not None
        return self._run.slices + (self._member.size if compresses else 0)

    def save_snapshot(self, name: str, holders: Sequence[int]) -> None:
        """Leave this state in files on the nodes of ``holders``: the first rank of each node."""
        holds = self._member.rank in holders
        for n in range(self._run.slices):
            packed = None
            if n in self._mine and (self._run.slices > 1 or holds):
                states = [self._states[n], self._best.get(n)]
                packed = pack(self._plans.slices[n], [on_cpu(s) for s in states if s is not None])
            if self._run.slices > 1:
                packed = broadcast_bytes(packed, n)
            if packed is not None and holds:
                self._files.write(name, n, packed)
        for r in range(self._parts - self._run.slices):
            mine = pack_kept(self._kept) if r == self._member.rank else None
            packed = broadcast_bytes(mine, r)
            if holds:
                self._files.write(name, self._run.slices + r, packed)

    def drop_snapshot(self, name: str, holders: Sequence[int]) -> None:
        """It is not needed any more."""
        if self._member.rank in holders:
            self._files.delete(name, self._parts)

    def has_snapshot(self, name: str) -> list[bool]:
        """Of which parts this node has it: of the slices, then of what ranks keep."""
        return self._files.there(name, self._parts)

    def load_snapshot(self, name: str, sources: Sequence[int]) -> None:
        """Go on from it; ``sources``: for each part, a rank whose node has it."""
        for n, source in enumerate(sources):
            mine = self._member.rank == source
            packed = broadcast_bytes(self._files.read(name, n) if mine else None, source)
            if n in self._mine:
                plan = self._plans.slices[n]
                current, *best = unpack(plan, packed, self._live.flat.flat.dtype)
                self._states[n] = self._placed(plan, current)
                if best:
                    self._best[n] = best[0]
            if n - self._run.slices == self._member.rank and isinstance(self._way, Exchanged):
                self._way.kept = unpack_kept(packed)


@dataclass(frozen=True)
class SliceWeights:
    """For :meth:`Rank.with_states`: a copy of the weights, since a view travels with all it is of."""

    which: str

    def __call__(self, index: int, plan: SlicePlan, state: SliceState) -> torch.Tensor:
        return weights_of(state, self.which).clone()


def on_cpu(state: SliceState) -> SliceState:
    """The state with weights and arrays on the CPU."""
    if state.weights.device.type == "cpu":
        return state
    arrays = {name: array.cpu() for name, array in state.arrays.items()}
    return SliceState(state.weights.cpu(), arrays, state.held, state.others)


def _frames(records: Sequence[Any]) -> list[bytes]:
    """The frames of a partition's one record: samples, or (training, validation) samples."""
    (record,) = records
    return list(record) if isinstance(record, tuple) else [record]

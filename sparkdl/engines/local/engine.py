"""The local engine, which runs iterations in this process without Spark jobs.

It serves for debugging and as the reference for the shuffle engine: the same M and N give the same
bits.

M replicas compute in turn on one live module. With gossip they do so each with its own weights: the
reference for ranks of a gang. With groups of replicas turns take a virtual time.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.asynchronous import Asynchronous, Commit, GroupTurns, Turn
from sparkdl.consistency.base import Consistency, StragglerLimit, Update, next_update
from sparkdl.consistency.gossip import DISTANCE, TOPOLOGIES, add_up, averaged_parts, mix
from sparkdl.consistency.synchronous import Synchronous
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.partition_reader import MappedPartition, open_partition
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.errors import StaleReferenceError, StateLostError
from sparkdl.loop.advance import IterationResult, slowest, summarize
from sparkdl.loop.engine import BEST, CURRENT, ReadResiduals, ReadState, Recovery, weights_of
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.process.determinism import torch_threads
from sparkdl.replica.iteration import (
    Clock,
    Decisions,
    Iteration,
    IterationRows,
    ReplicaReport,
    SliceReport,
)
from sparkdl.replica.local_sgd import (
    keep_replica,
    open_inner,
    open_replica_state,
    problem_of_step,
    several_steps,
    step_alone,
    without_rows,
)
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.replica.step import (
    GradientWriter,
    ReplicaIteration,
    ReplicaResult,
    compress_outcome,
    not_finite,
    one_gradient,
    score_partition,
    section_maps,
    sections_nbytes,
    to_mini_batch,
    write_sections,
    writes_early,
)
from sparkdl.slices.optimizer import scaled_rates
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section, SectionLayout
from sparkdl.slices.spec import SliceSpec, SliceState, join_states
from sparkdl.slices.update import SliceUpdater


class _Replica:
    """A replica with weights of its own in an iteration; those of ``live`` are lost."""

    def __init__(self, live: LiveReplica, work: ReplicaIteration, state: SliceState) -> None:
        self._live, self._work, self.state = live, work, state
        self._gradients, self._loss, self.weight = without_rows(live), 0.0, 0.0

    def passes(self, partition: MappedPartition) -> ReplicaReport:
        """Run forward and backward, and return the report."""
        clock, live = Clock(), self._live
        (batch,) = self._work.mini_batches(live, partition)
        clock.lap("data")
        self._load()
        clock.lap("fetch")
        result = one_gradient(live, batch, self._work, clock)
        live.flat.save_buffers(self.state.weights)
        self._gradients, self._loss, self.weight = result.gradients, result.loss, result.weight
        problem = problem_of_step(live, result.loss, result.gradients)
        return result.report(self._work.replica, clock, problem)

    def steps(self, whole: SliceUpdater, factor: float) -> None:
        """Take a step with ``factor`` times the gradients."""
        self._load()
        flat = self._live.flat.flat
        state = replace(self.state, weights=flat)
        step_alone(self._live, self._gradients, self._work, state, whole, self._loss, factor=factor)
        self.state = replace(state, weights=self.state.weights.copy_(flat))

    def _load(self) -> None:
        """Put the replica's weights into the module."""
        self._live.flat.flat.copy_(self.state.weights)
        self._live.flat.refresh()


def open_all(samples: SampleSet) -> list[MappedPartition | None]:
    """Open the samples of every replica; None for a replica without rows."""
    try:
        return [open_partition(handle) if handle.num_rows else None for handle in samples.handles]
    except StaleReferenceError as error:
        raise StateLostError(
            f"{error} before training began. Call fit again, which writes the samples again, and "
            "make sure that nothing deletes files in spark.sparkdl.slab.dir."
        ) from error


class LocalEngine:
    """An engine that runs M replicas in turn on one live module, then updates N slices in turn.

    It opens all samples at the start. Mapped samples stay readable even if their files are deleted.
    ``batch_size`` includes local steps; ``now`` is the replicas' clock, in seconds.
    """

    recoveries: Sequence[Recovery] = ()
    begins_ahead = False

    def __init__(
        self,
        samples: SampleSet,
        run: RunSpec,
        recipe: bytes,
        batch_size: int,
        validation: ValidationSet | None = None,
        consistency: Consistency | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._validation = validation
        self._validation_partitions = [] if validation is None else open_all(validation.samples)
        self.plan = EpochPlan(samples.counts, batch_size)
        self._partitions = open_all(samples)
        self._run, self._recipe, self._now = run, recipe, now
        self._build()
        self._plans = OpenRun.of(self._live, run)
        self._kept: dict[int, ByParameter] = {}  # what each replica keeps for the next iteration
        self._memory: dict[int, np.ndarray] = {}
        self._states: list[SliceState] = []
        self._best: list[SliceState] = []
        self._consistency = consistency or Synchronous()
        self._stragglers = StragglerLimit(self._consistency.may_drop)
        self._older: deque[list[torch.Tensor]] = deque(maxlen=self._consistency.keep - 1)
        self._version = 0

    def _build(self) -> None:
        """Build the module, so that it has the weights of the recipe."""
        recipe: Recipe = pickle.loads(self._recipe)
        self._live = LiveReplica.of(recipe)

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Set the state of every slice, from the recipe's weights or from ``read`` if it is given."""
        if read is None and self._states:  # the replica's weights have changed since it was built
            self._build()
        flat = self._live.flat.flat
        states = [
            SliceState(flat[plan.start : plan.stop].clone())
            if read is None
            else read(plan, flat.dtype)
            for plan in self._plans.slices
        ]
        if which == BEST:
            self._best = states
        else:
            self._states = states
            self._older.clear()
            self._version = 0

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Run every replica and update every slice in this process."""
        with torch_threads(self._run.threads):
            step = iteration.with_rows(self.plan.rows(iteration.batch))
            if self._live.recipe.options.topology is not None:
                return self._run_gossip(step)
            readable = range(self._version - len(self._older), self._version + 1)
            update = next_update(self._consistency, readable, iteration.decisions)
            return self._stragglers.run(step, lambda step: self._once(step, readable, update))

    def _once(
        self, step: IterationRows, readable: range, update: Update
    ) -> tuple[IterationResult, list[ReplicaReport]]:
        """Run the replicas, and update the slices if what they did counts."""
        started = Clock()
        newest = [state.weights for state in self._states]
        weights = [*self._older, newest][readable.index(update.version)]
        reports, sections, kept = [], [], {}
        for replica, (start, stop) in enumerate(step.rows):
            if stop > start:
                report, mine, outcome = self._replica(step, replica, weights)
                reports.append(report)
                sections.append(mine)
                if outcome.compressed is not None or outcome.kept:
                    kept[replica] = outcome.kept
        slices: list[SliceReport] = []
        finite = not any(report.not_finite for report in reports)
        if finite and not step.falls_short(report.passed for report in reports):
            if self._consistency.keep > 1:
                self._older.append([each.clone() for each in newest])
            slices = self._synchronize(step, reports, sections)
            self._kept |= kept
            self._version += 1
        started.lap("iteration")
        seconds = slowest([*[r.seconds for r in reports], *[s.seconds for s in slices]])
        seconds = {**seconds, **started.seconds}
        result = summarize(reports, slices, self._plans.layout, seconds)
        return replace(result, decisions={**result.decisions, **update.decisions}), reports

    def _run_gossip(self, step: IterationRows) -> IterationResult:
        """Run an iteration of replicas with weights of their own; the slices have the mean.

        A replica that has kept nothing begins with the mean.
        """
        started, run, whole = Clock(), self._run, self._plans.whole
        mean = torch.cat([state.weights for state in self._states])
        replicas, reports = list[_Replica](), dict[int, ReplicaReport]()
        for number, partition in enumerate(self._partitions):
            work = ReplicaIteration(step, number, run.batch_spec, run.shares[number])
            state = open_replica_state(whole.plan, self._kept.get(number, {}), mean.clone())
            replicas.append(_Replica(self._live, work, state))
            if work.rows[1] > work.rows[0] and partition is not None:
                reports[number] = replicas[number].passes(partition)
        if not any(report.not_finite for report in reports.values()):
            self._average(step, replicas, reports)
        started.lap("iteration")
        seconds = {**slowest([r.seconds for r in reports.values()]), **started.seconds}
        return summarize(list(reports.values()), [], self._plans.layout, seconds)

    def _average(
        self, step: IterationRows, replicas: list[_Replica], reports: dict[int, ReplicaReport]
    ) -> None:
        """Let each replica take its step, and average with its neighbours."""
        live, layout, plan = self._live, self._plans.layout, self._plans.whole.plan
        count, options = len(replicas), live.recipe.options
        total = sum(replica.weight for replica in replicas)
        for replica in replicas if total else ():
            replica.steps(self._plans.whole, count * replica.weight / total)
        wire = options.wire_dtype or layout.dtype
        sent = [replica.state.weights.to(wire, copy=True) for replica in replicas]
        weights = TOPOLOGIES[str(options.topology)](count, step.index)
        for number, replica in enumerate(replicas):
            others = {(number - places) % count: w for places, w in weights.items() if places}
            heard = [(others[other], sent[other]) for other in sorted(others)]
            distance = mix(replica.state.weights, sent[number].to(layout.dtype), heard, layout)
            if number in reports:
                losses = {**reports[number].losses, DISTANCE: (distance, 1.0)}
                reports[number] = replace(reports[number], losses=losses)
        own = [replica.state for replica in replicas]
        self._kept |= {number: keep_replica(plan, state) for number, state in enumerate(own)}
        mean = own[0].weights.clone()
        for part in averaged_parts(layout):
            add_up(mean[part], [state.weights[part] for state in own])
        for each, state in zip(self._plans.slices, self._states, strict=True):
            state.weights.copy_(mean[each.start : each.stop])

    def _replica(
        self, step: IterationRows, replica: int, weights: Sequence[torch.Tensor]
    ) -> tuple[ReplicaReport, list[Section], ReplicaResult]:
        """Do the work of a replica with rows; return its report, its sections, and the result."""
        live, plans, clock = self._live, self._plans.slices, Clock(self._now)
        partition, mine = self._partitions[replica], self._kept.get(replica, {})
        assert partition is not None
        work = ReplicaIteration(step, replica, self._run.batch_spec, self._run.shares[replica])
        batches = work.mini_batches(live, partition, live.recipe.options.local_steps)
        clock.lap("data")
        self._load_weights(weights)
        memory, writer = None, None
        if writes_early(live):
            maps = section_maps(live, plans, ReplicaResult())
            memory = self._section_memory(replica, maps)
            writer = GradientWriter(live, plans, maps, memory)
        if not live.recipe.options.steps_on_replicas:
            clock.lap("fetch")
            outcome = one_gradient(live, batches[0], work, clock, writer)
        else:
            device = live.flat.flat.device
            if live.recipe.options.outer:
                state = open_inner(self._plans.whole.plan, mine, device)
            else:
                state = join_states(plans, self._states, device)
            clock.lap("fetch")
            each = (to_mini_batch(batch, live) for batch in batches)
            outcome = several_steps(live, each, work, state, self._plans.whole, clock)
        if live.recipe.compression is not None:
            outcome = compress_outcome(live, outcome, work, mine)
            clock.lap("compress")
        maps = section_maps(live, plans, outcome)
        if memory is None:
            memory = self._section_memory(replica, maps)
        sections = write_sections(live, plans, maps, outcome, memory)
        problem = not_finite(live, plans, sections, outcome)
        clock.lap("publish")
        written = [replace(section, replica=replica, others=outcome.others) for section in sections]
        return outcome.report(replica, clock, problem), written, outcome

    def _load_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy the weights of all slices into the live module."""
        flat = self._live.flat
        for plan, part in zip(self._plans.slices, weights, strict=True):
            flat.flat[plan.start : plan.stop].copy_(part)
        flat.refresh()

    def _section_memory(self, replica: int, maps: Sequence[SectionLayout]) -> np.ndarray:
        """Return zeroed memory for the sections of a replica, which the next iteration uses again."""
        nbytes = sum(sections_nbytes(self._live, self._plans.slices, maps))
        known = self._memory.get(replica)
        if known is not None and known.nbytes == nbytes:
            known.fill(0)
            return known
        made = self._memory[replica] = np.zeros(nbytes, np.uint8)
        return made

    def _synchronize(
        self, step: IterationRows, reports: list[ReplicaReport], sections: list[list[Section]]
    ) -> list[SliceReport]:
        """Do the work of the tasks of the parameter-synchronization job."""
        owners, clocks = self._plans.owners, [Clock() for _ in self._plans.owners]
        total = sum(report.weight for report in reports)
        loss = sum(r.loss * r.weight for r in reports) / total if total else 0.0
        by_slice = [[replica[n] for replica in sections] for n in range(len(owners))]
        known: list[ReducedGradient | None] = [None] * len(owners)
        squares = [0.0] * len(owners)
        for n, (owner, state) in enumerate(zip(owners, self._states, strict=True)):
            if owner.clips_norm:
                clocks[n] = Clock()
                out = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
                reduced = known[n] = owner.reduce(by_slice[n], state.weights, out)
                squares[n] = owner.squared_norm(reduced)
                clocks[n].lap("reduce")
        slices = []
        for n, (owner, state) in enumerate(zip(owners, self._states, strict=True)):
            clock = Clock()
            updated = owner.update(
                state,
                state,
                by_slice[n],
                step.hyperparameters,
                known=known[n],
                squares=squares,
                loss=loss,
                seed=step.update_seed(self._run.seed),
                shown=owner.plan.parameters if step.histograms else (),
            )
            clock.lap("update")
            seconds = {**clocks[n].seconds, **clock.seconds}
            slices.append(
                SliceReport(
                    n, "", None, seconds=seconds, norm=updated.norm, histograms=updated.histograms
                )
            )
        return slices

    def score(self) -> list[Any]:
        """Score the validation partitions one after another."""
        validation = self._validation
        assert validation is not None
        with torch_threads(self._run.threads):
            self._load_weights([weights_of(state, CURRENT) for state in self._states])
            scorer, how = validation.scorer, (validation.batch_spec, validation.batch_size)
            states = [
                score_partition(self._live, partition, scorer, *how)
                for partition in self._validation_partitions
                if partition is not None
            ]
        return validation.scorer.merge(states)

    def keep_best(self) -> None:
        """Copy the current weights as the best ones."""
        self._best = [SliceState(weights_of(state, CURRENT).clone()) for state in self._states]

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        """Join the slices' weights into one flat vector."""
        states = self._best if which == BEST else self._states
        return torch.cat([weights_of(state, which) for state in states])

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Apply ``use`` to one slice after another, and give up older versions, as other engines do."""
        self._older.clear()
        plans, states = self._plans.slices, self._best if which == BEST else self._states
        return [use(n, plans[n], state) for n, state in enumerate(states)]

    def load_residuals(self, read: ReadResiduals) -> None:
        """Read the residuals of every replica."""
        found = {replica: read(replica) for replica in range(self._run.replicas)}
        self._kept = {replica: kept for replica, kept in found.items() if kept is not None}

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Apply ``use`` to the residuals of one replica after another."""
        return [use(replica, kept) for replica, kept in sorted(self._kept.items())]


@dataclass(frozen=True)
class ComputedTurn:
    """A gradient of a group."""

    ends: float  # the virtual time when it arrives
    reports: list[ReplicaReport]
    sections: list[list[Section]]


class LocalGroupEngine(LocalEngine):
    """An engine that computes each turn as it begins, and lets it arrive after a virtual time.

    It has one thread, so a turn takes no time of others. It is the reference for the shuffle engine:
    with the same order of turns it has the same bits.
    """

    def __init__(
        self,
        samples: SampleSet,
        run: RunSpec,
        recipe: bytes,
        batch_size: int,
        validation: ValidationSet | None,
        model: Asynchronous,
        recorded: Mapping[int, Decisions] | None = None,
        seconds: Callable[[Turn], float] = lambda turn: 1.0,
    ) -> None:
        super().__init__(samples, run, recipe, batch_size, validation)
        self._turns = GroupTurns(model, run.replicas, recorded)
        self._seconds, self._time = seconds, 0.0
        self._computed: dict[int, ComputedTurn] = {}
        self._arrived: list[int] = []
        self._readable: dict[int, list[torch.Tensor]] = {}
        self._asked: Iteration | None = None

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Make the commits of an iteration in this process."""
        with torch_threads(self._run.threads):
            clock = Clock()
            self._asked, self._made = iteration, 0
            self._done, self._slices = list[ReplicaReport](), list[SliceReport]()
            _, decisions = self._turns.run(iteration, self)
            clock.lap("iteration")
            seconds = {**slowest([report.seconds for report in self._done]), **clock.seconds}
            result = summarize(self._done, self._slices, self._plans.layout, seconds)
            return replace(result, decisions=decisions)

    def begin(self, turn: Turn) -> None:
        """Compute the gradient of a turn; see :class:`sparkdl.consistency.asynchronous.Workplace`."""
        assert self._asked is not None
        step = self._turns.iteration_of(turn, self._asked, self.plan)
        weights = self._readable.get(turn.version) or [state.weights for state in self._states]
        found = ComputedTurn(self._time + self._seconds(turn), [], [])
        for replica in self._turns.replicas_of(turn.group):
            start, stop = step.rows[replica]
            if stop > start:
                report, sections, _ = self._replica(step, replica, weights)
                found.reports.append(report)
                found.sections.append(sections)
        self._computed[turn.group] = found

    def wait(self) -> list[int]:
        """Return the groups whose turns end next."""
        waiting = {g: t.ends for g, t in self._computed.items() if g not in self._arrived}
        self._time = min(waiting.values())
        arrived = sorted(group for group, ends in waiting.items() if ends == self._time)
        self._arrived += arrived
        return arrived

    def apply(self, commits: Sequence[Commit]) -> None:
        """Make one version after another."""
        assert self._asked is not None
        optimizer, asked = self._plans.owners[0].optimizer, self._asked
        rates = scaled_rates(optimizer, asked.hyperparameters, self._turns.share, self._turns.scale)
        for commit in commits:
            turns = [self._computed.pop(turn.group) for turn in commit]
            self._arrived = [group for group in self._arrived if group in self._computed]
            reports = [report for turn in turns for report in turn.reports]
            sections = [each for turn in turns for each in turn.sections]
            if self._turns.most:
                self._readable[self._version] = [state.weights.clone() for state in self._states]
                self._readable.pop(self._version - self._turns.most, None)
            self._version += 1
            self._done += reports
            index = self._turns.commit_index(asked, self._made)
            self._made += 1
            if reports and not any(report.not_finite for report in reports):
                own = replace(asked, index=index, hyperparameters=rates)
                self._slices = self._synchronize(own.with_rows(()), reports, sections)

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.Engine`."""
        super().load(read, which)
        if which == CURRENT:
            self._drop()
            self._turns.reset()

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Apply ``use`` to one slice after another, and give up turns as other engines do."""
        self._drop()
        return super().map_slices(use, which)

    def _drop(self) -> None:
        """Give up older versions, and gradients that are not applied."""
        self._turns.give_up()
        self._computed.clear()
        self._arrived.clear()
        self._readable.clear()


def local_engine(
    samples: SampleSet,
    run: RunSpec,
    recipe: bytes,
    batch_size: int,
    validation: ValidationSet | None,
    model: Consistency,
    recorded: Mapping[int, Decisions] | None = None,
) -> LocalEngine:
    """Build the local engine for a consistency model."""
    if isinstance(model, Asynchronous):
        return LocalGroupEngine(samples, run, recipe, batch_size, validation, model, recorded)
    return LocalEngine(samples, run, recipe, batch_size, validation, model)

"""The local engine, which runs iterations in this process without Spark jobs.

It serves for debugging and as the reference for the shuffle engine: the same M and N give the same
bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.base import Consistency, Update, next_update
from sparkdl.consistency.stragglers import StragglerLimit
from sparkdl.consistency.synchronous import Synchronous
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.local.gossip import gossip
from sparkdl.engines.local.replicas import LocalReplicas, open_all
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.loop.engine import BEST, CURRENT, ReadResiduals, ReadState, weights_of
from sparkdl.loop.iteration_result import IterationResult, slowest, summarize
from sparkdl.process.determinism import torch_threads
from sparkdl.replica.iteration import Clock, Iteration, IterationRows, ReplicaReport, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.replica.score import score_partition
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState


class LocalEngine:
    """An engine that runs M replicas in turn on one live module, then updates N slices in turn.

    It opens all samples at the start. Mapped samples stay readable even if their files are deleted.
    ``batch_size`` includes local steps; ``now`` is the replicas' clock, in seconds.
    """

    recoveries = 0
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
        self._run = run
        self._replicas = LocalReplicas(samples, run, recipe, now)
        self._plans = self._replicas.plans
        self._states: list[SliceState] = []
        self._best: list[SliceState] = []
        self._consistency = consistency or Synchronous()
        self._stragglers = StragglerLimit(self._consistency.may_drop)
        self._older: deque[list[torch.Tensor]] = deque(maxlen=self._consistency.keep - 1)
        self._version = 0

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Set the state of every slice, from the recipe's weights or from ``read`` if it is given.

        See :class:`sparkdl.loop.engine.Engine`. ``reported`` is not needed here, because exceptions
        of ``read`` are raised directly.
        """
        if read is None and self._states:  # the replica's weights have changed since it was built
            self._replicas.build()
        flat = self._replicas.live.flat.flat
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
            if self._replicas.live.recipe.options.topology is not None:
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
                report, mine, outcome = self._replicas.run(step, replica, weights, self._states)
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
            self._replicas.keep(kept)
            self._version += 1
        started.lap("iteration")
        seconds = slowest([*[r.seconds for r in reports], *[s.seconds for s in slices]])
        seconds = {**seconds, **started.seconds}
        result = summarize(reports, slices, self._plans.layout, seconds)
        return replace(result, decisions={**result.decisions, **update.decisions}), reports

    def _run_gossip(self, step: IterationRows) -> IterationResult:
        """Run an iteration of replicas with weights of their own; the slices have the mean."""
        started = Clock()
        mean = torch.cat([state.weights for state in self._states])
        replicas = self._replicas
        done = gossip(
            replicas.live, self._plans, self._run, replicas.partitions, step, mean, replicas.kept
        )
        if done.mean is not None:
            for plan, state in zip(self._plans.slices, self._states, strict=True):
                state.weights.copy_(done.mean[plan.start : plan.stop])
            replicas.keep(done.kept)
        started.lap("iteration")
        seconds = {**slowest([report.seconds for report in done.reports]), **started.seconds}
        return summarize(done.reports, [], self._plans.layout, seconds)

    def _synchronize(
        self,
        step: IterationRows,
        reports: list[ReplicaReport],
        sections: list[list[Section]],
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
            self._replicas.load_weights([weights_of(state, CURRENT) for state in self._states])
            states = [
                score_partition(
                    self._replicas.live,
                    partition,
                    validation.scorer,
                    validation.batch_spec,
                    validation.batch_size,
                )
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

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """Read the residuals of every replica."""
        found = {replica: read(replica) for replica in range(self._run.replicas)}
        self._replicas.keep_only({r: kept for r, kept in found.items() if kept is not None})

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Apply ``use`` to the residuals of one replica after another."""
        return [use(replica, kept) for replica, kept in sorted(self._replicas.kept.items())]

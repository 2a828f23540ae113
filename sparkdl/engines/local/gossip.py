"""Gossip in one process: all replicas in turn on one live module, the reference for ranks of a gang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.gossip import DISTANCE, TOPOLOGIES, add_up, averaged_parts, mix
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.inner_state import keep_replica, open_replica_state
from sparkdl.replica.iteration import Clock, IterationRows, ReplicaReport
from sparkdl.replica.local_sgd import problem_of_step, step_alone, without_rows
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.replica.step import ReplicaIteration, one_gradient
from sparkdl.slices.state import SliceState
from sparkdl.slices.update import SliceUpdater


@dataclass(frozen=True)
class Gossiped:
    """The result of an iteration."""

    reports: list[ReplicaReport]
    kept: Mapping[int, ByParameter]  # of every replica; empty: the update was skipped
    mean: torch.Tensor | None  # of their flat vectors; None: the update was skipped


def gossip(
    live: LiveReplica,
    plans: OpenRun,
    run: RunSpec,
    partitions: Sequence[MappedPartition | None],
    step: IterationRows,
    mean: torch.Tensor,
    kept: Mapping[int, ByParameter],
) -> Gossiped:
    """Run an iteration of all replicas, each on its own weights; those of ``live`` are lost.

    A replica that has kept nothing begins with ``mean``.
    """
    layout, plan = live.flat.layout, plans.whole.plan
    replicas, reports = list[_Replica](), dict[int, ReplicaReport]()
    for number in range(run.replicas):
        work = ReplicaIteration(step, number, run.batch_spec, run.shares[number])
        state = open_replica_state(plan, kept.get(number, {}), mean.clone())
        replicas.append(_Replica(live, work, state))
        partition = partitions[number]
        if work.rows[1] > work.rows[0] and partition is not None:
            reports[number] = replicas[number].passes(partition)
    if any(report.not_finite for report in reports.values()):
        return Gossiped(list(reports.values()), {}, None)
    total = sum(replica.weight for replica in replicas)
    for replica in replicas if total else ():
        replica.steps(plans.whole, run.replicas * replica.weight / total)
    wire = live.recipe.options.wire_dtype or layout.dtype
    sent = [replica.state.weights.to(wire, copy=True) for replica in replicas]
    weights = TOPOLOGIES[str(live.recipe.options.topology)](run.replicas, step.index)
    for number, replica in enumerate(replicas):
        others = {(number - places) % run.replicas: w for places, w in weights.items() if places}
        heard = [(others[other], sent[other]) for other in sorted(others)]
        distance = mix(replica.state.weights, sent[number].to(layout.dtype), heard, layout)
        if number in reports:
            losses = {**reports[number].losses, DISTANCE: (distance, 1.0)}
            reports[number] = replace(reports[number], losses=losses)
    states = [replica.state for replica in replicas]
    new = {number: keep_replica(plan, state) for number, state in enumerate(states)}
    found = states[0].weights.clone()
    for part in averaged_parts(layout):
        add_up(found[part], [state.weights[part] for state in states])
    return Gossiped(list(reports.values()), new, found)


class _Replica:
    """A replica in an iteration."""

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
        return ReplicaReport(
            self._work.replica,
            result.count,
            result.weight,
            result.loss,
            "",
            clock.seconds,
            problem,
            losses=result.losses,
        )

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

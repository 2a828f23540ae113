"""Gossip in one process: all replicas in turn on one live module, the reference for ranks of a gang."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.consistency.gossip import DISTANCE, TOPOLOGIES, add_up, averaged_parts, mix
from sparkdl.data.partition_reader import MappedPartition
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compute import Gradients
from sparkdl.replica.inner_state import keep_replica, open_replica_state
from sparkdl.replica.iteration import Clock, IterationRows, ReplicaReport
from sparkdl.replica.local_sgd import numbers_not_finite, step_alone, without_rows
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.replica.step import ReplicaIteration, one_gradient
from sparkdl.slices.state import SliceState


@dataclass(frozen=True)
class Gossiped:
    """The result of an iteration.

    Attributes:
        reports: The reports of the replicas with rows.
        kept: The new state of every replica; empty if the update was skipped.
        mean: The mean of their flat vectors; None if the update was skipped.
    """

    reports: list[ReplicaReport]
    kept: Mapping[int, ByParameter]
    mean: torch.Tensor | None


@dataclass
class _Replica:
    """A replica in an iteration: its part of it, its state, and what its forward pass has left."""

    work: ReplicaIteration
    state: SliceState
    gradients: Gradients
    loss: float = 0.0
    weight: float = 0.0


def gossip(
    live: LiveReplica,
    plans: OpenRun,
    run: RunSpec,
    partitions: Sequence[MappedPartition | None],
    step: IterationRows,
    mean: torch.Tensor,
    kept: Mapping[int, ByParameter],
) -> Gossiped:
    """Run an iteration of all replicas, each on its own weights.

    Args:
        live: The module and its flat vector, whose values are lost.
        plans: The plans of the run.
        run: The run.
        partitions: The samples of each replica.
        step: The iteration.
        mean: The flat vector of a replica that has kept nothing.
        kept: The tensors that each replica has kept.
    """
    layout, options, plan = live.flat.layout, live.recipe.options, plans.whole.plan
    replicas, reports = list[_Replica](), list[ReplicaReport]()
    for number in range(run.replicas):
        work = ReplicaIteration(step, number, run.batch_spec, run.shares[number])
        state = open_replica_state(plan, kept.get(number, {}), mean.clone())
        replicas.append(_Replica(work, state, without_rows(live)))
        if work.rows[1] > work.rows[0]:
            reports.append(_passed(live, replicas[-1], partitions[number]))
    if any(report.not_finite for report in reports):
        return Gossiped(reports, {}, None)
    total = sum(replica.weight for replica in replicas)
    for replica in replicas if total else ():
        _load(live, replica.state.weights)
        state = replace(replica.state, weights=live.flat.flat)
        factor = run.replicas * replica.weight / total
        step_alone(
            live, replica.gradients, replica.work, state, plans.whole, replica.loss, factor=factor
        )
        replica.state.weights.copy_(state.weights)
        replica.state.arrays = state.arrays
    sent = [
        replica.state.weights.to(options.wire_dtype or layout.dtype, copy=True)
        for replica in replicas
    ]
    weights = TOPOLOGIES[str(options.topology)](run.replicas, step.index)
    for number, replica in enumerate(replicas):
        others = {(number - places) % run.replicas: w for places, w in weights.items() if places}
        heard = [(others[other], sent[other]) for other in sorted(others)]
        own = sent[number].to(layout.dtype)
        distance = mix(replica.state.weights, own, heard, layout)
        reports = [
            replace(report, losses={**report.losses, DISTANCE: (distance, 1.0)})
            if report.replica == number
            else report
            for report in reports
        ]
    states = [replica.state for replica in replicas]
    new = {number: keep_replica(plan, state) for number, state in enumerate(states)}
    found = states[0].weights.clone()
    for part in averaged_parts(layout):
        add_up(found[part], [state.weights[part] for state in states])
    return Gossiped(reports, new, found)


def _passed(
    live: LiveReplica, replica: _Replica, partition: MappedPartition | None
) -> ReplicaReport:
    """Run forward and backward of a replica, and return its report."""
    assert partition is not None
    clock = Clock()
    (batch,) = replica.work.mini_batches(live, partition)
    clock.lap("data")
    _load(live, replica.state.weights)
    clock.lap("fetch")
    result = one_gradient(live, batch, replica.work, clock)
    live.flat.save_buffers(replica.state.weights)
    replica.gradients, replica.loss, replica.weight = result.gradients, result.loss, result.weight
    wrong = numbers_not_finite(live, result.gradients)
    problem = f'the gradient of "{live.flat.parameters[min(wrong)][0].name}"' if wrong else ""
    if not math.isfinite(result.loss):
        problem = f"the loss ({result.loss})"
    return ReplicaReport(
        replica.work.replica,
        result.count,
        result.weight,
        result.loss,
        "",
        clock.seconds,
        problem,
        losses=result.losses,
    )


def _load(live: LiveReplica, weights: torch.Tensor) -> None:
    live.flat.flat.copy_(weights)
    live.flat.refresh()

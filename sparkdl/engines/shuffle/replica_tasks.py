"""Tasks of the forward-backward job, one at each of M replicas.

They run as :mod:`sparkdl.engines.shuffle.replica_context` says. Each is safe to run twice.

Task bodies and helpers for compressed gradients: the compression hook, and replicas' residuals.

A replica's residuals are what it keeps between iterations: the part of its gradients that
compression left out, and the state of the hook; or the state of its own optimizer
(:class:`sparkdl.DiLoCo`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pyspark import cloudpickle

from sparkdl.codec.packed import ByParameter, encode
from sparkdl.data.batches import BatchSpec
from sparkdl.data.partition_reader import open_partition
from sparkdl.engines.shuffle.messages import (
    MOVED,
    RESIDUAL_FOREIGN,
    GradientHeader,
    IterationMessage,
    Nodes,
    OneStageReport,
)
from sparkdl.engines.shuffle.replica_context import ReplicaContext
from sparkdl.engines.shuffle.store import joined_state, read_residuals, write_residuals
from sparkdl.engines.shuffle.update_tasks import apply_pending, buffer_size, offered
from sparkdl.errors import DamagedCheckpoint
from sparkdl.loop.engine import ReadResiduals
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.recipe import LiveReplica
from sparkdl.process.system import label_output
from sparkdl.replica.iteration import Clock, Fault, ReplicaReport, ResidualHandle, SliceReport
from sparkdl.replica.local_sgd import open_inner, several_steps
from sparkdl.replica.run import full_gpu_explained, open_replica, plans_of
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
from sparkdl.slab.pool import Claim, Pool, leave_room
from sparkdl.slices.section import SectionLayout
from sparkdl.slices.spec import SliceSpec, SliceState
from sparkdl.spark.frames import send


@torch.no_grad()
def compress_here(
    live: LiveReplica,
    outcome: ReplicaResult,
    work: ReplicaIteration,
    message: IterationMessage,
    pool: Pool,
) -> tuple[ReplicaResult, ResidualHandle]:
    """Compress a replica's outcome in a task, with the residuals in this node's slabs."""
    before = _handle(message, work.replica)
    kept = read_residuals(pool, before) if before else {}
    outcome = compress_outcome(live, outcome, work, kept)
    handle = write_residuals(pool, work.replica, before, outcome.kept, message.submission)
    if before:
        pool.check(before.reference)
    return outcome, handle


def inner_state(
    work: ReplicaIteration,
    message: IterationMessage,
    pool: Pool,
    plan: SliceSpec,
    device: torch.device,
) -> SliceState:
    """Return the state that a replica kept for its own optimizer in this node's slabs."""
    before = _handle(message, work.replica)
    if before is None:
        return open_inner(plan, {}, device)
    state = open_inner(plan, read_residuals(pool, before), device)
    pool.check(before.reference)
    return state


def keep_here(
    work: ReplicaIteration, message: IterationMessage, pool: Pool, kept: ByParameter
) -> ResidualHandle:
    """Write what a replica keeps into this node's slabs; see :func:`inner_state`."""
    before = _handle(message, work.replica)
    return write_residuals(pool, work.replica, before, kept, message.submission)


def residual_fault(step: IterationMessage, replica: int, node_id: str) -> Fault | None:
    """Return a fault if the task does not run on the node that holds its replica's residuals."""
    before = _handle(step, replica)
    if before is None or before.reference.node_id == node_id:
        return None
    return Fault(RESIDUAL_FOREIGN, replica, node_id)


def _handle(step: IterationMessage, replica: int) -> ResidualHandle | None:
    return step.residuals[replica] if step.residuals else None


def map_residuals(
    handles: tuple[ResidualHandle | None, ...],
    use: Callable[[int, ByParameter], Any],
    context: ReplicaContext,
) -> Iterator[bytes]:
    """Task at each replica: call ``use(replica, residuals)``.

    Yields one frame, a pickled (replica, result); the result is None if the replica has no
    residuals yet.
    """
    handle, result = handles[context.index], None
    if handle is not None:
        result = use(context.index, read_residuals(context.pool, handle))
        context.pool.check(handle.reference)
    yield pickle.dumps((context.index, result))


def initial_residuals(
    read: ReadResiduals, submission: int, context: ReplicaContext
) -> Iterator[bytes]:
    """Task at each replica: write the residuals that ``read(replica)`` returns.

    Yields one frame, a pickled (replica, handle or None), or (replica, exception) if ``read``
    raises DamagedCheckpoint.
    """
    result: ResidualHandle | Exception | None = None
    try:
        kept = read(context.index)
    except DamagedCheckpoint as error:
        result = error
    else:
        if kept is not None:
            result = write_residuals(context.pool, context.index, None, kept, submission)
    yield pickle.dumps((context.index, result))


BORROW_FROM = 1 << 20
"""The number of elements of a flat vector from which computing with weights in slabs is faster
than copying them first."""


def send_gradients(
    step: IterationMessage, nodes: Nodes | None, context: ReplicaContext
) -> Iterator[bytes]:
    """Task at a replica: run it for one iteration, and send a frame to each slice's owner.

    If ``nodes`` sum first, gradients stay here and frames go to them.
    """
    sent = compute_sections(context, step, nodes)
    if nodes is not None:
        yield from offered(context.index, nodes, [header for header, _ in sent])
    else:
        for n, (header, payload) in enumerate(sent):
            yield from send(n, encode(header, payload))


def leave_gradients(step: IterationMessage, context: ReplicaContext) -> Iterator[bytes]:
    """Task at a replica: run it for one iteration, and leave its gradients in slabs of this node.

    If gradients of the iteration before are pending, the task first applies these to all slices.
    Every replica computes the same update, equal to the owners' bit for bit. This is for models so
    small that it costs less than a stage.

    Yields one frame, a pickled :class:`OneStageReport`.
    """
    reports: tuple[SliceReport, ...] = ()
    if step.pending is not None and context.fault() is None:
        reports = tuple(apply_pending(step, n, context.run) for n in range(context.run.slices))
        new = tuple(report.state for report in reports if report.state is not None)
        assert len(new) == context.run.slices
        if not step.reads:
            context = replace(context, states=new)
    headers = tuple(header for header, _ in compute_sections(context, step))
    yield pickle.dumps(OneStageReport(headers, reports))


Sent = tuple[GradientHeader, torch.Tensor | None]
"""A replica's header for a slice and, if the slice is on another node, the bytes."""


def compute_sections(
    context: ReplicaContext, step: IterationMessage, nodes: Nodes | None = None
) -> list[Sent]:
    """Run forward and backward, write the gradients, and return what goes to each slice.

    With ``nodes``, which sum their gradients first, all gradients go by reference.
    """
    fault = context.fault() or residual_fault(step, context.index, context.pool.node_id)
    if (
        fault is None
        and nodes is not None
        and nodes.replicas[context.index] != context.pool.node_id
    ):
        fault = Fault(MOVED, context.index, context.pool.node_id)
    if fault is not None:
        return [(GradientHeader(context.index, fault=fault), None)] * context.run.slices
    run = context.run
    work = ReplicaIteration(step, context.index, run.batch_spec, run.shares[context.index])
    start, stop = work.rows
    if stop > start:
        return _compute_sections(context, step, work, everything_here=nodes is not None)
    report = ReplicaReport(
        context.index, 0, 0.0, 0.0, context.pool.node_id, received=context.received
    )
    return [(header, None) for header in _headers(context, ReplicaResult(), report)]


@full_gpu_explained()
def _compute_sections(
    context: ReplicaContext, step: IterationMessage, work: ReplicaIteration, everything_here: bool
) -> list[Sent]:
    pool, clock = context.pool, Clock()
    label_output(f"replica {context.index}, iteration {step.index + 1}")
    clock.seconds["fetch"] = context.waited
    live, plans = open_replica(context.run), plans_of(context.run).slices
    residual = None
    with contextlib.ExitStack() as claims:

        def room(outcome: ReplicaResult) -> tuple[list[SectionLayout], list[int], Claim]:
            maps = section_maps(live, plans, outcome)
            sizes = sections_nbytes(live, plans, maps)
            nbytes = buffer_size(sum(sizes), *maps)
            claim = pool.claim("gradient", nbytes, step.submission, step.oldest_gradients)
            return maps, sizes, claims.enter_context(claim)

        early, writer = None, None
        if writes_early(live):
            early = room(ReplicaResult())
            writer = GradientWriter(live, plans, early[0], early[2].bytes)
        outcome = _outcome(context, step, work, clock, writer)
        if live.recipe.compression is not None:
            outcome, residual = compress_here(live, outcome, work, step, pool)
            clock.lap("compress")
        elif outcome.kept:
            residual = keep_here(work, step, pool, outcome.kept)
        maps, sizes, claim = early or room(outcome)
        sections = write_sections(live, plans, maps, outcome, claim.bytes)
    problem = not_finite(live, plans, sections, outcome)
    clock.lap("publish")
    report = outcome.report(
        context.index,
        clock,
        problem,
        node_id=pool.node_id,
        received=context.received,
        residual=residual,
    )
    sent: list[Sent] = []
    place = 0
    for n, header in enumerate(_headers(context, outcome, report)):
        here = everything_here or context.states[n].node_id == pool.node_id
        reference = claim.reference.part(place, sizes[n]) if here else None
        payload = None if here else torch.from_numpy(claim.bytes[place : place + sizes[n]])
        sent.append((replace(header, section=maps[n], reference=reference), payload))
        place += sizes[n]
    leave_room(live.device)
    return sent


def _outcome(
    context: ReplicaContext,
    step: IterationMessage,
    work: ReplicaIteration,
    clock: Clock,
    writer: GradientWriter | None,
) -> ReplicaResult:
    """Do the replica's part of the iteration, and return its outcome."""
    live = open_replica(context.run)
    local_steps = live.recipe.options.local_steps
    batches = work.mini_batches(live, open_partition(context.samples), local_steps)
    clock.lap("data")
    if writer is not None and _may_borrow(context, live):
        live = context.borrowing()
        clock.lap("fetch")
        outcome = one_gradient(live, batches[0], work, clock, writer)
        context.check()
        return outcome
    live = context.replica()
    if not live.recipe.options.steps_on_replicas:
        clock.lap("fetch")
        return one_gradient(live, batches[0], work, clock, writer)
    plans, flat = plans_of(context.run), live.flat.flat
    if live.recipe.options.outer:
        state = inner_state(work, step, context.pool, plans.whole.plan, flat.device)
    else:
        state = joined_state(
            plans.slices, context.states, context.arrived, context.pool, plans.dtype, flat.device
        )
    clock.lap("fetch")
    each = (to_mini_batch(batch, live) for batch in batches)
    return several_steps(live, each, work, state, plans.whole, clock)


def _may_borrow(context: ReplicaContext, live: LiveReplica) -> bool:
    """Return whether the replica can compute with weights in slabs, and that is faster."""
    here = not context.arrived and live.device.type == "cpu"
    return here and not live.recipe.options.compile and live.flat.layout.size >= BORROW_FROM


def _headers(
    context: ReplicaContext, outcome: ReplicaResult, report: ReplicaReport
) -> list[GradientHeader]:
    return [
        GradientHeader(
            replica=context.index,
            weight=outcome.weight,
            loss=outcome.loss,
            absent=outcome.gradients.absent,
            others=outcome.others,
            finite=not report.not_finite,
            report=report if n == 0 else None,
            passed=outcome.passed,
        )
        for n in range(context.run.slices)
    ]


def score_samples(
    scorer: Scorer, batch_spec: BatchSpec, batch_size: int, context: ReplicaContext
) -> Iterator[bytes]:
    """Task at a replica with validation samples: score them.

    Yields one frame, a pickled (replica, states) or (replica, fault); none without samples.
    """
    fault = context.fault()
    if fault is not None:
        yield pickle.dumps((context.index, fault))
    elif context.samples.num_rows:
        label_output(f"replica {context.index}, validation")
        partition = open_partition(context.samples)
        states = score_partition(context.replica(), partition, scorer, batch_spec, batch_size)
        yield cloudpickle.dumps((context.index, states))  # a metric may be defined in __main__

"""Task bodies and helpers for compressed gradients: the compression hook, and replicas' residuals.

A replica's residuals are what it keeps between iterations: the part of its gradients that
compression left out, and the state of the hook; or the state of its own optimizer
(:class:`sparkdl.DiLoCo`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.engines.shuffle.faults import RESIDUAL_FOREIGN
from sparkdl.engines.shuffle.messages import IterationMessage
from sparkdl.engines.shuffle.replica_context import ReplicaContext
from sparkdl.engines.shuffle.store import read_residuals, write_residuals
from sparkdl.loop.engine import ReadResiduals
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.inner_state import open_inner
from sparkdl.replica.iteration import Fault, ResidualHandle
from sparkdl.replica.step import ReplicaIteration, ReplicaResult, compress_outcome
from sparkdl.slab.pool import Pool
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.spark.worker import finish_task


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


@dataclass(frozen=True)
class WithResiduals:
    """Task at each replica: call ``use(replica, residuals)``.

    Yields one frame, a pickled (replica, result); the result is None if the replica has no
    residuals yet.
    """

    handles: tuple[ResidualHandle | None, ...]
    use: Callable[[int, ByParameter], Any]

    def __call__(self, context: ReplicaContext) -> Iterator[bytes]:
        handle, result = self.handles[context.index], None
        if handle is not None:
            result = self.use(context.index, read_residuals(context.pool, handle))
            context.pool.check(handle.reference)
        yield pickle.dumps((context.index, result))
        finish_task()


@dataclass(frozen=True)
class InitialResiduals:
    """Task at each replica: write the residuals that ``read(replica)`` returns.

    Yields one frame, a pickled (replica, handle or None), or (replica, exception) if ``read``
    raises one of ``reported``.
    """

    read: ReadResiduals
    reported: tuple[type[Exception], ...] = ()
    submission: int = 0

    def __call__(self, context: ReplicaContext) -> Iterator[bytes]:
        result: ResidualHandle | Exception | None = None
        try:
            kept = self.read(context.index)
        except self.reported as error:
            result = error
        else:
            if kept is not None:
                result = write_residuals(context.pool, context.index, None, kept, self.submission)
        yield pickle.dumps((context.index, result))
        finish_task()

"""Between a replica's gradients and what it sends: the hook that compresses, and what is kept."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.engines.shuffle.messages import RESIDUAL_FOREIGN, IterationMessage
from sparkdl.engines.shuffle.replica_context import ReplicaContext
from sparkdl.engines.shuffle.store import read_residuals, write_residuals
from sparkdl.loop.engine import ReadResiduals
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.iteration import Fault, ResidualHandle
from sparkdl.replica.step import ReplicaIteration, ReplicaResult, compress_outcome
from sparkdl.slab.pool import Pool
from sparkdl.spark.worker import finish_task


@torch.no_grad()
def compress_here(
    live: LiveReplica,
    outcome: ReplicaResult,
    work: ReplicaIteration,
    message: IterationMessage,
    pool: Pool,
) -> tuple[ReplicaResult, ResidualHandle]:
    """Likewise in a task: what is kept is read from this node's slabs and written there."""
    before = _handle(message, work.replica)
    kept = read_residuals(pool, before) if before else {}
    outcome = compress_outcome(live, outcome, work, kept)
    handle = write_residuals(pool, work.replica, before, outcome.kept, message.tick)
    if before:
        pool.check(before.reference)
    return outcome, handle


def residual_fault(step: IterationMessage, replica: int, token: str) -> Fault | None:
    """Where the task is not on the node that holds what its replica keeps."""
    before = _handle(step, replica)
    if before is None or before.reference.token == token:
        return None
    return Fault(RESIDUAL_FOREIGN, replica, token)


def _handle(step: IterationMessage, replica: int) -> ResidualHandle | None:
    return step.residuals[replica] if step.residuals else None


@dataclass(frozen=True)
class WithResiduals:
    """At every replica's place ``use(replica, kept)``; a pickled (replica, result), None where it
    keeps nothing yet."""

    handles: tuple[ResidualHandle | None, ...]
    use: Callable[[int, ByParameter], Any]

    def __call__(self, seat: ReplicaContext) -> Iterator[bytes]:
        handle, result = self.handles[seat.index], None
        if handle is not None:
            result = self.use(seat.index, read_residuals(seat.pool, handle))
            seat.pool.check(handle.reference)
        yield pickle.dumps((seat.index, result))
        finish_task()


@dataclass(frozen=True)
class InitialResiduals:
    """At every replica's place: write what ``read`` gives; a pickled (replica, handle or None), or
    (replica, exception) where it raises one of ``reported``."""

    read: ReadResiduals
    reported: tuple[type[Exception], ...] = ()
    tick: int = 0

    def __call__(self, seat: ReplicaContext) -> Iterator[bytes]:
        result: ResidualHandle | Exception | None = None
        try:
            kept = self.read(seat.index)
        except self.reported as error:
            result = error
        else:
            if kept is not None:
                result = write_residuals(seat.pool, seat.index, None, kept, self.tick)
        yield pickle.dumps((seat.index, result))
        finish_task()

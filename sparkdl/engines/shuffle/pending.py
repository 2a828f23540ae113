"""Task bodies at the owners for gradients in slabs of their node, whose headers the driver has.

If all replicas and owners are on one node, nothing has to travel except messages and reports. Each
stage is then a job of its own, without a shuffle between them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sparkdl.engines.shuffle.messages import IterationMessage, ReducedHeader
from sparkdl.engines.shuffle.state_tasks import run_of
from sparkdl.engines.shuffle.update_tasks import Frame, reduce_slice, synchronize, update_slice
from sparkdl.replica.iteration import SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.spark.message import posted
from sparkdl.spark.worker import finish_task


@dataclass(frozen=True)
class ApplyPending:
    """Body over the owner RDD: apply the pending gradients as the synchronization stage does.

    A ``step`` of None stands for the job's message, see :mod:`sparkdl.spark.message`.
    """

    step: IterationMessage | None = None

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        step = self.step or posted(run.key)
        yield pickle.dumps(apply_pending(step, partition, run))
        finish_task()


@dataclass(frozen=True)
class ReducePending:
    """Body over the owner RDD: reduce the pending gradients as the reduction stage does."""

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        step = posted(run.key)
        yield pickle.dumps(reduce_slice(step, partition, run, _frames(step, partition)))
        finish_task()


@dataclass(frozen=True)
class Reductions:
    """The message of an update after :class:`ReducePending`: the step, and each slice's header."""

    step: IterationMessage
    headers: tuple[ReducedHeader, ...]


@dataclass(frozen=True)
class UpdateReduced:
    """Body over the owner RDD: update from :class:`Reductions` as the update stage does."""

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        given: Reductions = posted(run.key)
        report = update_slice(given.step, partition, run, given.headers)
        yield pickle.dumps(report)
        finish_task()


def apply_pending(step: IterationMessage, partition: int, run: RunSpec) -> SliceReport:
    """Bring slice ``partition`` to the version after the pending iteration, and return its report.

    Args:
        step: The iteration that is submitted, which names the pending gradients.
        partition: The number of the slice.
        run: The constants of the run.
    """
    pending = step.pending
    assert pending is not None
    own = pending.index == step.index
    then = replace(
        step, hyperparameters=pending.hyperparameters, histograms=step.histograms and own
    )
    try:
        return synchronize(then, partition, run, _frames(step, partition))
    except Exception as error:
        if not own:
            error.add_note(f"This is the update at the end of iteration {pending.index + 1}.")
        raise


def _frames(step: IterationMessage, partition: int) -> list[Frame]:
    assert step.pending is not None
    return [(header, memoryview(b"")) for header in step.pending.headers[partition]]

"""Task bodies of parameter synchronization, in which N tasks own a slice each.

Each is the body of one Spark task: it takes frames, yields frames, and is safe to run twice. Sections
come through a shuffle. If all replicas and slices are on one node, nothing has to travel except
messages and reports: then the driver has the headers of the sections, which lie in slabs of the node,
and each stage is a job of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sparkdl.codec.frames import decode, encode
from sparkdl.engines.shuffle.clipped_updates import reduce_slice, update_slice
from sparkdl.engines.shuffle.messages import IterationMessage, ReducedHeader
from sparkdl.engines.shuffle.report_sinks import ReportSink, to_driver
from sparkdl.engines.shuffle.slice_updates import Frame, synchronize
from sparkdl.engines.shuffle.state_tasks import run_of
from sparkdl.replica.iteration import SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.spark.frames import send
from sparkdl.spark.worker import finish_task


@dataclass(frozen=True)
class Synchronize:
    """Body of the synchronization stage: reduce slice n, update it, and write version t+1."""

    step: IterationMessage
    tell: ReportSink = to_driver

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, run = _read(pairs)
        yield from self.tell(synchronize(self.step, partition, run, frames), run)
        finish_task()


@dataclass(frozen=True)
class Reduce:
    """Body of the reduction stage, which exists if the global norm must be known before the update.

    It reduces slice n into a slab, and sends every slice its part of the norm.
    """

    step: IterationMessage

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, run = _read(pairs)
        header = reduce_slice(self.step, partition, run, frames)
        yield from send(partition, encode(header))
        told = encode(ReducedHeader(partition, header.squares))
        for other in range(run.slices):
            if other != partition:
                yield from send(other, told)
        finish_task()


@dataclass(frozen=True)
class Update:
    """Body of the update stage after :class:`Reduce`: clip by the global norm and update slice n."""

    step: IterationMessage
    tell: ReportSink = to_driver

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, run = _read(pairs)
        frames.sort(key=lambda frame: frame[0].index)
        headers = [header for header, _ in frames]
        report = update_slice(self.step, partition, run, headers)
        yield from self.tell(report, run)
        finish_task()


def _read(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[list[Frame], RunSpec]:
    frames, owner = [], b""
    for frame, record in pairs:
        frames.append(decode(frame))
        owner = owner or record
    return frames, pickle.loads(owner)


@dataclass(frozen=True)
class ApplyPending:
    """Body over the owner RDD: apply the pending gradients as the synchronization stage does."""

    step: IterationMessage

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        yield pickle.dumps(apply_pending(self.step, partition, run))
        finish_task()


@dataclass(frozen=True)
class ReducePending:
    """Body over the owner RDD: reduce the pending gradients as the reduction stage does."""

    step: IterationMessage

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        sections = _pending_frames(self.step, partition)
        yield pickle.dumps(reduce_slice(self.step, partition, run, sections))
        finish_task()


@dataclass(frozen=True)
class UpdateReduced:
    """Body over the owner RDD: update from each slice's header as the update stage does."""

    step: IterationMessage
    headers: tuple[ReducedHeader, ...]

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        report = update_slice(self.step, partition, run, self.headers)
        yield pickle.dumps(report)
        finish_task()


def apply_pending(step: IterationMessage, partition: int, run: RunSpec) -> SliceReport:
    """Bring slice ``partition`` to the version after the pending iteration; return its report."""
    pending = step.pending
    assert pending is not None
    own = pending.index == step.index
    then = replace(
        step,
        hyperparameters=pending.hyperparameters,
        histograms=step.histograms and own,
        limit=step.limit if own else None,  # gradients that fall short are not left pending
    )
    try:
        return synchronize(then, partition, run, _pending_frames(step, partition))
    except Exception as error:
        if not own:
            error.add_note(f"This is the update at the end of iteration {pending.index + 1}.")
        raise


def _pending_frames(step: IterationMessage, partition: int) -> list[Frame]:
    assert step.pending is not None
    return [(header, memoryview(b"")) for header in step.pending.headers[partition]]

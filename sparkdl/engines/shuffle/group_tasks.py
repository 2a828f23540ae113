"""Messages and task bodies of groups that advance at their own pace.

A group's job runs its replicas. If all weights and slices are on one node, its gradients stay in
slabs there. Otherwise they go through a shuffle to the owners of the slices, who put them into slabs.
Either way the driver gets the headers, and a commit is a job of the owners that takes references.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparkdl.codec.frames import decode
from sparkdl.data.epoch import derive_seed
from sparkdl.engines.shuffle.faults import STATE_FOREIGN
from sparkdl.engines.shuffle.messages import GradientHeader, IterationMessage, OneStageReport
from sparkdl.engines.shuffle.replica_context import ReplicaContext
from sparkdl.engines.shuffle.replica_tasks import compute_sections
from sparkdl.engines.shuffle.slice_updates import ReadSections, read_sections
from sparkdl.engines.shuffle.state_tasks import run_of
from sparkdl.engines.shuffle.store import next_version
from sparkdl.replica.iteration import Clock, Fault, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slab.pool import open_pool
from sparkdl.slices.rates import scaled_rates
from sparkdl.slices.state import SliceState
from sparkdl.spark.worker import finish_task

Headers = tuple[tuple[GradientHeader, ...], ...]
"""For each slice, the headers of some replicas in order."""


@dataclass(frozen=True, kw_only=True)
class TurnMessage(IterationMessage):
    """A turn of a group as the driver submits it."""

    oldest_gradient: int = 0  # the submission of the oldest that is not applied yet

    @property
    def oldest_gradients(self) -> int:
        """Return the submission below which gradients are no longer needed."""
        return self.oldest_gradient


@dataclass(frozen=True)
class CommitEntry:
    """A commit: one optimizer step."""

    index: int  # seeds the update
    headers: Headers


@dataclass(frozen=True, kw_only=True)
class CommitMessage(IterationMessage):
    """Commits that are made one after another, of which the last one is kept as a version."""

    entries: tuple[CommitEntry, ...]
    share: float
    scale: str | None


@dataclass(frozen=True)
class TakeTurn:
    """Task at a replica: run one replica for a turn, and leave its gradients in slabs of this node.

    Yields one frame, a pickled :class:`OneStageReport`.
    """

    step: TurnMessage

    def __call__(self, context: ReplicaContext) -> Iterator[bytes]:
        headers = tuple(header for header, _ in compute_sections(context, self.step))
        yield pickle.dumps(OneStageReport(headers))
        finish_task()


@dataclass(frozen=True)
class KeepGradients:
    """Body over (frame, owner) pairs: write arriving gradients into slabs of the slice's node.

    Yields one frame, the pickled headers in order of the replicas.
    """

    step: TurnMessage

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, owner = [], b""
        for frame, record in pairs:
            frames.append(decode(frame))
            owner = owner or record
        run: RunSpec = pickle.loads(owner)
        step, pool = self.step, open_pool(run.slab)
        foreign = step.states[partition].node_id != pool.node_id
        kept: list[GradientHeader] = []
        for header, payload in sorted(frames, key=lambda frame: frame[0].replica):
            if foreign:
                header = replace(header, fault=Fault(STATE_FOREIGN, partition, pool.node_id))
            elif len(payload):
                nbytes = len(payload)
                with pool.claim("arrived", nbytes, step.submission, step.oldest_gradients) as claim:
                    claim.bytes[:] = np.frombuffer(payload, np.uint8)
                header = replace(header, reference=claim.reference)
            kept.append(header)
        yield pickle.dumps(tuple(kept))
        finish_task()


@dataclass(frozen=True)
class ApplyCommits:
    """Body over the owner RDD: make the commits of a message, and write the version after them."""

    step: CommitMessage

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        yield pickle.dumps(_apply(self.step, partition, run))
        finish_task()


def _apply(step: CommitMessage, partition: int, run: RunSpec) -> SliceReport:
    """Make commits on slice ``partition``. One whose gradients are not finite changes nothing, nor
    does one of groups without rows."""
    clock, done = Clock(), list[tuple[CommitEntry, ReadSections]]()
    report = SliceReport(partition, open_pool(run.slab).node_id, step.states[partition])
    for entry in step.entries:
        frames = [(header, memoryview(b"")) for header in entry.headers[partition]]
        found = read_sections(step, partition, run, frames)
        if isinstance(found, SliceReport) and found.faults:
            return found
        if isinstance(found, ReadSections) and found.sections:
            done.append((entry, found))
    if not done:
        return report
    updater, pool = done[0][1].updater, done[0][1].pool
    state = step.states[partition]
    with next_version(pool, state, updater.dtype, step.submission, step.oldest_needed) as made:
        old, new, to = made
        rates = scaled_rates(updater.optimizer, step.hyperparameters, step.share, step.scale)
        norm = None
        for entry, found in done:
            norm = _update(old, new, found, rates, derive_seed(run.seed, "update", entry.index))
            found.check()
            old = new
        handle = to.seal(new)
    clock.lap("update")
    return replace(report, state=handle, seconds=clock.seconds, norm=norm)


def _update(
    old: SliceState,
    new: SliceState,
    found: ReadSections,
    hyperparameters: Sequence[Mapping[str, Any]] | None,
    seed: int,
) -> float | None:
    """Make one step from ``old`` to ``new``, and return the norm before clipping, if it is clipped."""
    owner, known, squares = found.updater, None, [0.0]
    if owner.clips_norm:
        out = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        known = owner.reduce(found.sections, old.weights, out)
        squares = [owner.squared_norm(known)]
    return owner.update(
        old,
        new,
        found.sections,
        hyperparameters,
        known=known,
        squares=squares,
        loss=found.loss,
        seed=seed,
    ).norm

"""Task bodies of the parameter-synchronization job, in which N tasks own a slice each.

Each is the body of one Spark task: it takes frames, yields frames, and is safe to run twice.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.codec.frames import decode, encode
from sparkdl.engines.shuffle.messages import (
    STATE_FOREIGN,
    GradientHeader,
    IterationMessage,
    ReducedHeader,
)
from sparkdl.engines.shuffle.report_sinks import ReportSink, to_driver
from sparkdl.engines.shuffle.store import next_version
from sparkdl.replica.iteration import Clock, Fault, SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import Pool, Reference, open_pool
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section, SectionLayout, open_section
from sparkdl.slices.update import SliceUpdater
from sparkdl.spark.frames import send
from sparkdl.spark.message import posted
from sparkdl.spark.worker import finish_task

Frame = tuple[Any, memoryview]
_scratch: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
_KEEP = 2


@dataclass(frozen=True)
class Synchronize:
    """Body of the synchronization stage: reduce slice n, update it, and write version t+1.

    Attributes:
        step: The iteration; None: that of the job's message, see :mod:`sparkdl.spark.message`. The
            same holds for the bodies below.
        tell: The sink of the report and the new weights.
    """

    step: IterationMessage | None = None
    tell: ReportSink = to_driver

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, run = _read(pairs)
        step = self.step or posted(run.key)
        yield from self.tell(synchronize(step, partition, run, frames), run)
        finish_task()


def synchronize(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> SliceReport:
    """Reduce slice ``partition``, update it, write the next version, and return its report.

    Args:
        step: The iteration.
        partition: The number of the slice.
        run: The constants of the run.
        frames: The replicas' headers and payloads, in any order.
    """
    clock, pool = Clock(), open_pool(run.slab)
    report = _checked(partition, pool, frames)
    if report.faults or report.skipped:
        return report
    owner = plans_of(run).owners[partition]
    contributions = _contributions(owner, pool, frames)
    state = frames[0][0].state
    loss = _loss(frames)
    with next_version(pool, state, owner.dtype, step.tick, step.floor) as versions:
        old, new, to = versions
        known, squares, keep = None, [0.0], None
        if owner.clips_norm:
            known = owner.reduce(contributions, old.weights, _scratch_tensor(run, owner))
            squares = [owner.squared_norm(known)]
            clock.lap("reduce")
        if step.histograms:
            keep = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        updated = owner.update(
            old,
            new,
            contributions,
            step.hyperparameters,
            known=known,
            squares=squares,
            loss=loss,
            seed=step.update_seed(run.seed),
            keep=keep,
        )
        _check_references(pool, frames)
        handle = to.seal(new)
        histograms = owner.histograms(new, updated.reduced) if step.histograms else {}
    clock.lap("update")
    return replace(
        report, state=handle, seconds=clock.seconds, norm=updated.norm, histograms=histograms
    )


@dataclass(frozen=True)
class Reduce:
    """Body of the reduction stage, which exists if the global norm must be known before the update.

    It reduces slice n into a slab, and sends every slice its part of the norm.
    """

    step: IterationMessage | None = None

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, run = _read(pairs)
        header = reduce_slice(self.step or posted(run.key), partition, run, frames)
        yield from send(partition, encode(header))
        told = encode(ReducedHeader(partition, header.squares))
        for other in range(run.slices):
            if other != partition:
                yield from send(other, told)
        finish_task()


def reduce_slice(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> ReducedHeader:
    """Reduce slice ``partition`` into a slab, and return a header with its part of the norm.

    Args:
        step: The iteration.
        partition: The number of the slice.
        run: The constants of the run.
        frames: The replicas' headers and payloads, in any order.
    """
    clock, pool = Clock(), open_pool(run.slab)
    report = _checked(partition, pool, frames)
    if report.faults or report.skipped:
        return ReducedHeader(partition, report=report)
    owner = plans_of(run).owners[partition]
    state = frames[0][0].state
    contributions = _contributions(owner, pool, frames)
    weights = pool.read(state.weights).view(str(owner.dtype).removeprefix("torch."))
    reduced = owner.reduce(contributions, torch.from_numpy(weights), _scratch_tensor(run, owner))
    pool.check(state.weights)
    section = owner.reduced_map(reduced)
    nbytes = owner.reduced_nbytes(section)
    with pool.claim("reduced", buffer_size(nbytes, section), step.tick, step.tick) as to:
        owner.write_reduced(section, reduced, contributions, to.bytes[:nbytes])
        reference = to.reference.part(0, nbytes)
    _check_references(pool, frames)
    squares = owner.squared_norm(reduced)
    clock.lap("reduce")
    return ReducedHeader(
        partition,
        squares,
        _loss(frames),
        section,
        reference,
        reduced.absent,
        state,
        replace(report, seconds=clock.seconds),
    )


@dataclass(frozen=True)
class Update:
    """Body of the update stage after :class:`Reduce`: clip by the global norm and update slice n."""

    step: IterationMessage | None = None
    tell: ReportSink = to_driver

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        frames, run = _read(pairs)
        frames.sort(key=lambda frame: frame[0].index)
        headers = [header for header, _ in frames]
        report = update_slice(self.step or posted(run.key), partition, run, headers)
        yield from self.tell(report, run)
        finish_task()


def update_slice(
    step: IterationMessage, partition: int, run: RunSpec, headers: Sequence[ReducedHeader]
) -> SliceReport:
    """Clip the reduced gradient of slice ``partition`` by the global norm, and update the slice.

    Args:
        step: The iteration.
        partition: The number of the slice.
        run: The constants of the run.
        headers: The results of :func:`reduce_slice` for all slices, in order.
    """
    clock, pool = Clock(), open_pool(run.slab)
    mine = headers[partition]
    report = mine.report
    assert report is not None
    if report.faults or report.skipped or mine.reference is None:
        return report
    if mine.reference.token != pool.token:
        return replace(report, faults=(Fault(STATE_FOREIGN, partition, pool.token),))
    assert mine.section is not None
    assert mine.state is not None
    owner = plans_of(run).owners[partition]
    alone = open_section(
        owner.plan, owner.dtype, mine.section, pool.read(mine.reference), absent=mine.absent
    )
    with next_version(pool, mine.state, owner.dtype, step.tick, step.floor) as (
        old,
        new,
        to,
    ):
        keep = None
        if step.histograms:
            keep = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        updated = owner.update(
            old,
            new,
            [alone],
            step.hyperparameters,
            known=ReducedGradient(alone.gradient, alone.absent, dict(alone.tables)),
            squares=[header.squares for header in headers],
            loss=mine.loss,
            seed=step.update_seed(run.seed),
            keep=keep,
        )
        pool.check(mine.reference)
        handle = to.seal(new)
        histograms = owner.histograms(new, updated.reduced) if step.histograms else {}
    clock.lap("update")
    return replace(
        report,
        state=handle,
        seconds={**report.seconds, **clock.seconds},
        norm=updated.norm,
        histograms=histograms,
    )


def buffer_size(nbytes: int, *sections: SectionLayout) -> int:
    """Return the size of the buffer to claim.

    For sections of variable size it is a power of two, so that there are few sizes.
    """
    if any(section.rows or section.compressed for section in sections):
        return 1 << max(nbytes - 1, 4095).bit_length()
    return nbytes


def _read(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[list[Frame], RunSpec]:
    frames, owner = [], b""
    for frame, record in pairs:
        frames.append(decode(frame))
        owner = owner or record
    return frames, pickle.loads(owner)


def _checked(partition: int, pool: Pool, frames: list[Frame]) -> SliceReport:
    """Sort the frames by replica, and return a report with any reason not to update."""
    frames.sort(key=lambda frame: frame[0].replica)
    headers: list[GradientHeader] = [header for header, _ in frames]
    faults = tuple(header.fault for header in headers if header.fault)
    reports = tuple(header.report for header in headers if header.report)
    state = headers[0].state
    if not faults and state is not None and state.token != pool.token:
        faults = (Fault(STATE_FOREIGN, partition, pool.token),)
    skipped = not faults and not all(header.finite for header in headers)
    received = {header.replica: len(payload) for header, payload in frames if len(payload)}
    kept = state if skipped else None
    return SliceReport(
        partition, pool.token, kept, reports, faults, received=received, skipped=skipped
    )


def _contributions(owner: SliceUpdater, pool: Pool, frames: list[Frame]) -> list[Section]:
    return [
        open_section(
            owner.plan,
            owner.dtype,
            header.section,
            payload if header.reference is None else pool.read(header.reference),
            replica=header.replica,
            weight=header.weight,
            absent=header.absent,
            others=header.others,
        )
        for header, payload in frames
        if header.section is not None
    ]


def _check_references(pool: Pool, frames: list[Frame]) -> None:
    """Check that no buffer was overwritten while it was read, see [Note: who may write a buffer]."""
    references: list[Reference] = [h.reference for h, _ in frames if h.reference is not None]
    for reference in references:
        pool.check(reference)


def _loss(frames: list[Frame]) -> float:
    """Return the mean loss over the global batch."""
    headers = [header for header, _ in frames if header.section is not None]
    total = sum(header.weight for header in headers)
    return sum(header.loss * header.weight for header in headers) / total if total else 0.0


def _scratch_tensor(run: RunSpec, owner: SliceUpdater) -> torch.Tensor:
    """Return memory for the reduced gradient of a slice, which is kept between tasks."""
    key = (run.key, owner.plan.index)
    tensor = _scratch.get(key)
    if tensor is None:
        tensor = _scratch[key] = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        while len(_scratch) > _KEEP:
            _scratch.popitem(last=False)
    return tensor

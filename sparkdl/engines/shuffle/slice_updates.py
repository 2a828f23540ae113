"""The update of one slice in a task, in one stage or in two, and what it reads.

Each function is safe to call twice: it reads the newest version and writes buffers of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.engines.shuffle.faults import STATE_FOREIGN
from sparkdl.engines.shuffle.messages import (
    GradientHeader,
    IterationMessage,
    ReducedHeader,
)
from sparkdl.engines.shuffle.store import next_version
from sparkdl.replica.iteration import Clock, Fault, SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import Pool, Reference, open_pool
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section, SectionLayout, open_section
from sparkdl.slices.update import SliceUpdater

Frame = tuple[Any, memoryview]
"""The header of a frame and its payload."""
_scratch: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
_KEEP = 2


@dataclass(frozen=True)
class ReadSections:
    """The sections of all replicas for one slice, and what they are applied to.

    Attributes:
        updater: The constants of the slice.
        pool: The slabs of this node.
        state: The version that the update is applied to.
        sections: The sections, in order of the replicas.
        loss: The mean loss over the global batch.
        report: The report so far.
        references: The references to the sections that lie in slabs of this node.
    """

    updater: SliceUpdater
    pool: Pool
    state: SliceHandle
    sections: list[Section]
    loss: float
    report: SliceReport
    references: list[Reference]

    def check(self) -> None:
        """Check that no section was overwritten while it was read.

        Raises:
            sparkdl.errors.StaleReferenceError: One was; see [Note: who may write a buffer].
        """
        for reference in self.references:
            self.pool.check(reference)


def read_sections(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> ReadSections | SliceReport:
    """Open the sections of all replicas for slice ``partition``.

    Args:
        step: The iteration.
        partition: The number of the slice.
        run: The constants of the run.
        frames: The replicas' headers and payloads, in any order.

    Returns:
        The sections; or a report, if there is a reason not to update.
    """
    pool, state = open_pool(run.slab), step.states[partition]
    frames = sorted(frames, key=lambda frame: frame[0].replica)
    headers: list[GradientHeader] = [header for header, _ in frames]
    faults = tuple(header.fault for header in headers if header.fault)
    if not faults and state.node_id != pool.node_id:
        faults = (Fault(STATE_FOREIGN, partition, pool.node_id),)
    passed = tuple(header.passed for header in headers) if step.limit is not None else ()
    counts = all(header.finite for header in headers) and not step.falls_short(passed)
    skipped = not faults and not counts
    report = SliceReport(
        partition,
        pool.node_id,
        state if skipped else None,
        tuple(header.report for header in headers if header.report),
        faults,
        received={header.replica: len(payload) for header, payload in frames if len(payload)},
        skipped=skipped,
        passed=passed,
    )
    if faults or skipped:
        return report
    updater = plans_of(run).owners[partition]
    sections = [
        open_section(
            updater.plan,
            updater.dtype,
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
    references = [header.reference for header in headers if header.reference is not None]
    return ReadSections(updater, pool, state, sections, _loss(headers), report, references)


def _loss(headers: Sequence[GradientHeader]) -> float:
    """Return the mean loss over the global batch."""
    filled = [header for header in headers if header.section is not None]
    total = sum(header.weight for header in filled)
    return sum(header.loss * header.weight for header in filled) / total if total else 0.0


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
    clock = Clock()
    found = read_sections(step, partition, run, frames)
    if isinstance(found, SliceReport):
        return found
    owner, pool, sections = found.updater, found.pool, found.sections
    with next_version(
        pool, found.state, owner.dtype, step.submission, step.oldest_needed
    ) as versions:
        old, new, to = versions
        known, squares, keep = None, [0.0], None
        if owner.clips_norm:
            known = owner.reduce(sections, old.weights, _scratch_tensor(run, owner))
            squares = [owner.squared_norm(known)]
            clock.lap("reduce")
        if step.histograms:
            keep = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        updated = owner.update(
            old,
            new,
            sections,
            step.hyperparameters,
            known=known,
            squares=squares,
            loss=found.loss,
            seed=step.update_seed(run.seed),
            keep=keep,
        )
        found.check()
        handle = to.seal(new)
        histograms = owner.histograms(new, updated.reduced) if step.histograms else {}
    clock.lap("update")
    return replace(
        found.report, state=handle, seconds=clock.seconds, norm=updated.norm, histograms=histograms
    )


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
    clock = Clock()
    found = read_sections(step, partition, run, frames)
    if isinstance(found, SliceReport):
        return ReducedHeader(partition, report=found)
    owner, pool, sections, at = found.updater, found.pool, found.sections, found.state.weights
    weights = pool.read(at).view(str(owner.dtype).removeprefix("torch."))
    reduced = owner.reduce(sections, torch.from_numpy(weights), _scratch_tensor(run, owner))
    pool.check(at)
    section = owner.reduced_map(reduced)
    nbytes = owner.reduced_nbytes(section)
    with pool.claim(
        "reduced", buffer_size(nbytes, section), step.submission, step.submission
    ) as to:
        owner.write_reduced(section, reduced, sections, to.bytes[:nbytes])
        reference = to.reference.part(0, nbytes)
    found.check()
    squares = owner.squared_norm(reduced)
    clock.lap("reduce")
    report = replace(found.report, seconds=clock.seconds)
    return ReducedHeader(partition, squares, found.loss, section, reference, reduced.absent, report)


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
    if mine.reference.node_id != pool.node_id:
        return replace(report, faults=(Fault(STATE_FOREIGN, partition, pool.node_id),))
    assert mine.section is not None
    owner = plans_of(run).owners[partition]
    alone = open_section(
        owner.plan, owner.dtype, mine.section, pool.read(mine.reference), absent=mine.absent
    )
    state = step.states[partition]
    with next_version(pool, state, owner.dtype, step.submission, step.oldest_needed) as (
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


def _scratch_tensor(run: RunSpec, owner: SliceUpdater) -> torch.Tensor:
    """Return memory for the reduced gradient of a slice, which is kept between tasks."""
    key = (run.key, owner.plan.index)
    tensor = _scratch.get(key)
    if tensor is None:
        tensor = _scratch[key] = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        while len(_scratch) > _KEEP:
            _scratch.popitem(last=False)
    return tensor

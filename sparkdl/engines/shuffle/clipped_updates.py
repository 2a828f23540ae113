"""The update of one slice in two tasks, between which the norm of the gradients of all slices is known.

The first task leaves the slice's reduced gradient in a slab, as the section of a single replica. Each
function is safe to call twice: it reads the newest version and writes buffers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparkdl.engines.shuffle.faults import STATE_FOREIGN
from sparkdl.engines.shuffle.messages import IterationMessage, ReducedHeader
from sparkdl.engines.shuffle.slice_updates import Frame, buffer_size, read_sections, scratch_tensor
from sparkdl.engines.shuffle.store import next_version
from sparkdl.replica.iteration import Clock, Fault, SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import open_pool
from sparkdl.slices.reduce import ReducedGradient, merge_buffers
from sparkdl.slices.section import Section, SectionLayout, open_section, section_nbytes
from sparkdl.slices.update import SliceUpdater


def reduce_slice(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> ReducedHeader:
    """Reduce slice ``partition`` into a slab, and return a header with its part of the norm."""
    clock = Clock()
    found = read_sections(step, partition, run, frames)
    if isinstance(found, SliceReport):
        return ReducedHeader(partition, report=found)
    owner, pool, sections, at = found.updater, found.pool, found.sections, found.state.weights
    weights = pool.read(at).view(str(owner.dtype).removeprefix("torch."))
    reduced = owner.reduce(sections, torch.from_numpy(weights), scratch_tensor(run, owner))
    pool.check(at)
    rows = {number: len(rows) for number, (rows, _) in reduced.tables.items()}
    section = SectionLayout(owner.dtype, rows)
    nbytes = section_nbytes(owner.plan, owner.dtype, section)
    with pool.claim(
        "reduced", buffer_size(nbytes, section), step.submission, step.submission
    ) as to:
        place = open_section(owner.plan, owner.dtype, section, to.bytes[:nbytes])
        _write(place, owner, reduced, sections, step.update_seed(run.seed))
        reference = to.reference.part(0, nbytes)
    found.check()
    squares = owner.squared_norm(reduced)
    clock.lap("reduce")
    report = replace(found.report, seconds=clock.seconds)
    weight = sum(section.weight for section in sections)
    return ReducedHeader(
        partition, squares, found.loss, section, reference, reduced.absent, report, weight
    )


def update_slice(
    step: IterationMessage, partition: int, run: RunSpec, headers: Sequence[ReducedHeader]
) -> SliceReport:
    """Clip the reduced gradient of slice ``partition`` by the global norm, and update the slice."""
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
        owner.plan,
        owner.dtype,
        mine.section,
        pool.read(mine.reference),
        weight=mine.weight,
        absent=mine.absent,
    )
    state = step.states[partition]
    with next_version(pool, state, owner.dtype, step.submission, step.oldest_needed) as (
        old,
        new,
        to,
    ):
        updated = owner.update(
            old,
            new,
            [alone],
            step.hyperparameters,
            known=ReducedGradient(alone.gradient, alone.absent, dict(alone.tables)),
            squares=[header.squares for header in headers],
            loss=mine.loss,
            seed=step.update_seed(run.seed),
            shown=owner.plan.parameters if step.histograms else (),
        )
        pool.check(mine.reference)
        handle = to.seal(new)
    clock.lap("update")
    return replace(
        report,
        state=handle,
        seconds={**report.seconds, **clock.seconds},
        norm=updated.norm,
        histograms=updated.histograms,
    )


@torch.no_grad()
def _write(
    place: Section,
    owner: SliceUpdater,
    reduced: ReducedGradient,
    sections: Sequence[Section],
    seed: int,
) -> None:
    """Write the reduced gradient, and the merged buffers of all replicas, into a section.

    What replicas have added to buffers is added to zero, so that the section has it as theirs do.
    """
    place.gradient.copy_(reduced.gradient)
    for number, rows in reduced.tables.items():
        for target, source in zip(place.tables[number], rows, strict=True):
            target.copy_(source)
    merged = torch.zeros(owner.plan.length, dtype=owner.dtype)
    merge_buffers(owner.plan, sections, merged, seed)
    place.buffers.copy_(merged[owner.plan.buffers_start :])

"""The sections that a task reads for one slice, and the update that a single task makes of them.

Each function is safe to call twice: it reads the newest version and writes buffers of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.engines.shuffle.faults import STATE_FOREIGN
from sparkdl.engines.shuffle.messages import GradientHeader, IterationMessage
from sparkdl.engines.shuffle.store import next_version
from sparkdl.replica.iteration import Clock, Fault, SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import Pool, Reference, open_pool
from sparkdl.slab.release import released
from sparkdl.slices.section import Section, SectionLayout, open_section
from sparkdl.slices.update import SliceUpdater

Frame = tuple[Any, memoryview]
"""The header of a frame and its payload."""
_scratch: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
_KEEP = 2


@released
def _forget_scratch(run: str) -> None:
    for key in [key for key in list(_scratch) if key[0] == run]:
        _scratch.pop(key, None)


@dataclass(frozen=True)
class ReadSections:
    """The sections of all replicas for one slice, and what they are applied to."""

    updater: SliceUpdater
    pool: Pool
    state: SliceHandle  # the version to update
    sections: list[Section]  # in order of the replicas
    loss: float
    report: SliceReport
    references: list[Reference]

    def check(self) -> None:
        """Raise StaleReferenceError if a section was overwritten while it was read."""
        for reference in self.references:
            self.pool.check(reference)


def read_sections(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> ReadSections | SliceReport:
    """Open the sections of all replicas for a slice; a report is a reason not to update it."""
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
    """Reduce slice ``partition``, update it, write the next version, and return its report."""
    clock = Clock()
    found = read_sections(step, partition, run, frames)
    if isinstance(found, SliceReport):
        return found
    owner, pool, sections = found.updater, found.pool, found.sections
    with next_version(
        pool, found.state, owner.dtype, step.submission, step.oldest_needed
    ) as versions:
        old, new, to = versions
        known, squares = None, [0.0]
        if owner.clips_norm:
            known = owner.reduce(sections, old.weights, scratch_tensor(run, owner))
            squares = [owner.squared_norm(known)]
            clock.lap("reduce")
        updated = owner.update(
            old,
            new,
            sections,
            step.hyperparameters,
            known=known,
            squares=squares,
            loss=found.loss,
            seed=step.update_seed(run.seed),
            shown=owner.plan.parameters if step.histograms else (),
        )
        found.check()
        handle = to.seal(new)
    clock.lap("update")
    return replace(
        found.report,
        state=handle,
        seconds=clock.seconds,
        norm=updated.norm,
        histograms=updated.histograms,
    )


def buffer_size(nbytes: int, *sections: SectionLayout) -> int:
    """Return the size of the buffer to claim.

    For sections of variable size it is a power of two, so that there are few sizes.
    """
    if any(section.rows or section.compressed for section in sections):
        return 1 << max(nbytes - 1, 4095).bit_length()
    return nbytes


def scratch_tensor(run: RunSpec, owner: SliceUpdater) -> torch.Tensor:
    """Return memory for the reduced gradient of a slice, which is kept between tasks."""
    key = (run.key, owner.plan.index)
    tensor = _scratch.get(key)
    if tensor is None:
        tensor = _scratch[key] = torch.empty(owner.plan.dense_length, dtype=owner.dtype)
        while len(_scratch) > _KEEP:
            _scratch.popitem(last=False)
    return tensor

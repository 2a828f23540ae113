"""Task bodies of parameter synchronization, in which N tasks own a slice each.

Each is the body of one Spark task: it takes frames, yields frames, and is safe to run twice. Sections
come through a shuffle. If all replicas and slices are on one node, nothing has to travel except
messages and reports: then the driver has the headers of the sections, which lie in slabs of the node,
and each stage is a job of its own.

One task makes the update of a slice; or two, between which the norm of the gradients of all slices is
known. The first of two leaves the slice's reduced gradient in a slab, as the section of a single
replica. Each function is safe to call twice: it reads the newest version and writes buffers of its own.

Task bodies that sum gradients on each node, and that bring new weights to each node once.

Summing comes between forward-backward and synchronization. If other nodes own the slices, each
replica's gradient would have to travel. Instead, the replicas send the tasks of this stage
references to theirs. Each task sums some slices for its node, as far as the node has whole subtrees
(see [Note: the shape of a sum]), and sends every owner as many frames as before, one of which holds
a sum of several. Buffers and touched rows of tables are passed on unchanged, and so are references
to owners on the same node.

Installing weights comes after synchronization. The owner of a slice sends its new weights to one
replica on every other node, where a task writes them into a slab. The replicas of that node
then read this *copy* by reference, as they read the slices of their own node. A copy has the same
age as the state it was made from and lies in buffers of the same submission, so it lives as long (see
[Note: who may write a buffer]).

A slice's report and new weights leave the task after an update in one of two ways. The report goes to
the driver and the weights stay in their slab (:func:`to_driver`). Or both go to the nodes through a
shuffle (:func:`weight_frames`).
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparkdl.codec.packed import as_tensor, decode, encode
from sparkdl.engines.shuffle.messages import (
    MOVED,
    STATE_FOREIGN,
    GradientHeader,
    GradientOffer,
    IterationMessage,
    Nodes,
    NodeWeights,
    ReducedHeader,
    WeightsHeader,
    sum_is_smaller,
)
from sparkdl.engines.shuffle.replica_context import run_of
from sparkdl.engines.shuffle.store import next_version
from sparkdl.replica.iteration import Clock, Fault, SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import Pool, Reference, open_pool, released
from sparkdl.slices.reduce import ReducedGradient, Term, merge_buffers, shares_of, tree_sum
from sparkdl.slices.section import (
    NOTHING,
    SUM,
    Section,
    SectionLayout,
    open_section,
    section_nbytes,
)
from sparkdl.slices.spec import SliceState
from sparkdl.slices.update import SliceUpdater, UpdateResult
from sparkdl.spark.frames import send

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
    dtype, submission = found.updater.dtype, step.submission
    with next_version(found.pool, found.state, dtype, submission, step.oldest_needed) as versions:
        old, new, to = versions
        updated = update_alone(step, run, found, old, new, clock)
        found.check()
        handle = to.seal(new)
    return _updated(found.report, handle, updated, clock)


def update_alone(
    step: IterationMessage,
    run: RunSpec,
    found: ReadSections,
    old: SliceState,
    new: SliceState,
    clock: Clock,
) -> UpdateResult:
    """Make version t+1 of a slice that needs no norm of others."""
    owner, known, squares = found.updater, None, [0.0]
    if owner.clips_norm:
        known = owner.reduce(found.sections, old.weights, scratch_tensor(run, owner))
        squares = [owner.squared_norm(known)]
        clock.lap("reduce")
    return owner.update(
        old,
        new,
        found.sections,
        step.hyperparameters,
        known=known,
        squares=squares,
        loss=found.loss,
        seed=step.update_seed(run.seed),
        shown=owner.plan.parameters if step.histograms else (),
    )


def _updated(
    report: SliceReport, state: SliceHandle, updated: UpdateResult, clock: Clock
) -> SliceReport:
    """Return the report of a slice with its new version."""
    clock.lap("update")
    seconds = {**report.seconds, **clock.seconds}
    norm, histograms = updated.norm, updated.histograms
    return replace(report, state=state, seconds=seconds, norm=norm, histograms=histograms)


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


def reduce_slice(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> ReducedHeader:
    """Reduce slice ``partition`` into a slab, and return a header with its part of the norm.

    This is done if the global norm must be known before the update.
    """
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
    with next_version(pool, state, owner.dtype, step.submission, step.oldest_needed) as versions:
        old, new, to = versions
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
    return _updated(report, handle, updated, clock)


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


def at_slice(
    work: Callable[[int, RunSpec, list[Frame]], Any],
    tell: ReportSink,
    partition: int,
    pairs: Iterable[tuple[bytes, bytes]],
) -> Iterator[bytes]:
    """Body over (frame, owner) pairs: ``tell`` the result of ``work(partition, run, frames)``."""
    frames, run = read_pairs(pairs)
    yield from tell(work(partition, run, frames), run)


def to_slices(header: ReducedHeader, run: RunSpec) -> Iterator[bytes]:
    """Send a slice the header of its reduced gradient, and every other one its part of the norm."""
    yield from send(header.index, encode(header))
    told = encode(ReducedHeader(header.index, header.squares))
    for other in range(run.slices):
        if other != header.index:
            yield from send(other, told)


def update_arrived(
    step: IterationMessage, partition: int, run: RunSpec, frames: list[Frame]
) -> SliceReport:
    """Update a slice with the headers of :func:`to_slices`."""
    headers = sorted((header for header, _ in frames), key=lambda header: header.index)
    return update_slice(step, partition, run, headers)


def reduce_pending(step: IterationMessage, partition: int, run: RunSpec) -> ReducedHeader:
    """Reduce the pending gradients of slice ``partition`` as the reduction stage does."""
    return reduce_slice(step, partition, run, _pending_frames(step, partition))


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


Frame = tuple[Any, memoryview]
"""The header of a frame and its payload."""


def offered(replica: int, nodes: Nodes, headers: Sequence[GradientHeader]) -> Iterator[bytes]:
    """Yield what a replica sends to the tasks of this stage, one frame to each.

    Every frame holds the replica's weight. Those to tasks of its own node also hold the headers of
    the slices that the task sums.
    """
    node_id = nodes.replicas[replica]
    weight = headers[0].weight if headers[0].section is not None else None
    for target, node in enumerate(nodes.replicas):
        mine = {
            n: header
            for n, header in enumerate(headers)
            if node == node_id and nodes.representative(node_id, n) == target
        }
        yield from send(target, encode(GradientOffer(replica, weight, mine)))


def reduce_on_node(
    nodes: Nodes, partition: int, pairs: Iterable[tuple[bytes, bytes]]
) -> Iterator[bytes]:
    """Body of the stage at every replica: sum some slices and send frames to their owners."""
    frames, replica = read_pairs(pairs)
    offers: list[GradientOffer] = sorted((offer for offer, _ in frames), key=lambda o: o.replica)
    run = replica.run
    pool, node_id = open_pool(run.slab), nodes.replicas[partition]
    present = [offer for offer in offers if offer.weight is not None]
    weights = shares_of([offer.weight for offer in present if offer.weight is not None])
    shares = {offer.replica: share for offer, share in zip(present, weights, strict=True)}
    for n in range(run.slices):
        headers = {offer.replica: offer.headers[n] for offer in offers if n in offer.headers}
        if headers and pool.node_id != node_id:
            fault = Fault(MOVED, partition, pool.node_id)
            headers = {m: replace(h, fault=h.fault or fault) for m, h in headers.items()}
        if nodes.slices[n] == node_id or any(header.fault for header in headers.values()):
            for header in headers.values():
                yield from send(n, encode(header))
            continue
        owner = plans_of(run).owners[n]
        for block in nodes.blocks(node_id) if headers else ():
            for m in block:
                if headers[m].section is None:
                    yield from send(n, encode(headers[m]))
            filled = [headers[m] for m in block if headers[m].section is not None]
            for frame in _summed(owner, pool, filled, shares):
                yield from send(n, frame)


def read_pairs(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[list[Frame], Any]:
    """Return the left frames, decoded, and what is pickled in the first right one that is not empty."""
    frames, record = [], b""
    for frame, right in pairs:
        frames.append(decode(frame))
        record = record or right
    return frames, pickle.loads(record)


def _summed(
    owner: SliceUpdater, pool: Pool, headers: Sequence[GradientHeader], shares: Mapping[int, float]
) -> Iterator[bytes]:
    """Yield the frames of a block.

    If a sum takes fewer bytes, the first frame holds it and the others hold no dense gradient.
    """
    plan, dtype = owner.plan, owner.dtype
    if not headers:
        return
    wire = headers[0].section.wire if headers[0].section else dtype
    if not sum_is_smaller(len(headers), wire.itemsize, dtype.itemsize):
        for header in headers:
            assert header.reference is not None
            frame = encode(
                replace(header, reference=None), as_tensor(pool.read(header.reference), torch.uint8)
            )
            pool.check(header.reference)
            yield frame
        return
    terms = []
    for header in headers:
        assert header.section is not None
        assert header.reference is not None
        mine = open_section(plan, dtype, header.section, pool.read(header.reference))
        terms.append(Term(header.replica, mine.gradient, shares[header.replica]))
    for i, header in enumerate(headers):
        assert header.section is not None
        assert header.reference is not None
        section = replace(header.section, gradient=NOTHING if i else SUM)
        rest = section_nbytes(plan, dtype, replace(section, gradient=NOTHING))
        payload = torch.empty(section_nbytes(plan, dtype, section), dtype=torch.uint8)
        if i == 0:
            tree_sum(terms, open_section(plan, dtype, section, payload.numpy()).gradient)
            for other in headers:
                assert other.reference is not None
                pool.check(other.reference)
        if rest:
            source = pool.read(header.reference)
            payload[-rest:] = as_tensor(source[len(source) - rest :], torch.uint8)
            pool.check(header.reference)
        yield encode(replace(header, section=section, reference=None), payload)


def weight_frames(nodes: Nodes, report: SliceReport, run: RunSpec) -> Iterator[bytes]:
    """Yield one frame to every replica.

    The report goes to the first replica. The slice's new weights, if there are any, go to one replica
    on each other node.
    """
    pool = open_pool(run.slab)
    news = report.state is not None and not (report.faults or report.skipped)
    weights = report.state.weights if news and report.state is not None else None
    payload = None if weights is None else as_tensor(pool.read(weights), torch.uint8)
    for place, node_id in enumerate(nodes.replicas):
        takes = node_id != pool.node_id and nodes.representative(node_id, report.index) == place
        told = report if place == 0 else None
        header = WeightsHeader(report.index, told, takes and payload is not None)
        frame = encode(header, payload if takes else None)
        if weights is not None:
            pool.check(weights)
        yield from send(place, frame)


def send_weights(
    states: tuple[SliceHandle, ...], nodes: Nodes, partition: int, frames: Iterable[bytes]
) -> Iterator[bytes]:
    """Body over the owner RDD: send the weights of version t (``states``) to nodes without them.

    This is needed before the first iteration, and whenever version t comes from elsewhere.
    """
    run = run_of(frames)
    node_id, state = open_pool(run.slab).node_id, states[partition]
    report = SliceReport(partition, node_id, state)
    if state.node_id != node_id:
        faults = (Fault(STATE_FOREIGN, partition, node_id),)
        report = SliceReport(partition, node_id, None, faults=faults)
    yield from weight_frames(nodes, report, run)


def receive_weights(
    step: IterationMessage, partition: int, pairs: Iterable[tuple[bytes, bytes]]
) -> Iterator[bytes]:
    """Body of the stage at every replica: write the arriving weights into slabs.

    Yields one frame, a pickled :class:`NodeWeights`.
    """
    pool, reports, copies = None, [], {}
    for frame, replica in pairs:  # one after another: together they may be a whole model
        if pool is None:
            pool = open_pool(pickle.loads(replica).run.slab)
        header, payload = decode(frame)
        if header.report is not None:
            reports.append(header.report)
        if header.weights:
            with pool.claim("weights", len(payload), step.submission, step.oldest_needed) as claim:
                claim.bytes[:] = np.frombuffer(payload, np.uint8)
            copies[header.index] = SliceHandle(claim.reference)
    assert pool is not None
    yield pickle.dumps(NodeWeights(pool.node_id, copies, tuple(reports)))


ReportSink = Callable[[Any, RunSpec], Iterator[bytes]]


def to_driver(report: Any, run: RunSpec) -> Iterator[bytes]:
    """Yield one frame, the pickled report."""
    yield pickle.dumps(report)

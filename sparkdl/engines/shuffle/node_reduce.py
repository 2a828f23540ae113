"""Task bodies that sum gradients on each node, and that bring new weights to each node once.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    WeightsHeader,
    sum_is_smaller,
)
from sparkdl.engines.shuffle.replica_context import run_of
from sparkdl.replica.iteration import Fault, SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec, plans_of
from sparkdl.slab.pool import Pool, open_pool
from sparkdl.slices.reduce import Term, shares_of, tree_sum
from sparkdl.slices.section import NOTHING, SUM, open_section, section_nbytes
from sparkdl.slices.update import SliceUpdater
from sparkdl.spark.frames import send

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
        frame = encode(
            WeightsHeader(
                report.index, report if place == 0 else None, takes and payload is not None
            ),
            payload if takes else None,
        )
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
    frames, replica = read_pairs(pairs)
    pool, reports, copies = open_pool(replica.run.slab), [], {}
    for header, payload in frames:
        if header.report is not None:
            reports.append(header.report)
        if header.weights:
            with pool.claim("weights", len(payload), step.submission, step.oldest_needed) as claim:
                claim.bytes[:] = np.frombuffer(payload, np.uint8)
            copies[header.index] = SliceHandle(claim.reference)
    yield pickle.dumps(NodeWeights(pool.node_id, copies, tuple(reports)))


ReportSink = Callable[[Any, RunSpec], Iterator[bytes]]


def to_driver(report: Any, run: RunSpec) -> Iterator[bytes]:
    """Yield one frame, the pickled report."""
    yield pickle.dumps(report)

"""After synchronization: each node gets the new weights of other nodes' slices once. Task bodies.

The owner of a slice sends its new weights to one replica's place on every other node, where a task puts
them into a slab; the replicas of that node then read the *copy* by reference, as they read the slices
of their own node. Copies are as old as the state they are of, and buffers of the same tick, so they
live as long (see [Note: who may write a buffer]).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sparkdl.codec.frames import as_tensor, decode, encode
from sparkdl.engines.shuffle.messages import (
    STATE_FOREIGN,
    IterationMessage,
    NodeWeights,
    WeightsHeader,
)
from sparkdl.engines.shuffle.state_tasks import run_of
from sparkdl.engines.shuffle.traffic import Nodes
from sparkdl.replica.iteration import Fault, SliceHandle, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slab.pool import open_pool
from sparkdl.spark.frames import send
from sparkdl.spark.message import posted
from sparkdl.spark.worker import finish_task


def weight_frames(report: SliceReport, run: RunSpec, nodes: Nodes) -> Iterator[bytes]:
    """A frame to every replica's place: the report to the first; the slice's new weights, if there are
    any, to the place on each other node that takes them."""
    pool = open_pool(run.slab)
    news = report.state is not None and not (report.faults or report.skipped)
    weights = report.state.weights if news and report.state is not None else None
    payload = None if weights is None else as_tensor(pool.read(weights), torch.uint8)
    for place, token in enumerate(nodes.replicas):
        takes = token != pool.token and nodes.representative(token, report.index) == place
        frame = encode(
            WeightsHeader(
                report.index, report if place == 0 else None, takes and payload is not None
            ),
            payload if takes else None,
        )
        if weights is not None:
            pool.check(weights)
        yield from send(place, frame)


@dataclass(frozen=True)
class SendWeights:
    """Body over the owner RDD: likewise of version t (``states``), before the first iteration."""

    states: tuple[SliceHandle, ...]
    nodes: Nodes

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run = run_of(frames)
        token, state = open_pool(run.slab).token, self.states[partition]
        report = SliceReport(partition, token, state)
        if state.token != token:
            report = SliceReport(
                partition, token, None, faults=(Fault(STATE_FOREIGN, partition, token),)
            )
        yield from weight_frames(report, run, self.nodes)
        finish_task()


@dataclass(frozen=True)
class ReceiveWeights:
    """Body of the stage, at every replica's place: write what arrives; one frame, a pickled
    :class:`NodeWeights`. ``step``: None: the one that the job was told."""

    step: IterationMessage | None = None

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        step, pool, reports, copies = self.step, None, [], {}
        for frame, replica in pairs:
            if pool is None:
                run: RunSpec = pickle.loads(replica).run
                step, pool = step or posted(run.key), open_pool(run.slab)
            assert step is not None
            header, payload = decode(frame)
            if header.report is not None:
                reports.append(header.report)
            if header.weights:
                with pool.claim("weights", len(payload), step.tick, step.floor) as claim:
                    claim.bytes[:] = np.frombuffer(payload, np.uint8)
                copies[header.index] = SliceHandle(claim.reference)
        assert pool is not None
        yield pickle.dumps(NodeWeights(pool.token, copies, tuple(reports)))
        finish_task()

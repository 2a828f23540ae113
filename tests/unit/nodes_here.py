"""The task bodies of a run on several nodes, in this process and without Spark.

Each node has a slab root and a token of its own, as executors with a relative slab directory have;
stages and shuffles are loops.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from pyspark import cloudpickle
from torch import nn

from sparkdl.data.batches import BatchSpec
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.engines.shuffle.messages import IterationMessage, NodeCopies, Nodes, NodeWeights
from sparkdl.engines.shuffle.replica_context import (
    RecipeSource,
    at_owner,
    at_replicas,
    at_replicas_with_weights,
    initial_state,
    pad_frames,
    prepare_replica,
    prepare_slice,
    publish_weights,
    recount,
)
from sparkdl.engines.shuffle.replica_tasks import send_gradients
from sparkdl.engines.shuffle.update_tasks import (
    at_slice,
    receive_weights,
    reduce_on_node,
    reduce_slice,
    send_weights,
    synchronize,
    to_driver,
    to_slices,
    update_arrived,
    weight_frames,
)
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import Recipe
from sparkdl.replica.iteration import SliceHandle, SliceReport
from sparkdl.replica.run import ReplicaHandle, RunSpec
from sparkdl.slab import pool, root
from sparkdl.slab.pool import release
from sparkdl.slab.root import SlabConfig

WIDTH, CLASSES, NAMES = 6, 3, 40
Stage = list[list[bytes]]
"""The frames of each partition."""


class Tagged(nn.Module):
    """Buffers, dropout, a sparse table and a parameter that no loss depends on."""

    def __init__(self, tagged: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 21), nn.BatchNorm1d(21), nn.Dropout(0.2), nn.Linear(21, CLASSES)
        )
        self.unused = nn.Parameter(torch.ones(5))
        self.table = nn.Embedding(NAMES, CLASSES, sparse=True) if tagged else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layers(x)
        if self.table is None:
            return output
        return output + self.table((x[:, :3].abs() * 10).long().clamp(max=NAMES - 1)).sum(1)


class Machine:
    """``replicas`` and ``slices``: for each the name of its node. ``rows``: of each replica."""

    def __init__(
        self,
        folder: Path,
        replicas: str,
        slices: str,
        rows: Sequence[int],
        tagged: bool = False,
        **options: Any,
    ) -> None:
        self.replicas, self.slices, self.rows = replicas, slices, rows
        self._folder, self._memories = folder, {}
        slab = SlabConfig.new("slabs", "nodes")
        batch_spec = BatchSpec(num_features=1, num_labels=1)
        self.run = RunSpec(
            slab, 0, len(replicas), len(slices), batch_spec, (8,) * len(replicas), threads=1
        )
        self._clips = "clip_norm" in options and len(slices) > 1
        optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.0 if tagged else 0.9)
        recipe = Recipe(
            partial(Tagged, tagged),
            nn.CrossEntropyLoss(),
            optimizer,
            seed=0,
            options=TrainingOptions(**options),
        )
        source = RecipeSource(cloudpickle.dumps(recipe))
        generator = np.random.default_rng(0)
        self.seats, self.owners = [], []
        for index, node in enumerate(replicas):
            with self.on(node):
                root.open_root(slab, create=True)
                samples = self._samples(generator, 8)
                handle = ReplicaHandle(self.run, index, samples.checksum)
                (replica,) = prepare_replica(source, index, [pickle.dumps(handle)])
            self.seats.append((replica, pickle.dumps(samples)))
        for n, node in enumerate(slices):
            with self.on(node):
                self.owners.append(list(prepare_slice(self.run, source, len(replicas), n, [])))
        node_ids = {node: self.node_id(node) for node in replicas + slices}
        self.node_ids = tuple(node_ids[node] for node in replicas)
        self.nodes = Nodes(self.node_ids, tuple(node_ids[node] for node in slices))
        found = self.stage(
            partial(at_owner, partial(initial_state, None, "state", 0)), self.owners, slices
        )
        self.states: tuple[SliceHandle, ...] = tuple(pickle.loads(f).state for (f,) in found)
        self.copies: NodeCopies = {}
        self.submission, self.oldest_needed = 1, 0

    def _samples(self, generator: np.random.Generator, rows: int) -> Any:
        writer = PartitionWriter(self.run.slab)
        features = generator.normal(size=(rows, WIDTH)).astype("float32")
        writer.add(["features", "label"], [features, generator.integers(CLASSES, size=rows)])
        return writer.finish()

    @contextlib.contextmanager
    def on(self, node: str) -> Iterator[None]:
        """This process as one of that node."""
        before, place = os.getcwd(), self._folder / node
        place.mkdir(exist_ok=True)
        roots, pools = self._memories.setdefault(node, ({}, {}))
        os.chdir(place)
        try:
            with (
                mock.patch.object(root, "_open_roots", roots),
                mock.patch.object(pool, "_pools", pools),
            ):
                yield
        finally:
            os.chdir(before)

    def node_id(self, node: str) -> str:
        with self.on(node):
            return pool.open_pool(self.run.slab).node_id

    def stage(self, body: Any, inputs: Sequence[Any], nodes: str) -> Stage:
        """A task for each partition, on its node; each runs twice, as a twin or a retry does."""
        found = []
        for partition, (records, node) in enumerate(zip(inputs, nodes, strict=True)):
            with self.on(node):
                list(body(partition, iter(records)))
                found.append(list(body(partition, iter(records))))
        return found

    @staticmethod
    def shuffle(sent: Stage, partitions: int) -> Stage:
        """The frames by their addresses, those of the last partition first."""
        found: Stage = [[] for _ in range(partitions)]
        for frames in reversed(sent):
            for address, frame in zip(frames[::2], frames[1::2], strict=True):
                found[struct.unpack(">q", address)[0]].append(frame)
        return found

    def counted(self, count: int) -> Stage:
        return self.stage(
            partial(recount, count), [[replica] for replica, _ in self.seats], self.replicas
        )

    @staticmethod
    def zip(one: Stage, other: Stage) -> list[list[tuple[bytes, bytes]]]:
        return [list(zip(a, b, strict=True)) for a, b in zip(one, other, strict=True)]

    def step(self) -> IterationMessage:
        rows = tuple((0, rows) for rows in self.rows)
        return IterationMessage(
            index=self.oldest_needed,
            epoch=0,
            rows=rows,
            submission=self.submission,
            oldest_needed=self.oldest_needed,
            states=self.states,
            copies=self.copies,
        )

    def plain(self) -> list[SliceReport]:
        """An iteration in which every replica sends its own."""
        step, count = self.step(), len(self.replicas)
        publish = partial(publish_weights, self.states, self.node_ids, False)
        published = self.shuffle(self.stage(publish, self.owners, self.slices), count)
        pads = partial(pad_frames, len(self.slices))
        padded = self.stage(pads, [[s] for s in self.seats], self.replicas)
        body = partial(
            at_replicas_with_weights, partial(send_gradients, step, None), self.states, None
        )
        sent = self.stage(body, self.zip(padded, published), self.replicas)
        return self._commit(self._synchronized(step, sent, None))

    def summed(self, combine_on: str | None = None) -> list[SliceReport]:
        """An iteration in which nodes sum. ``combine_on``: where the tasks run that do."""
        step = self.step()
        if not self.copies:
            sent = self.stage(
                partial(send_weights, self.states, self.nodes), self.owners, self.slices
            )
            self._note(self._install(step, sent))
            step = self.step()
        body = partial(
            at_replicas, partial(send_gradients, step, self.nodes), self.states, None, step.copies
        )
        offers = self.stage(body, [[seat] for seat in self.seats], self.replicas)
        offers = self.shuffle(offers, len(self.replicas))
        offers = self.zip(offers, self.counted(len(self.replicas)))
        sent = self.stage(partial(reduce_on_node, self.nodes), offers, combine_on or self.replicas)
        installed = self._install(step, self._synchronized(step, sent, self.nodes))
        reports = self._commit([report for node in installed for report in node.reports])
        if not any(report.faults for report in reports):
            self._note(installed)
        return reports

    def _synchronized(self, step: IterationMessage, sent: Stage, nodes: Nodes | None) -> Any:
        received = self.zip(self.shuffle(sent, len(self.slices)), self.owners)
        tell = to_driver if nodes is None else partial(weight_frames, nodes)
        if self._clips:
            reduced = self.stage(
                partial(at_slice, partial(reduce_slice, step), to_slices), received, self.slices
            )
            received = self.zip(
                self.shuffle(reduced, len(self.slices)),
                self.stage(partial(recount, len(self.slices)), self.owners, self.slices),
            )
        update = partial(update_arrived if self._clips else synchronize, step)
        told = self.stage(partial(at_slice, update, tell), received, self.slices)
        return told if nodes is not None else [pickle.loads(frame) for (frame,) in told]

    def _install(self, step: IterationMessage, sent: Stage) -> list[NodeWeights]:
        arrived = self.zip(self.shuffle(sent, len(self.replicas)), self.counted(len(self.slices)))
        return [
            pickle.loads(f)
            for (f,) in self.stage(partial(receive_weights, step), arrived, self.replicas)
        ]

    def _note(self, installed: list[NodeWeights]) -> None:
        self.copies = {}
        for node in installed:
            self.copies[node.node_id] = {**self.copies.get(node.node_id, {}), **node.copies}

    def _commit(self, reports: list[SliceReport]) -> list[SliceReport]:
        reports = sorted(reports, key=lambda report: report.index)
        if not any(report.faults for report in reports):
            self.oldest_needed = self.submission
            self.states = tuple(report.state for report in reports)
            self.copies = {}
        self.submission += 1
        return reports

    def content(self) -> list[bytes]:
        """All of the state."""
        found = []
        for node, state in zip(self.slices, self.states, strict=True):
            with self.on(node):
                slabs = pool.open_pool(self.run.slab)
                found += [slabs.read(reference).tobytes() for reference in state.references()]
        return found

    def close(self) -> None:
        for node in self._memories:
            with self.on(node):
                release(self.run.slab.name)
                root.remove_root(self.run.slab)


def gradient_bytes(reports: Sequence[SliceReport]) -> int:
    return sum(sum(report.received.values()) for report in reports)

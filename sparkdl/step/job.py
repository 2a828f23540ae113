"""The forward-backward job: M tasks over the zipped sample and replica RDDs. Task bodies only.

Each is the body of one Spark task: frames in, frames out, safe to run twice.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from sparkdl.data.batches import derive_seed, permutation
from sparkdl.data.partition import SampleHandle, open_partition
from sparkdl.frames import send
from sparkdl.replica.cache import LiveReplica
from sparkdl.replica.recipe import weights_digest
from sparkdl.replica.run import ReplicaHandle, install_recipe, open_replica
from sparkdl.slab.pool import Pool, Reference, open_pool
from sparkdl.step.compute import forward_backward, to_tensors, write_contribution
from sparkdl.sync.codec import as_tensor, decode, encode
from sparkdl.sync.job import RecipeSource, plans_of
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.records import (
    MOVED,
    SAMPLES_CHANGED,
    SAMPLES_FOREIGN,
    STATE_FOREIGN,
    Fault,
    GradientHeader,
    ReplicaReport,
    SliceHandle,
    Step,
)
from sparkdl.worker import settle_worker

Weights = dict[int, memoryview | None]
"""Bytes of slices that came through the shuffle, by number; None: the slice's state was not found."""


@dataclass(frozen=True)
class PrepareReplica:
    """Body of the replica RDD: put the recipe on the node; one frame, the replica's handle."""

    recipe: RecipeSource

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for frame in list(frames):
            handle: ReplicaHandle = pickle.loads(frame)
            install_recipe(handle.run, self.recipe.payload())
            yield frame


def check_replica(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Body over the replica RDD: build the replica; (node token, digest of its initial weights)."""
    for frame in list(frames):
        run = pickle.loads(frame).run
        recipe = open_replica(run).recipe
        token = open_pool(run.slab).token
        yield pickle.dumps((token, weights_digest(recipe.build())))
    settle_worker()


@dataclass(frozen=True)
class PadFrames:
    """One seat (replica frame, sample frame) -> ``count`` frames, to be zipped with weights."""

    count: int

    def __call__(self, partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in seats:
            yield pickle.dumps((replica, samples))
            for _ in range(self.count - 1):
                yield b""


@dataclass(frozen=True)
class ForwardBackward:
    """Body of the forward-backward stage, weights by reference."""

    step: Step
    states: tuple[SliceHandle, ...]

    def __call__(self, partition: int, seats: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        for replica, samples in list(seats):
            yield from gradient_frames(self.step, self.states, replica, samples, {})


@dataclass(frozen=True)
class ForwardBackwardWithBytes:
    """Body of the forward-backward stage, weights of other nodes as bytes through a shuffle."""

    step: Step
    states: tuple[SliceHandle, ...]

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        seat = b""
        weights: Weights = {}
        for padded, frame in pairs:
            seat = seat or padded
            (index, here), payload = decode(frame)
            if not here:
                weights[index] = None
            elif len(payload):
                weights[index] = payload
        replica, samples = pickle.loads(seat)
        yield from gradient_frames(self.step, self.states, replica, samples, weights)


def gradient_frames(
    step: Step,
    states: tuple[SliceHandle, ...],
    replica_frame: bytes,
    sample_frame: bytes,
    weights: Weights,
) -> Iterator[bytes]:
    """Run one replica for one step: a frame for each slice, addressed to its owner."""
    handle: ReplicaHandle = pickle.loads(replica_frame)
    samples: SampleHandle = pickle.loads(sample_frame)
    run, index = handle.run, handle.index
    pool = open_pool(run.slab)
    fault = _fault(handle, samples, states, weights, pool)
    if fault is not None:
        for n in range(run.slices):
            yield from send(n, encode(GradientHeader(index, 0, fault=fault)))
        return
    start, stop = step.rows[index]
    seconds: dict[str, float] = {}
    loss, reference, absent = 0.0, None, frozenset[int]()
    plans = plans_of(run).slices
    values = None
    if stop > start:
        clock = _Clock(seconds)
        rows = permutation(run.seed, step.epoch, index, samples.num_rows)[start:stop]
        arrays = open_partition(samples).gather(rows)
        clock.lap("data")
        live = open_replica(run)
        load_weights(live, plans, states, weights, pool)
        clock.lap("fetch")
        tensors = to_tensors(arrays, live.flat.flat.device)
        loss, gradients = forward_backward(
            live.flat,
            live.recipe.loss,
            tensors[: run.num_features],
            tensors[run.num_features :],
            derive_seed(run.seed, "forward", step.index, index),
        )
        clock.lap("compute")
        layout = live.flat.layout
        with pool.claim("gradient", layout.nbytes, step.tick, floor=step.tick) as claim:
            values = as_tensor(claim.bytes, layout.dtype)
            absent = frozenset(write_contribution(live.flat, gradients, values))
            reference = claim.reference
        del gradients
        clock.lap("publish")
    report = ReplicaReport(index, stop - start, loss, pool.token, seconds)
    for plan, state in zip(plans, states, strict=True):
        header = GradientHeader(
            replica=index,
            count=stop - start,
            reference=_part(reference, plan, values) if state.token == pool.token else None,
            absent=absent,
            state=state if index == 0 else None,
            report=report if plan.index == 0 else None,
        )
        payload = None
        if values is not None and header.reference is None:
            payload = values[plan.start : plan.stop]
        yield from send(plan.index, encode(header, payload))
    settle_worker()


def load_weights(
    live: LiveReplica,
    plans: list[SlicePlan],
    states: tuple[SliceHandle, ...],
    weights: Weights,
    pool: Pool,
) -> None:
    """Bring version t into the live replica, unless it has it already."""
    version = "/".join(state.version for state in states)
    if live.version != version:
        live.version = ""
        flat = live.flat.flat
        for plan, state in zip(plans, states, strict=True):
            payload = weights.get(plan.index)
            source = pool.read(state.weights) if payload is None else payload
            flat[plan.start : plan.stop].copy_(as_tensor(source, flat.dtype))
            if payload is None:
                pool.check(state.weights)
        live.version = version
    live.flat.refresh()


def _fault(
    handle: ReplicaHandle,
    samples: SampleHandle,
    states: tuple[SliceHandle, ...],
    weights: Weights,
    pool: Pool,
) -> Fault | None:
    def fault(kind: str) -> Fault:
        return Fault(kind, handle.index, pool.token)

    if samples.num_rows and samples.token != pool.token:
        return fault(SAMPLES_FOREIGN)
    if samples.checksum != handle.checksum:
        return fault(SAMPLES_CHANGED)
    for n, state in enumerate(states):
        if n in weights and weights[n] is None:
            return fault(STATE_FOREIGN)
        if n not in weights and state.token != pool.token:
            return fault(MOVED)
    return None


def _part(
    reference: Reference | None, plan: SlicePlan, values: torch.Tensor | None
) -> Reference | None:
    if reference is None or values is None:
        return None
    size = values.element_size()
    return reference.part(plan.start * size, plan.length * size)


class _Clock:
    """Seconds by activity."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def lap(self, activity: str) -> None:
        now = time.perf_counter()
        self._seconds[activity] = now - self._last
        self._last = now

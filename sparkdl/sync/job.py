"""The parameter-synchronization job: N tasks, task n owns slice n. Task bodies only.

Each is the body of one Spark task: frames in, frames out, safe to run twice.
"""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.frames import send
from sparkdl.replica.cache import forget
from sparkdl.replica.run import Run, install_recipe, open_replica
from sparkdl.slab.pool import Pool, open_pool
from sparkdl.sync.apply import step_slice
from sparkdl.sync.codec import as_tensor, decode, encode
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.sync.plan import SlicePlan, slice_plans
from sparkdl.sync.records import (
    STATE_FOREIGN,
    Fault,
    GradientHeader,
    SliceHandle,
    SliceReport,
    Step,
)
from sparkdl.sync.store import first_version, next_version
from sparkdl.sync.update import Contribution, merge_buffers, reduce_gradients
from sparkdl.worker import settle_worker


@dataclass(frozen=True)
class RunPlans:
    """What a process derives from a run once."""

    slices: list[SlicePlan]
    optimizer: OptimizerPlan
    dtype: torch.dtype


_plans: OrderedDict[str, RunPlans] = OrderedDict()
_scratch: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
_KEEP = 2


def plans_of(run: Run) -> RunPlans:
    """The slice plans and the optimizer plan of ``run``, kept between tasks."""
    plans = _plans.get(run.key)
    if plans is None:
        replica = open_replica(run)
        parameters = [parameter for _, parameter in replica.flat.parameters]
        optimizer = OptimizerPlan.of(replica.recipe, parameters, replica.flat.module)
        plans = _plans[run.key] = RunPlans(
            slice_plans(replica.flat.layout, run.slices, whole=not optimizer.elementwise),
            optimizer,
            replica.flat.layout.dtype,
        )
        while len(_plans) > _KEEP:
            _plans.popitem(last=False)
    return plans


@dataclass(frozen=True)
class PrepareOwner:
    """Body of the owner RDD: put the recipe on the node; M frames, the run first.

    The owner RDD is persisted and never changes; Spark runs a slice's synchronization where its
    partition of it lies. It has M records because a zip wants as many as there are gradients.
    """

    run: Run
    recipe: RecipeSource

    def __call__(self, partition: int, records: Iterable[object]) -> Iterator[bytes]:
        for _ in records:
            pass
        install_recipe(self.run, self.recipe.payload())
        yield pickle.dumps(self.run)
        for _ in range(self.run.replicas - 1):
            yield b""


@dataclass(frozen=True)
class RecipeSource:
    """The pickled recipe: in the task itself where it is small, else in a broadcast."""

    inline: bytes | None
    broadcast: Any = None

    def payload(self) -> bytes:
        return self.broadcast.value if self.inline is None else self.inline


def initial_state(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Body over the owner RDD: write version 0 of the slice; yields its :class:`SliceReport`."""
    run: Run = _run_of(frames)
    plan = plans_of(run).slices[partition]
    pool = open_pool(run.slab)
    replica = open_replica(run)
    if replica.version:  # this process has trained it already: start from the recipe again
        forget(run.key)
        replica = open_replica(run)
    weights = replica.flat.flat[plan.start : plan.stop].cpu()
    yield pickle.dumps(SliceReport(partition, pool.token, first_version(pool, weights, tick=0)))
    settle_worker()


@dataclass(frozen=True)
class Synchronize:
    """Body of the synchronization stage: reduce slice n, update it, write version t+1."""

    step: Step

    def __call__(self, partition: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
        gradients, owner = [], b""
        for gradient, record in pairs:
            gradients.append(decode(gradient))
            owner = owner or record
        yield pickle.dumps(self._synchronize(partition, pickle.loads(owner), gradients))
        settle_worker()

    def _synchronize(
        self, partition: int, run: Run, frames: list[tuple[GradientHeader, memoryview]]
    ) -> SliceReport:
        started = time.perf_counter()
        pool = open_pool(run.slab)
        frames.sort(key=lambda frame: frame[0].replica)
        faults = tuple(header.fault for header, _ in frames if header.fault)
        reports = tuple(header.report for header, _ in frames if header.report)
        state = frames[0][0].state
        if not faults and state is not None and state.token != pool.token:
            faults = (Fault(STATE_FOREIGN, partition, pool.token),)
        if faults or state is None:
            return SliceReport(partition, pool.token, None, reports, faults)
        plans = plans_of(run)
        plan = plans.slices[partition]
        contributions, references = [], []
        for header, payload in frames:
            if header.count == 0:
                continue
            if header.reference is None:
                values = as_tensor(payload, plans.dtype)
            else:
                values = as_tensor(pool.read(header.reference), plans.dtype)
                references.append(header.reference)
            contributions.append(Contribution(header.replica, header.count, values, header.absent))
        gradient = _scratch_tensor(run, plan, plans.dtype)
        step = self.step
        with next_version(pool, state, plans.dtype, step.tick, step.floor) as (next_state, new):
            copied = time.perf_counter()
            absent = reduce_gradients(plan, contributions, gradient)
            merge_buffers(plan, contributions, next_state.weights)
            for reference in references:
                pool.check(reference)
            reduced = time.perf_counter()
            step_slice(plan, next_state, gradient, absent, plans.optimizer, step.hyperparameters)
            updated = time.perf_counter()
            handle = new.seal(next_state)
        seconds = {
            "copy": copied - started,
            "reduce": reduced - copied,
            "update": updated - reduced,
            "seal": time.perf_counter() - updated,
        }
        received = sum(len(payload) for _, payload in frames)
        return SliceReport(partition, pool.token, handle, reports, (), seconds, received)


@dataclass(frozen=True)
class PublishWeights:
    """Body over the owner RDD, where replicas live on other nodes: weights to each replica.

    ``states``: version t of every slice; ``replica_tokens``: the node of each replica, ``None``
    where bytes must go whatever the node.
    """

    states: tuple[SliceHandle, ...]
    replica_tokens: tuple[str | None, ...]

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run: Run = _run_of(frames)
        pool = open_pool(run.slab)
        handle = self.states[partition]
        here = handle.token == pool.token
        by_reference = encode((partition, here))
        with_bytes = None
        for replica, token in enumerate(self.replica_tokens):
            if token == pool.token or not here:
                yield from send(replica, by_reference)
                continue
            if with_bytes is None:
                with_bytes = _weights_frame(pool, partition, handle)
            yield from send(replica, with_bytes)


@dataclass(frozen=True)
class CollectWeights:
    """Body over the owner RDD: one frame with the weights of the slice, for the driver."""

    states: tuple[SliceHandle, ...]

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        run: Run = _run_of(frames)
        yield _weights_frame(open_pool(run.slab), partition, self.states[partition])
        settle_worker()


def _run_of(frames: Iterable[bytes]) -> Run:
    """The run, out of an owner's frames; reads them to the end, so that Spark keeps the worker."""
    return next(pickle.loads(frame) for frame in list(frames) if frame)


def _weights_frame(pool: Pool, partition: int, handle: SliceHandle) -> bytes:
    frame = encode((partition, True), torch.from_numpy(pool.read(handle.weights)))
    pool.check(handle.weights)
    return frame


def _scratch_tensor(run: Run, plan: SlicePlan, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the reduced gradient of a slice, kept between tasks."""
    key = (run.key, plan.index)
    tensor = _scratch.get(key)
    if tensor is None:
        tensor = _scratch[key] = torch.empty(plan.trainable_length, dtype=dtype)
        while len(_scratch) > _KEEP:
            _scratch.popitem(last=False)
    return tensor

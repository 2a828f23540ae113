"""The committed state of a run: its location, and the jobs that use it between two iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pyspark.core.rdd import RDD

from sparkdl.codec.packed import ByParameter
from sparkdl.engines.delivery import Wanted, bring, most_at_once, not_here
from sparkdl.engines.resources import FitResources
from sparkdl.engines.shuffle.compression_tasks import InitialResiduals, WithResiduals
from sparkdl.engines.shuffle.placement import FEW_BYTES, Placement
from sparkdl.engines.shuffle.replica_tasks import Score
from sparkdl.engines.shuffle.snapshot_tasks import (
    RestoreResidual,
    RestoreSlice,
    TakeResidual,
    TakeSnapshot,
)
from sparkdl.engines.shuffle.state_tasks import InitialState, MapSlice, ReadParts, SaveBestWeights
from sparkdl.engines.validation_set import ValidationSet
from sparkdl.errors import ParameterError
from sparkdl.loop.engine import AVERAGE, BEST, CURRENT, ReadResiduals, ReadState
from sparkdl.replica.iteration import Fault, ReplicaReport, ResidualHandle, SliceHandle, SliceReport
from sparkdl.slab.parts import Left
from sparkdl.slab.pool import Reference
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState
from sparkdl.slices.update import EMA
from sparkdl.spark.failures import faults_explained
from sparkdl.spark.frames import collect_frames, map_frames, stage_name
from sparkdl.usercode import accompanied

MAX_RECORD_BYTES = (1 << 31) - (1 << 20)
"""The largest record that Python and Spark exchange, less room for the header."""


@dataclass(frozen=True)
class SnapshotRdds:
    """A snapshot of the state that Spark keeps, on two executors if there are two.

    Attributes:
        slices: The RDD of the slices' state, see
            :class:`sparkdl.engines.shuffle.snapshot_tasks.TakeSnapshot`.
        slice_frames: The number of its frames per partition.
        residuals: The RDD of the replicas' residuals; None if there are none.
        residual_frames: The number of its frames per partition.
    """

    slices: RDD
    slice_frames: int
    residuals: RDD | None
    residual_frames: int


class SliceVersions:
    """Version t of every slice, the best weights if they are kept, and the replicas' residuals.

    Args:
        places: The placement of replicas and owners.
        resources: The fit's Spark resources.
        replicas: M.
        slices: N.

    Attributes:
        tick: The number of the last submission.
        floor: The tick of version t; state buffers of lower ticks are free.
        states: The handles of version t.
        best: The handles of the best weights; empty if none are kept.
        residuals: The handle of each replica's residuals, or None.
    """

    def __init__(
        self, places: Placement, resources: FitResources, replicas: int, slices: int
    ) -> None:
        self._places, self._resources = places, resources
        self._context = resources.context
        self._replicas, self._slices = replicas, slices
        self.tick = self.floor = 0
        self.states: tuple[SliceHandle, ...] = ()
        self.best: tuple[SliceHandle, ...] = ()
        self.residuals: tuple[ResidualHandle | None, ...] = (None,) * replicas

    def commit(self, states: tuple[SliceHandle, ...], tick: int) -> None:
        """Make ``states``, which were written with ``tick``, version t."""
        self.states, self.floor = states, tick

    def keep_residuals(self, replicas: Sequence[ReplicaReport]) -> None:
        """Keep the residuals in the reports of the replicas that took part."""
        new = {report.replica: report.residual for report in replicas}
        self.residuals = tuple(new.get(m) or old for m, old in enumerate(self.residuals))

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Place replicas where their samples are, and write the first version of the state.

        Args:
            read: Returns a slice's state from elsewhere; None: use the recipe's weights.
            reported: The exceptions of ``read`` that are raised as they are.
            which: ``BEST`` to write the weights that are kept as the best, else the current state.

        Raises:
            sparkdl.ParameterError: A slice is too large to go to another node.
            sparkdl.TrainingError: The job failed.
        """
        with faults_explained("setting up the replicas"):
            if not self._places.tokens:
                self._places.place_replicas()
            task = InitialState(read, reported, "best" if which == BEST else "state", self.tick)
            results = self._places.at_owners(task, "write the initial state")
        _raise_first(results)
        reports = sorted(results, key=lambda report: report.index)
        if which == BEST:
            self.best = states_of(reports)
        else:
            self.commit(states_of(reports), self.tick)
        self._check_frames()

    def _check_frames(self) -> None:
        """Raise :class:`sparkdl.ParameterError` for slices too large for one record between nodes."""
        largest = max((state.weights.nbytes for state in self.states), default=0)
        if largest <= FEW_BYTES or self._places.one_node(self.states):
            return
        conf = self._context._jsc.sc().conf()  # type: ignore[union-attr]
        most = min(MAX_RECORD_BYTES, conf.getSizeAsBytes("spark.executor.memory", "1g"))
        if largest > most:
            total = sum(state.weights.nbytes for state in self.states)
            raise ParameterError(
                f"a slice of the model has {largest:,} bytes and goes from node to node as one record, "
                f"for which an executor has {most:,} bytes at the most (spark.executor.memory, and "
                f"2 GB). Train with more slices: slices={-(-8 * total // most)} (a tensor may have to "
                "stay in one)."
            )

    def forget(self) -> None:
        """Give up the present state, which is out of reach; a load or restore at new places follows."""
        self._places.forget()
        self.states = self.best = ()
        self.residuals = (None,) * self._replicas
        self.tick += 1

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """Write the replicas' residuals with one task per replica, in parallel."""
        with faults_explained("setting up the replicas"):
            task = InitialResiduals(read, reported, self.tick)
            found = dict(self._places.at_replicas(task, "write the replicas' residuals"))
        _raise_first(list(found.values()))
        self.residuals = tuple(found[replica] for replica in range(self._replicas))

    def score(self, validation: ValidationSet) -> list[Any]:
        """Score the validation samples in one job at the replicas' seats; return the merged states."""
        samples = validation.samples
        rdd = samples.rdd
        assert rdd is not None
        task = Score(accompanied(validation.scorer), validation.assembly, validation.batch_size)
        checksums = tuple(handle.checksum for handle in samples.handles)

        def submit() -> tuple[dict[int, Any], list[Fault]]:
            with stage_name(self._context, "validation"):
                scored = self._places.at_seats(task, rdd, self.states, checksums)
                found = self._places.pickled(scored)
            states = dict(found)
            return states, [fault for fault in states.values() if isinstance(fault, Fault)]

        states = self._places.retry(submit, "validation", rdd)
        return validation.scorer.merge([states[replica] for replica in sorted(states)])

    def keep_best(self) -> None:
        """Copy the weights where they lie, as the best ones."""
        with faults_explained("keeping the best weights"):
            task = SaveBestWeights(self.states, self.tick)
            self.best = tuple(self._places.at_owners(task, "keep the best weights"))

    def weights(self, which: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the flat weights, read from slabs on the driver's node or fetched by jobs in parts."""
        states = self.best if which == BEST else self.states
        pieces = [_weights_of(state, which == AVERAGE) for state in states]
        flat = torch.empty(
            sum(r.nbytes for some in pieces for r in some) // dtype.itemsize, dtype=dtype
        )
        wanted: list[Wanted] = []
        rest = flat.numpy().view(np.uint8)
        for number, some in enumerate(pieces):
            for reference in some:
                wanted.append((number, reference, rest[: reference.nbytes]))
                rest = rest[reference.nbytes :]
        self._deliver(wanted, "collecting the weights", "collect the weights")
        return flat

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """Call ``use`` on every slice with one task per slice, in parallel.

        Large results come back like the weights.
        """
        states = self.best if which == BEST else self.states
        self.tick += 1
        with faults_explained("reading the state"):
            task = MapSlice(states, use, self.tick)
            results = self._places.at_owners(task, "read the state")
        for number, result in enumerate(results):
            if isinstance(result, Left):
                data = np.empty(result.reference.nbytes, dtype=np.uint8)
                wanted = [(number, result.reference, data)]
                self._deliver(wanted, "reading the state", "bring the state")
                results[number] = data.tobytes()
        return results

    def _deliver(self, wanted: Sequence[Wanted], doing: str, stage: str) -> None:
        def read(parts: Mapping[int, Reference]) -> list[bytes]:
            return collect_frames(map_frames(self._places.owners, ReadParts(parts)))

        far = not_here(self._resources.slab, wanted)
        if far:
            self._context.setJobDescription(f"sparkdl: {doing}")
            with faults_explained(doing), stage_name(self._context, stage):
                bring(far, read, most_at_once(self._context))

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Call ``use`` on all residuals, in parallel with one task per replica.

        No job runs if there are none.
        """
        if not any(self.residuals):
            return []
        with faults_explained("reading the replicas' residuals"):
            task = WithResiduals(self.residuals, use)
            found = dict(self._places.at_replicas(task, "read the replicas' residuals"))
        return [found[m] for m, handle in enumerate(self.residuals) if handle is not None]

    def take_snapshot(self) -> SnapshotRdds:
        """Have Spark keep a copy of the state."""
        self._context.setJobDescription("sparkdl: taking a snapshot")
        task = TakeSnapshot(self.states, self.best)
        with (
            faults_explained("taking a snapshot"),
            stage_name(self._context, "take a snapshot"),
        ):
            slices = self._resources.replicated(map_frames(self._places.owners, task))
            residuals, count = None, 0
            if any(self.residuals):
                try:
                    kept = TakeResidual(self.residuals)
                    count = kept.count
                    residuals = self._resources.replicated(self._places.seats_of(kept))
                except BaseException:
                    self._resources.forget(slices)
                    raise
        return SnapshotRdds(slices, task.count, residuals, count)

    def drop(self, snapshot: SnapshotRdds) -> None:
        """Have Spark delete a snapshot."""
        for rdd in (snapshot.slices, snapshot.residuals):
            if rdd is not None:
                self._resources.forget(rdd)

    def restore(self, snapshot: SnapshotRdds) -> None:
        """Write a snapshot into slabs at the present places."""
        with (
            faults_explained("restoring a snapshot"),
            stage_name(self._context, "restore a snapshot"),
        ):
            if not self._places.tokens:
                self._places.place_replicas()
            found = self._places.zipped_with_owners(
                snapshot.slices, snapshot.slice_frames, RestoreSlice(self.tick)
            )
            kept: dict[int, ResidualHandle | None] = {}
            if snapshot.residuals is not None:
                task = RestoreResidual(self.tick)
                frames = snapshot.residual_frames
                kept = dict(self._places.zipped_with_seats(snapshot.residuals, frames, task))
        self.commit(states_of([report for report, _ in found]), self.tick)
        self.best = tuple(best for _, best in found if best is not None)
        self.residuals = tuple(kept.get(m) for m in range(self._replicas))


def states_of(reports: Sequence[SliceReport]) -> tuple[SliceHandle, ...]:
    """Return the handles of the slices' new version."""
    return tuple(report.state for report in reports if report.state)


def _weights_of(handle: SliceHandle, average: bool) -> list[Reference]:
    """Return references to the weights, or with ``average`` to their moving average.

    Buffers have no moving average, and are taken from the weights.
    """
    found = next((ref for name, _, ref in handle.arrays if average and name == EMA), None)
    if found is None:
        return [handle.weights]
    return [found, handle.weights.part(found.nbytes, handle.weights.nbytes - found.nbytes)]


def _raise_first(results: Sequence[Any]) -> None:
    problem = next((r for r in results if isinstance(r, Exception)), None)
    if problem is not None:
        raise problem

"""The committed state of a run: where it lies, and the jobs over it between two iterations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyspark.core.rdd import RDD

from sparkdl.frames import collect_frames, map_frames, stage_name
from sparkdl.infer.validate import Score
from sparkdl.step.compressing import InitialResiduals, ReadResiduals, WithResiduals
from sparkdl.sync.codec import as_tensor, decode
from sparkdl.sync.owners import CollectWeights, InitialState, KeepWeights, WithState
from sparkdl.sync.packing import ByParameter
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.records import Fault, ReplicaReport, ResidualHandle, SliceHandle, SliceReport
from sparkdl.sync.snapshot import RestoreResidual, RestoreSlice, TakeSnapshot, copied
from sparkdl.sync.state import SliceState
from sparkdl.train.cluster.failure import faults_explained
from sparkdl.train.cluster.places import Places
from sparkdl.train.cluster.resources import Resources
from sparkdl.train.engine import AVERAGE, BEST, CURRENT, ReadState, ValidationSet
from sparkdl.usercode import accompanied

COLLECT_BYTES = 256 << 20
"""Weights up to this size come to the driver in one job, larger ones slice by slice."""


@dataclass(frozen=True)
class Snapshot:
    """The state as Spark keeps it, on two executors where there are as many.

    ``slices``: RDD of frames, see :class:`sparkdl.sync.snapshot.TakeSnapshot`; ``residuals``: of what
    replicas keep, None where they keep nothing.
    """

    slices: RDD
    residuals: RDD | None


class Committed:
    """Version t of every slice, the weights that are kept as the best, and what replicas keep.

    ``tick`` numbers submissions, ``floor`` is the tick of version t, below which state buffers are
    free.
    """

    def __init__(self, places: Places, resources: Resources, replicas: int, slices: int) -> None:
        self._places, self._resources = places, resources
        self._context = resources.context
        self._replicas, self._slices = replicas, slices
        self.tick = self.floor = 0
        self.states: tuple[SliceHandle, ...] = ()
        self.best: tuple[SliceHandle, ...] = ()
        self.residuals: tuple[ResidualHandle | None, ...] = (None,) * replicas

    def commit(self, states: tuple[SliceHandle, ...], tick: int) -> None:
        """``states`` are version t now, written in ``tick``."""
        self.states, self.floor = states, tick

    def keep_residuals(self, replicas: Sequence[ReplicaReport]) -> None:
        """Replicas that took part keep what they report."""
        new = {report.replica: report.residual for report in replicas}
        self.residuals = tuple(new.get(m) or old for m, old in enumerate(self.residuals))

    def start(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """Place replicas where their samples are and write the first version of the state."""
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

    def forget(self) -> None:
        """What there is is out of reach: it is to be started, or restored, at new places."""
        self._places.forget()
        self.states = self.best = ()
        self.residuals = (None,) * self._replicas
        self.tick += 1

    def start_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        """One task a replica, in parallel."""
        with faults_explained("setting up the replicas"):
            task = InitialResiduals(read, reported, self.tick)
            found = dict(self._places.at_replicas(task, "write the replicas' residuals"))
        _raise_first(list(found.values()))
        self.residuals = tuple(found[replica] for replica in range(self._replicas))

    def score(self, validation: ValidationSet) -> list[Any]:
        """One job over the replicas' places and the validation samples."""
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

        states = self._places.until_placed(submit, "validation", rdd)
        return validation.scorer.merge([states[replica] for replica in sorted(states)])

    def keep_best(self) -> None:
        """Copy the weights beside the state, where they lie."""
        with faults_explained("keeping the best weights"):
            task = KeepWeights(self.states, self.tick)
            self.best = tuple(self._places.at_owners(task, "keep the best weights"))

    def weights(self, which: str, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """One job, or one a slice where they are large."""
        self._context.setJobDescription("sparkdl: collecting the weights")
        states = self.best if which == BEST else self.states
        with (
            faults_explained("collecting the weights"),
            stage_name(self._context, "collect the weights"),
        ):
            rdd = map_frames(self._places.owners, CollectWeights(states, which == AVERAGE))
            few = nbytes <= COLLECT_BYTES
            frames = collect_frames(rdd) if few else rdd.toLocalIterator()
            parts = {}
            for frame in frames:
                index, payload = decode(frame)
                parts[index] = as_tensor(payload, dtype)
        return torch.cat([parts[n] for n in range(self._slices)])

    def with_states(
        self, use: Callable[[int, SlicePlan, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        """One task a slice, in parallel."""
        states = self.best if which == BEST else self.states
        with faults_explained("reading the state"):
            return self._places.at_owners(WithState(states, use), "read the state")

    def with_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """One task a replica, in parallel; no job where none keeps any."""
        if not any(self.residuals):
            return []
        with faults_explained("reading the replicas' residuals"):
            task = WithResiduals(self.residuals, use)
            found = dict(self._places.at_replicas(task, "read the replicas' residuals"))
        return [found[m] for m, handle in enumerate(self.residuals) if handle is not None]

    def take_snapshot(self) -> Snapshot:
        """Let Spark keep a copy."""
        self._context.setJobDescription("sparkdl: taking a snapshot")
        task = TakeSnapshot(self.states, self.best, self._replicas)
        with (
            faults_explained("taking a snapshot"),
            stage_name(self._context, "take a snapshot"),
        ):
            slices = self._resources.replicated(map_frames(self._places.owners, task))
            residuals = None
            if any(self.residuals):
                try:
                    seats = self._places.seats_of(WithResiduals(self.residuals, copied))
                    residuals = self._resources.replicated(seats)
                except BaseException:
                    self._resources.forget(slices)
                    raise
        return Snapshot(slices, residuals)

    def drop(self, snapshot: Snapshot) -> None:
        """Let Spark forget it."""
        for rdd in (snapshot.slices, snapshot.residuals):
            if rdd is not None:
                self._resources.forget(rdd)

    def restore(self, snapshot: Snapshot) -> None:
        """Write it into slabs at the places as they are now."""
        with (
            faults_explained("restoring a snapshot"),
            stage_name(self._context, "restore a snapshot"),
        ):
            if not self._places.tokens:
                self._places.place_replicas()
            found = self._places.zipped_with_owners(snapshot.slices, RestoreSlice(self.tick))
            kept: dict[int, ResidualHandle | None] = {}
            if snapshot.residuals is not None:
                task = RestoreResidual(self.tick)
                kept = dict(self._places.zipped_with_seats(snapshot.residuals, task))
        self.commit(states_of([report for report, _ in found]), self.tick)
        self.best = tuple(best for _, best in found if best is not None)
        self.residuals = tuple(kept.get(m) for m in range(self._replicas))


def states_of(reports: Sequence[SliceReport]) -> tuple[SliceHandle, ...]:
    """The slices' new version."""
    return tuple(report.state for report in reports if report.state)


def _raise_first(results: Sequence[Any]) -> None:
    problem = next((r for r in results if isinstance(r, Exception)), None)
    if problem is not None:
        raise problem

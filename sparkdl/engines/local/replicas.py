"""The replicas of the local engine: M of them, which compute in turn on one live module."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.partition_reader import MappedPartition, open_partition
from sparkdl.data.sample_set import SampleSet
from sparkdl.errors import StaleReferenceError, StateLostError
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.recipe import Recipe
from sparkdl.replica.gradient_writer import GradientWriter, writes_early
from sparkdl.replica.inner_state import open_inner
from sparkdl.replica.iteration import Clock, IterationRows, ReplicaReport
from sparkdl.replica.local_sgd import several_steps
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.replica.sections import not_finite, section_maps, sections_nbytes, write_sections
from sparkdl.replica.step import (
    ReplicaIteration,
    ReplicaResult,
    compress_outcome,
    one_gradient,
    to_mini_batch,
)
from sparkdl.slices.section import Section, SectionLayout
from sparkdl.slices.state import SliceState, join_states


class LocalReplicas:
    """The replicas of a run, and what each keeps from one iteration to the next.

    This is what compression has left out, or the state of the replica's own optimizer.
    """

    def __init__(
        self, samples: SampleSet, run: RunSpec, recipe: bytes, now: Callable[[], float]
    ) -> None:
        self.partitions = open_all(samples)
        self._run, self._recipe, self._now = run, recipe, now
        self.build()
        self.plans = OpenRun.of(self.live, run)
        self.kept: dict[int, ByParameter] = {}
        self._memory: dict[int, np.ndarray] = {}

    def build(self) -> None:
        """Build the module, so that it has the weights of the recipe."""
        recipe: Recipe = pickle.loads(self._recipe)
        self.live = LiveReplica.of(recipe)

    def keep(self, kept: Mapping[int, ByParameter]) -> None:
        """Keep tensors of some replicas for the next iteration."""
        self.kept |= kept

    def keep_only(self, kept: Mapping[int, ByParameter]) -> None:
        """Keep these tensors, and forget what replicas had kept before."""
        self.kept = dict(kept)

    def run(
        self,
        step: IterationRows,
        replica: int,
        weights: Sequence[torch.Tensor],
        states: Sequence[SliceState],
    ) -> tuple[ReplicaReport, list[Section], ReplicaResult]:
        """Do the work of a replica with rows; return its report, its sections, and the result."""
        live, clock = self.live, Clock(self._now)
        partition = self.partitions[replica]
        assert partition is not None
        work = ReplicaIteration(step, replica, self._run.batch_spec, self._run.shares[replica])
        local_steps = live.recipe.options.local_steps
        batches = work.mini_batches(live, partition, local_steps)
        clock.lap("data")
        self.load_weights(weights)
        memory, writer = None, None
        if writes_early(live):
            maps = section_maps(live, self.plans.slices, ReplicaResult())
            memory = self._section_memory(replica, maps)
            writer = GradientWriter(live, self.plans.slices, maps, memory)
        if not live.recipe.options.steps_on_replicas:
            clock.lap("fetch")
            outcome = one_gradient(live, batches[0], work, clock, writer)
        else:
            device, mine = live.flat.flat.device, self.kept.get(replica, {})
            if live.recipe.options.outer:
                state = open_inner(self.plans.whole.plan, mine, device)
            else:
                state = join_states(self.plans.slices, states, device)
            clock.lap("fetch")
            each = (to_mini_batch(batch, live) for batch in batches)
            outcome = several_steps(live, each, work, state, self.plans.whole, clock)
        if live.recipe.compression is not None:
            outcome = compress_outcome(live, outcome, work, self.kept.get(replica, {}))
            clock.lap("compress")
        maps = section_maps(live, self.plans.slices, outcome)
        if memory is None:
            memory = self._section_memory(replica, maps)
        sections = write_sections(live, self.plans.slices, maps, outcome, memory)
        problem = not_finite(live, self.plans.slices, sections, outcome)
        clock.lap("publish")
        report = ReplicaReport(
            replica,
            outcome.count,
            outcome.weight,
            outcome.loss,
            "",
            clock.seconds,
            problem,
            losses=outcome.losses,
            passed=outcome.passed,
        )
        written = [replace(section, replica=replica, others=outcome.others) for section in sections]
        return report, written, outcome

    def load_weights(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy the weights of all slices into the live module."""
        flat = self.live.flat
        for plan, part in zip(self.plans.slices, weights, strict=True):
            flat.flat[plan.start : plan.stop].copy_(part)
        flat.refresh()

    def _section_memory(self, replica: int, maps: Sequence[SectionLayout]) -> np.ndarray:
        """Return zeroed memory for the sections of a replica, which the next iteration uses again."""
        nbytes = sum(sections_nbytes(self.live, self.plans.slices, maps))
        known = self._memory.get(replica)
        if known is not None and known.nbytes == nbytes:
            known.fill(0)
            return known
        made = self._memory[replica] = np.zeros(nbytes, np.uint8)
        return made


def open_all(samples: SampleSet) -> list[MappedPartition | None]:
    """Open the samples of every replica; None for a replica without rows."""
    try:
        return [open_partition(handle) if handle.num_rows else None for handle in samples.handles]
    except StaleReferenceError as error:
        raise StateLostError(
            f"{error} before training began. Call fit again, which writes the samples again, and "
            "make sure that nothing deletes files in spark.sparkdl.slab.dir."
        ) from error

"""Gradients that ranks exchange in sections, as the shuffle engine does: compressed, or rows of tables.

DistributedDataParallel sums dense gradients. Compressed gradients cannot be summed, and the rows of
a sparse table differ from rank to rank. So each rank writes the same *sections* as in the other
engines (:mod:`sparkdl.slices.section`) and sends each one to the ranks that update its slice. All
sums then have the brackets of the other engines and therefore the same bits, with any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from sparkdl.codec.packed import head_from_bytes, head_to_bytes
from sparkdl.collectives.direct import exchange_all
from sparkdl.engines.gang.strategies.base import GradientSync
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.compute import forward_backward
from sparkdl.replica.gradients import take_gradients
from sparkdl.replica.iteration import Clock
from sparkdl.replica.mini_batch import MiniBatch
from sparkdl.replica.sections import not_finite, section_maps, sections_nbytes, write_sections
from sparkdl.replica.step import ReplicaIteration, ReplicaResult, compress_outcome
from sparkdl.slices.section import Section, SectionLayout, open_section
from sparkdl.slices.spec import SliceSpec


class SectionExchange(GradientSync):
    """The work of a rank on the gradients of an iteration, if they are sent in sections."""

    def __init__(
        self, live: LiveReplica, slices: Sequence[SliceSpec], mine: Collection[int], rank: int
    ) -> None:
        """Create the exchange of all slices, of which this rank updates ``mine``."""
        super().__init__(rank)
        self._live, self._slices, self._mine = live, slices, mine
        self._outcome: ReplicaResult | None = None
        self._parcels: list[torch.Tensor] = []

    def compute(
        self,
        work: ReplicaIteration,
        batches: Sequence[MiniBatch],
        weights: Sequence[float],
        clock: Clock,
    ) -> tuple[float, str]:
        """See :class:`sparkdl.engines.gang.strategies.base.GradientSync`."""
        live, plans = self._live, self._slices
        self._outcome, self.count, self.losses = None, 0.0, {}
        self._parcels = [torch.empty(0, dtype=torch.uint8)] * len(plans)
        if not batches:
            return 0.0, ""
        (batch,) = batches
        passed = forward_backward(live, batch, work.seed(), work.step.loss_scale, clock)
        loss, self.count, self.losses = passed
        outcome = ReplicaResult(loss, passed.weight, len(batch), take_gradients(live))
        if live.recipe.compression is not None:
            outcome = compress_outcome(live, outcome, work, self.kept or {})
            clock.lap("compress")
        maps = section_maps(live, plans, outcome)
        written: list[Section] = []
        for n, (plan, section) in enumerate(zip(plans, maps, strict=True)):
            head = head_of(section, outcome.gradients.absent)
            (nbytes,) = sections_nbytes(live, [plan], [section])
            self._parcels[n] = torch.zeros(len(head) + nbytes, dtype=torch.uint8)
            data = self._parcels[n].numpy()
            data[: len(head)] = np.frombuffer(head, np.uint8)
            written += write_sections(live, [plan], [section], outcome, data[len(head) :])
        self._outcome = outcome
        problem = not_finite(live, plans, written, outcome)
        clock.lap("publish")
        return loss, problem

    def sections(
        self, rows: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> dict[int, list[Section]]:
        """Return the sections of every replica that took part, for each of this rank's slices."""
        size = len(rows)
        alone = len(self._parcels) == 1  # all ranks update the only slice
        arrived = exchange([self._parcels[0 if alone else to] for to in range(size)], self._rank)
        dtype = self._live.flat.layout.dtype
        found: dict[int, list[Section]] = {}
        for n in self._mine:
            found[n] = [
                replace(open_parcel(self._slices[n], dtype, parcel), replica=r, weight=weights[r])
                for r, parcel in enumerate(arrived)
                if len(parcel)
            ]
        return found

    def committed(self) -> None:
        """Note that the iteration was committed, and keep its residuals for the next one."""
        if self._outcome is not None and self._outcome.compressed is not None:
            self._kept = self._outcome.kept


def head_of(section: SectionLayout, absent: frozenset[int]) -> bytes:
    """Return the header that tells how to read a section."""
    return head_to_bytes(
        section.compressed or (),
        wire=str(section.wire).removeprefix("torch."),
        rows=sorted(section.rows.items()),
        compressed=section.compressed is not None,
        absent=sorted(absent),
    )


def open_parcel(plan: SliceSpec, dtype: torch.dtype, parcel: torch.Tensor) -> Section:
    """Read a header and its section (uint8); the result's tensors share the parcel's memory."""
    data = parcel.numpy()
    specs, head, start = head_from_bytes(data)
    section = SectionLayout(
        getattr(torch, head["wire"]),
        dict(head["rows"]),
        compressed=specs if head["compressed"] else None,
    )
    return open_section(plan, dtype, section, data[start:], absent=frozenset(head["absent"]))


def exchange(parcels: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Send ``parcels[r]`` (uint8) to each rank r, and return the parcels from all ranks, by rank."""
    lengths = torch.tensor([len(parcel) for parcel in parcels])
    table = [torch.empty_like(lengths) for _ in parcels]
    dist.all_gather(table, lengths)
    arrived = [torch.empty(int(row[rank]), dtype=torch.uint8) for row in table]
    arrived[rank] = parcels[rank]
    exchange_all(parcels, arrived)
    return arrived

"""What the owner of a slice does in one iteration: reduce, update, average. Pure torch, no Spark.

Both engines run this: the tasks of the parameter-synchronization job, and the local engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.replica.flat import Layout
from sparkdl.replica.policy import Policy
from sparkdl.sync.apply import step_slice
from sparkdl.sync.buffers import merge_buffers
from sparkdl.sync.contribution import Contribution, SectionMap, open_section, section_nbytes
from sparkdl.sync.gradient import (
    Reduced,
    clip_norm,
    clip_values,
    reduce_gradients,
    regularise,
    squared_norm,
    strengths,
)
from sparkdl.sync.histogram import Histogram
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.state import SliceState
from sparkdl.sync.store import unpack

EMA = "sparkdl.ema"
"""The name of the moving average of the weights among the arrays of a slice's state."""


@dataclass(frozen=True)
class Owner:
    """The constants of a slice: its plan, the optimizer, the policy, regularisers by parameter."""

    plan: SlicePlan
    optimizer: OptimizerPlan
    policy: Policy
    dtype: torch.dtype
    l1: Mapping[int, float]
    l2: Mapping[int, float]

    @staticmethod
    def of(plan: SlicePlan, optimizer: OptimizerPlan, policy: Policy, layout: Layout) -> Owner:
        return Owner(
            plan,
            optimizer,
            policy,
            layout.dtype,
            strengths(policy.l1, layout),
            strengths(policy.l2, layout),
        )

    def reduce(
        self, contributions: Sequence[Contribution], weights: torch.Tensor, out: torch.Tensor
    ) -> Reduced:
        """The gradient of the slice, regularised and clipped by value, in ``out``.

        ``weights``: version t of the slice.
        """
        reduced = reduce_gradients(self.plan, contributions, out)
        if self.policy.local_steps == 1:
            regularise(self.plan, reduced, weights, self.l1, self.l2)
            if self.policy.clip_value is not None:
                clip_values(reduced, self.policy.clip_value)
        return reduced

    def adopt(self, alone: Contribution, out: torch.Tensor) -> Reduced:
        """What :meth:`write_reduced` wrote, with the dense gradient copied into ``out``."""
        out.copy_(alone.gradient)
        tables = {number: (rows, values.clone()) for number, (rows, values) in alone.tables.items()}
        return Reduced(out, alone.absent, tables)

    @property
    def clips_norm(self) -> bool:
        """Whether the owners need each other's norms before they can update."""
        return self.policy.clip_norm is not None and self.policy.local_steps == 1

    def squared_norm(self, reduced: Reduced) -> float:
        """Its part of the squared global norm."""
        return squared_norm(self.plan, reduced)

    @torch.no_grad()
    def update(
        self,
        state: SliceState,
        reduced: Reduced,
        contributions: Sequence[Contribution],
        hyperparameters: Sequence[Mapping[str, Any]] | None,
        squares: Sequence[float] = (),
        loss: float = 0.0,
        others: bytes = b"",
    ) -> float | None:
        """Bring ``state``, the caller's own copy of version t, to t+1; the global norm, if clipped.

        ``squares``: :meth:`squared_norm` of every slice. ``others``: after local steps, a replica's
        optimizer state that is not in arrays, packed.
        """
        norm = None
        if self.clips_norm and self.policy.clip_norm is not None:
            norm = clip_norm(reduced, squares, self.policy.clip_norm)
        average = state.arrays.get(EMA)
        if self.policy.ema is not None and average is None:
            average = state.weights[: self.plan.trainable_length].clone()
            state.arrays[EMA] = average
        merge_buffers(self.plan, contributions, state.weights)
        if self.policy.local_steps > 1:
            _average(self.plan, state, reduced, contributions, others)
        else:
            step_slice(
                self.plan,
                state,
                reduced.gradient,
                reduced.absent,
                self.optimizer,
                hyperparameters,
                sparse=reduced.tables,
                loss=torch.tensor(loss, dtype=self.dtype),
            )
        if self.policy.ema is not None and average is not None:
            average.lerp_(state.weights[: len(average)], 1.0 - self.policy.ema)
        return norm

    def histograms(self, state: SliceState, reduced: Reduced) -> dict[tuple[str, int], Histogram]:
        """Of the weights and gradients of each parameter's piece in this slice."""
        found = {}
        for piece in self.plan.parameters:
            found["weights", piece.number] = Histogram.of(state.weights[piece.start : piece.stop])
            if piece.sparse:
                if piece.number in reduced.tables:
                    values = reduced.tables[piece.number][1]
                    found["gradients", piece.number] = Histogram.of(values)
            elif piece.number not in reduced.absent:
                values = reduced.gradient[piece.start : piece.stop]
                found["gradients", piece.number] = Histogram.of(values)
        return found

    def reduced_map(self, reduced: Reduced) -> SectionMap:
        """How a section lies in memory that holds the reduced gradient and the merged buffers."""
        rows = {number: len(rows) for number, (rows, _) in reduced.tables.items()}
        return SectionMap(self.dtype, rows)

    def reduced_nbytes(self, section: SectionMap) -> int:
        return section_nbytes(self.plan, self.dtype, section)

    @torch.no_grad()
    def write_reduced(
        self,
        section: SectionMap,
        reduced: Reduced,
        contributions: Sequence[Contribution],
        out: Any,
    ) -> None:
        """Write the reduced gradient as if it came from one replica alone."""
        place = open_section(self.plan, self.dtype, section, out)
        place.gradient.copy_(reduced.gradient)
        for number, rows in reduced.tables.items():
            for target, source in zip(place.tables[number], rows, strict=True):
                target.copy_(source)
        merged = torch.zeros(self.plan.length, dtype=self.dtype)
        merge_buffers(self.plan, contributions, merged)
        place.buffers.copy_(merged[self.plan.buffers_start :])


def _average(
    plan: SlicePlan,
    state: SliceState,
    moved: Reduced,
    contributions: Sequence[Contribution],
    others: bytes,
) -> None:
    """After local steps: the mean of the replicas' weights and of their optimizer state."""
    state.weights[: plan.dense_length].add_(moved.gradient)
    ordered = sorted(contributions, key=lambda c: c.replica)
    total = sum(c.weight for c in ordered)
    for name in {name: None for c in ordered for name in c.arrays}:
        parts = [c for c in ordered if name in c.arrays]
        merged = torch.zeros_like(parts[0].arrays[name])
        for part in parts:
            merged.add_(part.arrays[name], alpha=part.weight / total if total else 0.0)
        if name in state.arrays:
            state.arrays[name].copy_(merged)
        else:
            state.arrays[name] = merged
    if others:
        held, values = unpack(others)
        for piece in plan.parameters:
            if piece.number in values:
                state.held[piece.number] = held[piece.number]
                state.others[piece.number] = values[piece.number]

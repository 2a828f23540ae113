"""The gradients of a replica, as backward has left them in the parameters.

Writing gradients into sections while backward is running.

[Note: gradients leave early] A replica claims its slab before backward, and an autograd hook passes
on each dense gradient as soon as it is complete. The gradient is written into its place in the
sections of the slices, rounded to the wire dtype, checked for inf and NaN, and released. So it is
still in the cache when it is read, its memory is reused for the next layer's gradient, and no
replica ever has all gradients in memory. The size of sections with rows of sparse tables or with
optimizer state is known only after backward, and compression needs the whole gradient: such
replicas write everything afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sparkdl.model.flat import local
from sparkdl.model.recipe import LiveReplica
from sparkdl.slices.section import SectionLayout, SparseRows, open_section, section_nbytes, sums_up
from sparkdl.slices.spec import SliceSpec


@dataclass(frozen=True)
class Gradients:
    """The gradients of a replica."""

    dense: list[torch.Tensor | None]  # None: there is none, or it is elsewhere
    tables: dict[int, SparseRows]
    written: frozenset[int] = frozenset()  # the parameters whose gradients are in sections
    not_finite: frozenset[int] | None = None  # None: not checked yet

    @property
    def absent(self) -> frozenset[int]:
        elsewhere = self.written | self.tables.keys()
        return frozenset(n for n, g in enumerate(self.dense) if g is None and n not in elsewhere)


@torch.no_grad()
def take_gradients(replica: LiveReplica) -> Gradients:
    """Take the gradients that backward left in the parameters' ``grad``, which is cleared."""
    dense: list[torch.Tensor | None] = []
    tables: dict[int, SparseRows] = {}
    for number, (segment, parameter) in enumerate(replica.flat.parameters):
        gradient = None if parameter.grad is None else local(parameter.grad)
        if gradient is None:
            dense.append(None)
        elif segment.sparse:
            dense.append(None)
            tables[number] = _rows(gradient)
        else:
            dense.append(gradient.to_dense() if gradient.is_sparse else gradient)
    replica.clear_gradients()
    return Gradients(dense, tables)


def _rows(gradient: torch.Tensor) -> SparseRows:
    """Return the touched rows of a table's gradient (ascending) and their values, on the CPU."""
    if not gradient.is_sparse:  # the table is used densely elsewhere in the model too
        return torch.arange(len(gradient)), gradient.cpu()
    gradient = gradient.coalesce()
    return gradient.indices()[0].cpu(), gradient.values().cpu()


CHUNK = 1 << 17
"""The number of elements that are copied and checked at a time, so that they stay in the core's
cache."""
CHECK_FROM = 1 << 20
"""The smallest size of a flat vector, in elements, for which gradients are checked one by one. For
a smaller one whole sections are checked at the end, which takes fewer calls."""


def writes_early(live: LiveReplica) -> bool:
    """Return whether the sizes of this replica's sections are known before backward."""
    recipe = live.recipe
    tables = any(segment.sparse for segment in live.flat.layout.segments)
    steps = recipe.options.steps_on_replicas
    return not steps and recipe.compression is None and not tables


class GradientWriter:
    """A function object that writes gradients into the sections of all slices.

    See [Note: gradients leave early]. ``out`` is uint8, slice after slice.
    """

    def __init__(
        self,
        live: LiveReplica,
        plans: Sequence[SliceSpec],
        maps: Sequence[SectionLayout],
        out: np.ndarray,
    ) -> None:
        layout = live.flat.layout
        self._checks = layout.size >= CHECK_FROM
        self._written: set[int] = set()
        self._not_finite: set[int] = set()
        self._places: list[list[tuple[int, torch.Tensor]]] = [[] for _ in live.flat.parameters]
        begin = 0
        for plan, section in zip(plans, maps, strict=True):
            end = begin + section_nbytes(plan, layout.dtype, section)
            gradient = open_section(plan, layout.dtype, section, out[begin:end]).gradient
            for fragment in plan.parameters:
                offset = plan.start + fragment.start - layout.segments[fragment.number].start
                self._places[fragment.number].append(
                    (offset, gradient[fragment.start : fragment.stop])
                )
            begin = end

    @torch.no_grad()
    def __call__(self, number: int, gradient: torch.Tensor) -> None:
        """Write the gradient of parameter ``number``, or add it if there is one already."""
        values = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
        for offset, place in self._places[number]:
            source = values[offset : offset + len(place)]
            if number in self._written:  # reentrant checkpoints go backward more than once
                source = source.to(place) + place
            if self._checks:
                self._copy_and_check(number, source, place)
            else:
                place.copy_(source)
        self._written.add(number)

    def _copy_and_check(self, number: int, source: torch.Tensor, place: torch.Tensor) -> None:
        for part, values in zip(place.split(CHUNK), source.split(CHUNK), strict=True):
            part.copy_(values)
            if not sums_up(part) and not torch.isfinite(part).all():
                self._not_finite.add(number)

    def finish(self, rest: Gradients) -> Gradients:
        """Write the dense gradients that are still with the parameters, and return the gradients of
        the whole pass."""
        for number, gradient in enumerate(rest.dense):
            if gradient is not None:
                self(number, gradient)
        return replace(
            rest,
            dense=[None] * len(rest.dense),
            written=frozenset(self._written),
            not_finite=frozenset(self._not_finite) if self._checks else None,
        )

"""The work of a slice's owner in one iteration: reduce, update, average. Pure torch, no Spark.

All engines use it: the shuffle engine in the tasks of parameter synchronization, a gang on its ranks,
and the local engine in its process.

[Note: one pass over the bytes] An update reads M gradients and version t and writes version t+1. If
the optimizer treats every element by itself, this is done block by block: a block of the gradients
is reduced, the block of version t is copied to its place in t+1, and torch's optimizer steps it
there. So no memory for the whole gradient is needed, and each step finds what the previous one
wrote in the cache. The bits do not depend on the cut into blocks.

Blocks of a slice that stay in the CPU cache while they are reduced and stepped.

A block is a slice of a slice. It has its own :class:`SliceSpec`, so all code that works on a slice
works on a block too.

Histograms of weights and gradients over fixed, logarithmic bins, so that those of slices can be
added.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.codec.safe import mapped
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.process.determinism import seeded
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.optimizer_step import evaluated_weights, step_slice
from sparkdl.slices.reduce import (
    ReducedGradient,
    average,
    clip_factor,
    clip_values,
    merge_buffers,
    penalize,
    penalties,
    reduce_gradients,
    scaled,
    squared_norm,
)
from sparkdl.slices.section import Section
from sparkdl.slices.spec import Fragment, SliceSpec, SliceState

BLOCK_ELEMENTS = 1 << 20
"""The number of elements of a block on the CPU. Measured on a core with 2 MiB of second-level cache
and a large shared cache: smaller blocks lose more by their fixed cost (0.1 ms while Python's part
is not in cache) than they gain."""

GPU_BLOCK_ELEMENTS = 1 << 26
"""The number of elements of a block on a GPU. It limits the memory that an update needs in addition
to the slice. Not tuned by measurement."""


def cut_blocks(plan: SliceSpec, elements: int = BLOCK_ELEMENTS) -> list[SliceSpec]:
    """Cut a slice into blocks.

    Only dense parameters are cut: sparse tables and buffers together form the last block.
    """
    assert elements % ALIGNMENT == 0
    if plan.length <= elements:
        return [plan]
    dense = [fragment for fragment in plan.parameters if not fragment.sparse]
    bounds = [*range(0, plan.dense_length, elements), plan.dense_length]
    parts: list[list[Fragment]] = [[] for _ in bounds]
    for p in dense:
        for block in range(p.start // elements, -(-p.stop // elements)):
            start, stop = bounds[block : block + 2]
            low, high = max(start, p.start), min(stop, p.stop)
            shape = p.shape if high - low == p.length else ()
            parts[block].append(replace(p, start=low - start, length=high - low, shape=shape))
    parts[-1] = [replace(p, start=p.start - bounds[-1]) for p in plan.fragments[len(dense) :]]
    return [
        SliceSpec(plan.index, plan.start + start, plan.start + stop, tuple(fragments))
        for start, stop, fragments in zip(bounds, [*bounds[1:], plan.length], parts, strict=True)
        if start < stop
    ]


def block_of_state(
    plan: SliceSpec, block: SliceSpec, arrays_of: SliceState, rest_of: SliceState
) -> SliceState:
    """Return the part of a slice's state that belongs to a block.

    Weights and arrays share the memory of ``arrays_of``. ``others`` are copied from ``rest_of``,
    because each block that has a fragment of a parameter steps them anew.
    """
    start, stop = block.start - plan.start, block.stop - plan.start
    numbers = [p.number for p in block.parameters if p.number in rest_of.others]
    return SliceState(
        arrays_of.weights[start:stop],
        {name: array[start:stop] for name, array in arrays_of.arrays.items()},
        {n: rest_of.held[n] for n in numbers},
        {n: mapped(rest_of.others[n], torch.Tensor, torch.clone) for n in numbers},
    )


def keep_block(plan: SliceSpec, block: SliceSpec, stepped: SliceState, whole: SliceState) -> None:
    """Copy into the slice's state ``whole`` what a step added to the state of one of its blocks."""
    start = block.start - plan.start
    for name, array in stepped.arrays.items():
        if name not in whole.arrays:
            length, home = plan.trainable_length, array.device
            whole.arrays[name] = torch.zeros(length, dtype=array.dtype, device=home)
        place = whole.arrays[name][start : start + len(array)]
        if place.data_ptr() != array.data_ptr():
            place.copy_(array)
    whole.held.update(stepped.held)
    whole.others.update(stepped.others)


def block_of_section(plan: SliceSpec, block: SliceSpec, whole: Section) -> Section:
    """Return a block's part of a replica's section. It shares memory with the section."""
    start, stop = block.start - plan.start, block.stop - plan.start
    tables = whole.tables if block.tables else {}
    return replace(whole, gradient=whole.gradient[start:stop], tables=tables)


def block_of_reduced(plan: SliceSpec, block: SliceSpec, whole: ReducedGradient) -> ReducedGradient:
    """Return a block's part of a reduced gradient. It shares memory with the gradient."""
    start, stop = block.start - plan.start, block.stop - plan.start
    tables = whole.tables if block.tables else {}
    return ReducedGradient(whole.gradient[start:stop], whole.absent, tables)


_POSITIVE = 1e-12 * 10 ** (np.arange(0, 161) / 10)  # 1e-12 ... 1e4, ten bins a decade
EDGES = np.concatenate([[-np.inf], -_POSITIVE[::-1], _POSITIVE, [np.inf]])
"""The edges of the bins, ascending, float64. The middle bin contains 0."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bin with the extremes and sums of the values."""

    counts: np.ndarray  # [i]: the values in [EDGES[i], EDGES[i + 1])
    smallest: float  # infinity if there is no value
    largest: float  # minus infinity if there is no value
    total: float
    squares: float

    @staticmethod
    def of(values: torch.Tensor) -> Histogram:
        """Return the histogram of all finite elements of a tensor."""
        numbers = values.detach().double().reshape(-1).cpu().numpy()
        numbers = numbers[np.isfinite(numbers)]
        bins = np.searchsorted(EDGES, numbers, side="right") - 1
        return Histogram(
            np.bincount(bins, minlength=len(EDGES) - 1),
            float(numbers.min(initial=np.inf)),
            float(numbers.max(initial=-np.inf)),
            float(numbers.sum()),
            float(np.square(numbers).sum()),
        )

    @staticmethod
    def join(parts: Iterable[Histogram]) -> Histogram:
        """Return the histogram of all elements that are in ``parts``."""
        many = list(parts)
        return Histogram(
            np.sum([part.counts for part in many], axis=0),
            min(part.smallest for part in many),
            max(part.largest for part in many),
            sum(part.total for part in many),
            sum(part.squares for part in many),
        )


def histograms_of(
    fragments: Sequence[Fragment], weights: torch.Tensor, reduced: ReducedGradient
) -> dict[tuple[str, int], Histogram]:
    """Return histograms of the weights and the gradient of each fragment of a slice."""
    found = {}
    for fragment in fragments:
        here = slice(fragment.start, fragment.stop)
        found["weights", fragment.number] = Histogram.of(weights[here])
        if fragment.sparse:
            if fragment.number in reduced.tables:
                values = reduced.tables[fragment.number][1]
                found["gradients", fragment.number] = Histogram.of(values)
        elif fragment.number not in reduced.absent:
            found["gradients", fragment.number] = Histogram.of(reduced.gradient[here])
    return found


EMA = "sparkdl.ema"
"""The name of the moving average of the weights among the arrays of a slice's state."""
EVALUATED = "sparkdl.evaluated"
"""The name of the weights that count, if an optimizer with ``eval()`` keeps them apart from those at
which gradients are taken."""


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update."""

    norm: float | None  # before clipping; None: there is no limit
    histograms: Mapping[tuple[str, int], Histogram]


@dataclass(frozen=True)
class SliceUpdater:
    """The constants of a slice's owner."""

    plan: SliceSpec
    optimizer: OptimizerSpec
    options: TrainingOptions
    dtype: torch.dtype
    l1: Mapping[int, float]  # strengths of the penalty, by parameter number
    l2: Mapping[int, float]
    separable: bool = False  # the optimizer treats every element by itself

    @staticmethod
    def of(
        plan: SliceSpec,
        optimizer: OptimizerSpec,
        options: TrainingOptions,
        layout: Layout,
        separable: bool = False,
    ) -> SliceUpdater:
        return SliceUpdater(
            plan,
            optimizer,
            options,
            layout.dtype,
            penalties(options.l1, layout),
            penalties(options.l2, layout),
            separable,
        )

    @functools.cached_property
    def blocks(self) -> list[SliceSpec]:
        """Return the blocks that are updated one at a time: the whole slice if the optimizer needs
        whole tensors."""
        return self._blocks(BLOCK_ELEMENTS)

    @functools.cached_property
    def blocks_on_gpu(self) -> list[SliceSpec]:
        """Return the blocks for a GPU: few, because no cache size matters there and each block
        costs kernel launches."""
        return self._blocks(GPU_BLOCK_ELEMENTS)

    def _blocks(self, elements: int) -> list[SliceSpec]:
        cut = self.separable and not self.options.averages
        return cut_blocks(self.plan, elements) if cut else [self.plan]

    def reduce(
        self,
        sections: Sequence[Section],
        weights: torch.Tensor,
        out: torch.Tensor,
        block: SliceSpec | None = None,
    ) -> ReducedGradient:
        """Return the gradient of the slice or of a block, with penalties and clipped by value, in
        ``out``."""
        block = block or self.plan
        reduced = reduce_gradients(block, sections, out)
        if not self.options.steps_on_replicas:
            penalize(block, reduced, weights, self.l1, self.l2)
            if self.options.clip_value is not None:
                clip_values(reduced, self.options.clip_value)
        return reduced

    @property
    def clips_norm(self) -> bool:
        """Return whether the owners need each other's norms before they can update."""
        return self.options.clips_norm

    def squared_norm(self, reduced: ReducedGradient) -> float:
        """Return this slice's part of the squared global norm."""
        return squared_norm(self.plan, reduced)

    @torch.no_grad()
    def update(
        self,
        old: SliceState,
        new: SliceState,
        sections: Sequence[Section],
        hyperparameters: Sequence[Mapping[str, Any]] | None,
        *,
        known: ReducedGradient | None = None,
        squares: Sequence[float] = (),
        loss: float = 0.0,
        seed: int = 0,
        shown: Sequence[Fragment] = (),
    ) -> UpdateResult:
        """Write version t+1 into ``new``. See [Note: one pass over the bytes].

        ``new`` is ``old`` itself, or a state with the same ``held``, ``others`` and arrays in
        memory of its own with arbitrary content. ``known`` is the gradient if it is reduced
        already; it is not changed. ``squares`` has the :meth:`squared_norm` of every slice.
        """
        norm, scale = None, 1.0
        if self.clips_norm and self.options.clip_norm is not None:
            norm, scale = clip_factor(squares, self.options.clip_norm)
        first = old.arrays.get(EVALUATED, old.weights[: self.plan.trainable_length])
        if self.options.ema is not None and EMA not in old.arrays:
            new.arrays[EMA] = first.clone()
        if self.optimizer.evaluates and EVALUATED not in old.arrays:
            new.arrays[EVALUATED] = first.clone()
        elif not self.optimizer.evaluates and EVALUATED in old.arrays:  # of another optimizer
            del old.arrays[EVALUATED]
            new.arrays.pop(EVALUATED, None)
        before = replace(old, held=dict(old.held), others=dict(old.others))
        blocks = self.blocks if old.weights.device.type == "cpu" else self.blocks_on_gpu
        lengths = [self._dense_length(block) for block in blocks]
        size = self.plan.dense_length if shown else max(lengths)
        memory = torch.empty(size, dtype=self.dtype, device=old.weights.device)
        part = ReducedGradient(memory)
        with self.drawing(seed):
            for block, length in zip(blocks, lengths, strict=True):
                start, whole = block.start - self.plan.start, block is self.plan
                out = memory[start : start + length] if shown else memory[:length]
                if known is None:
                    parts = sections
                    if not whole:
                        parts = [block_of_section(self.plan, block, one) for one in sections]
                    weights = old.weights[start : start + block.length]
                    part = self.reduce(parts, weights, out, block)
                    if shown and part.gradient is not out:
                        out.copy_(part.gradient)
                else:
                    part = scaled(block_of_reduced(self.plan, block, known), scale, out)
                state = new if whole else block_of_state(self.plan, block, new, before)
                if new is not old:
                    _copy(old, state, start)
                self._step(block, state, part, sections, hyperparameters, loss)
                if not whole:
                    keep_block(self.plan, block, state, new)
        merge_buffers(self.plan, sections, new.weights, seed, self.options.behind)
        applied = ReducedGradient(memory, part.absent, part.tables)
        return UpdateResult(norm, histograms_of(shown, new.weights, applied))

    def drawing(self, seed: int) -> AbstractContextManager[None]:
        """Return a context for steps of the optimizer in which its random draws follow ``seed``."""
        return seeded(seed) if self._may_draw else contextlib.nullcontext()

    @functools.cached_property
    def _may_draw(self) -> bool:
        """Return whether the optimizer may draw random numbers.

        No optimizer of torch or of this package that treats every element by itself does. Others
        may begin to draw after some steps, which a trial does not show.
        """
        kinds = [type(mirror).__module__ for mirror in self.optimizer.schedule_targets()]
        known = all(kind.startswith(("torch.optim.", "sparkdl.optim")) for kind in kinds)
        return not (self.separable and known)

    def _dense_length(self, block: SliceSpec) -> int:
        """Return the number of elements of a block's dense gradient."""
        return max(0, min(block.stop, self.plan.start + self.plan.dense_length) - block.start)

    def _step(
        self,
        block: SliceSpec,
        state: SliceState,
        reduced: ReducedGradient,
        sections: Sequence[Section],
        hyperparameters: Sequence[Mapping[str, Any]] | None,
        loss: float,
    ) -> None:
        """Bring a block's state, a copy of version t, to t+1."""
        if self.options.outer:
            hyperparameters = None  # a schedule's are the replicas'
        if self.options.averages:
            average(block, state, reduced, sections)
        else:
            step_slice(
                block,
                state,
                reduced.gradient,
                reduced.absent,
                self.optimizer,
                hyperparameters,
                sparse=reduced.tables,
                loss=torch.tensor(loss, dtype=self.dtype),
            )
        weights = state.weights
        if self.optimizer.evaluates:
            weights = evaluated_weights(block, state, self.optimizer, hyperparameters)
            evaluated = state.arrays[EVALUATED]
            evaluated.copy_(weights[: len(evaluated)])
        if self.options.ema is not None:
            moving = state.arrays[EMA]
            moving.lerp_(weights[: len(moving)], 1.0 - self.options.ema)


def _copy(whole: SliceState, block: SliceState, start: int) -> None:
    """Copy the weights and arrays of a block that begins with element ``start`` of the whole slice."""
    block.weights.copy_(whole.weights[start : start + len(block.weights)])
    for name, array in whole.arrays.items():
        place = block.arrays[name]
        place.copy_(array[start : start + len(place)])

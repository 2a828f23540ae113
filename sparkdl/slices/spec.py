"""The cut of the flat vector into N slices, and the fragments in each slice.

The state of a slice in memory: its weights and its optimizer state.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.codec.safe import mapped
from sparkdl.model.buffers import FIRST, Rule
from sparkdl.model.flat import Layout, TensorRange


@dataclass(frozen=True)
class Fragment:
    """The part of one tensor of the layout that lies in a slice."""

    number: int  # in the layout: trainable parameters come first
    kind: str
    start: int  # counted from the start of the slice
    length: int
    shape: tuple[int, ...] = ()  # of the whole tensor; (rows, width) in a sparse table; else empty
    sparse: bool = False
    first_row: int = 0  # in a sparse table: the number of the fragment's first row
    dtype: torch.dtype = torch.float32
    rule: Rule = FIRST

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class SliceSpec:
    """Slice ``index``: elements [start, stop) of the flat vector, as fragments of tensors.

    The order in a slice is: dense parameters, sparse parameters, buffers.
    """

    index: int
    start: int
    stop: int
    fragments: tuple[Fragment, ...]

    @property
    def length(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def dense_length(self) -> int:
        """Return the number of elements up to the end of the last dense parameter, the length of
        dense gradients."""
        return max((p.stop for p in self.parameters if not p.sparse), default=0)

    @functools.cached_property
    def trainable_length(self) -> int:
        """Return the number of elements up to the end of the last parameter, the length of
        optimizer state."""
        return max((p.stop for p in self.parameters), default=0)

    @functools.cached_property
    def buffers_start(self) -> int:
        """Return the first element of the buffers, which fill the rest of the slice."""
        return min((p.start for p in self.fragments if p.kind != "parameter"), default=self.length)

    @functools.cached_property
    def parameters(self) -> tuple[Fragment, ...]:
        return tuple(p for p in self.fragments if p.kind == "parameter")

    @functools.cached_property
    def tables(self) -> tuple[Fragment, ...]:
        """Return the fragments of sparse tables."""
        return tuple(p for p in self.fragments if p.sparse)


def slice_specs(layout: Layout, slices: int, whole: bool = False) -> list[SliceSpec]:
    """Cut ``layout`` into contiguous slices of nearly equal length, some of which may be empty.

    Cuts are at multiples of 64 bytes; in a sparse table they are between two rows, and none is in a
    buffer whose rule is a function. With ``whole``, cuts are only between two tensors.
    """
    cuts = [_allowed(layout, layout.size * n // slices, whole) for n in range(slices)]
    plans = []
    for index, (start, stop) in enumerate(itertools.pairwise([*cuts, layout.size])):
        fragments = []
        for number, segment in enumerate(layout.segments):
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high or (segment.length == 0 and low == high == segment.start and low < stop):
                fragments.append(_fragment(number, segment, low, high, start))
        plans.append(SliceSpec(index, start, stop, tuple(fragments)))
    return plans


def _allowed(layout: Layout, ideal: int, whole: bool) -> int:
    """Return the permitted position of a cut at or near element ``ideal``. It is monotonic in
    ``ideal``."""
    starts = [segment.start for segment in layout.segments]
    found = bisect.bisect_right(starts, ideal) - 1
    if found < 0:
        return 0
    segment = layout.segments[found]
    end = starts[found + 1] if found + 1 < len(starts) else layout.size
    if whole or callable(segment.rule):
        return segment.start if ideal - segment.start <= end - ideal else end
    if segment.sparse:
        width = max(1, math.prod(segment.shape[1:]))
        cut = segment.start + (ideal - segment.start) // width * width
        return cut if cut < segment.stop else end
    step = ALIGNMENT // layout.dtype.itemsize
    return ideal // step * step


def _fragment(number: int, segment: TensorRange, low: int, high: int, start: int) -> Fragment:
    length, shape, first_row = high - low, segment.shape, 0
    if segment.sparse:
        width = max(1, math.prod(segment.shape[1:]))
        shape, first_row = (length // width, width), (low - segment.start) // width
    elif length < segment.length:
        shape = ()
    return Fragment(
        number,
        segment.kind,
        low - start,
        length,
        shape,
        segment.sparse,
        first_row,
        segment.dtype,
        segment.rule,
    )


ARRAY_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.int64, torch.int32})
"""The dtypes that element-wise state in slabs may have. State of another dtype goes to ``others``."""

GROUP = "param_groups."
"""The beginning of names in ``others`` of numbers that an optimizer has changed in its parameter
group. Every parameter of the group has them."""


@dataclass
class SliceState:
    """The state of one slice in memory.

    A parameter is in ``held`` and ``others`` from its first step on.
    """

    weights: torch.Tensor
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)  # each (trainable_length,)
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)  # names of a parameter's arrays
    others: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the weights and the arrays."""
        return sum(array.nbytes for array in (self.weights, *self.arrays.values()))


def join_states(
    plans: Sequence[SliceSpec], states: Sequence[SliceState], device: torch.device
) -> SliceState:
    """Join the optimizer state of all slices into that of one slice.

    State of a whole parameter comes from the first slice that has it. The result has memory of its
    own, and empty ``weights``.
    """
    joined = SliceState(torch.empty(0, device=device))
    ends = [plan.start + plan.trainable_length for plan in plans if plan.parameters]
    for plan, state in zip(plans, states, strict=True):
        for name, array in state.arrays.items():
            if name not in joined.arrays:
                joined.arrays[name] = torch.zeros(max(ends), dtype=array.dtype, device=device)
            joined.arrays[name][plan.start : plan.start + plan.trainable_length].copy_(array)
        for number, values in state.others.items():
            if number not in joined.others:
                joined.others[number] = copy.deepcopy(values)
                joined.held[number] = state.held[number]
    return joined


@dataclass(frozen=True)
class _Array:
    """The pickled form of a tensor."""

    values: np.ndarray


class _Scalar(NamedTuple):
    """The pickled form of a tensor with one number, such as a step count."""

    value: float | int
    dtype: str


def pack(state: SliceState) -> bytes:
    """Return ``held`` and ``others`` of a state as bytes.

    Tensors are pickled as numbers or NumPy arrays: torch's own pickling takes a millisecond for a
    step count.
    """
    plain = state.held, mapped(state.others, torch.Tensor, _to_array)
    return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(
    data: bytes | memoryview,
) -> tuple[dict[int, tuple[str, ...]], dict[int, dict[str, Any]]]:
    """Return ``held`` and ``others`` from the bytes that :func:`pack` made. Their tensors own their
    memory."""
    held, others = pickle.loads(data)
    return held, mapped(others, (_Scalar, _Array), _to_tensor)


def _to_array(tensor: torch.Tensor) -> _Scalar | _Array | torch.Tensor:
    if tensor.layout != torch.strided or tensor.dtype not in ARRAY_DTYPES:
        return tensor
    if tensor.ndim == 0:
        return _Scalar(tensor.item(), str(tensor.dtype).removeprefix("torch."))
    return _Array(tensor.detach().cpu().numpy())


def _to_tensor(packed: _Scalar | _Array) -> torch.Tensor:
    if isinstance(packed, _Scalar):
        return torch.tensor(packed.value, dtype=getattr(torch, packed.dtype))
    return torch.tensor(packed.values)

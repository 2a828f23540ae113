"""The state of a slice in memory: its weights and its optimizer state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from sparkdl.codec.safe import mapped
from sparkdl.slices.spec import SliceSpec

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

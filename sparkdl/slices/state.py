"""The state of a slice in memory: weights and what its optimizers keep."""

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
"""The dtypes that element-wise state in slabs may have; what has another goes to ``others``."""


@dataclass
class SliceState:
    """The state of one slice in memory.

    ``weights``: the slice of the flat vector. ``arrays``: optimizer state that has one value for
    each element, by name, each of the slice's trainable length. ``held``: which of the arrays a
    parameter has, by its number (with several optimizers it has only its own). ``others``: all
    other state (step counts, factors, lists of tensors), by parameter number and name. A parameter
    is in ``held`` and ``others`` from its first step on.
    """

    weights: torch.Tensor
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    others: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and the arrays."""
        return sum(array.nbytes for array in (self.weights, *self.arrays.values()))


def join_states(
    plans: Sequence[SliceSpec], states: Sequence[SliceState], device: torch.device
) -> SliceState:
    """The optimizers' state of all slices as that of one, with memory of its own on ``device``.

    Its ``weights`` are empty. What is kept of a whole parameter comes from the first slice with it.
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
    """A tensor as pickle sees it."""

    values: np.ndarray


class _Scalar(NamedTuple):
    """A tensor of one number, such as a step count."""

    value: float | int
    dtype: str


def pack(state: SliceState) -> bytes:
    """``held`` and ``others`` of a state as bytes.

    Tensors go as numbers or NumPy arrays: torch's own pickling takes a millisecond for a step count.
    """
    plain = state.held, mapped(state.others, torch.Tensor, _to_array)
    return pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(
    data: bytes | memoryview,
) -> tuple[dict[int, tuple[str, ...]], dict[int, dict[str, Any]]]:
    """``held`` and ``others``, the tensors in them with memory of their own."""
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

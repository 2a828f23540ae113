"""The state of a slice in memory: weights and what its optimizers keep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.slices.spec import SlicePlan

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


def mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """``value`` with every ``kind`` in its dicts, lists and tuples changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, kind, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(item, kind, change) for item in value)
    return value


def join_states(
    plans: Sequence[SlicePlan], states: Sequence[SliceState], device: torch.device
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

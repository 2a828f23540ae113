"""The state of a slice in memory: weights and what its optimizers keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

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

"""Named tensors of parameters as one run of bytes: each from a multiple of 64 bytes on. Pure torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sparkdl.replica.flat import ALIGNMENT
from sparkdl.sync.codec import as_tensor

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name."""
ByParameter = Mapping[int, Tensors]
"""Named tensors by the number of the parameter that they are of."""


class TensorSpec(NamedTuple):
    """A tensor without its values: of which parameter, its name, dtype (without ``torch.``), shape."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def specs_of(tensors: ByParameter) -> tuple[TensorSpec, ...]:
    """What is needed to read these tensors again, in the order in which they lie."""
    return tuple(
        TensorSpec(number, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for number, named in tensors.items()
        for name, tensor in named.items()
    )


def packed_nbytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of all of them; a multiple of 64."""
    return sum(aligned(spec.nbytes) for spec in specs)


def open_packed(
    specs: Sequence[TensorSpec], data: np.ndarray | memoryview
) -> dict[int, dict[str, torch.Tensor]]:
    """Tensors that share the memory of ``data`` (to be read, or to be written)."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    place = 0
    for spec in specs:
        raw = np.frombuffer(data, np.uint8, spec.nbytes, place)
        tensor = as_tensor(raw.data, getattr(torch, spec.dtype)).view(spec.shape)
        found.setdefault(spec.number, {})[spec.name] = tensor
        place += aligned(spec.nbytes)
    return found


def copy_packed(places: ByParameter, tensors: ByParameter) -> None:
    """Copy the values of ``tensors`` to where :func:`open_packed` has their places."""
    for number, named in places.items():
        for name, place in named.items():
            place.copy_(tensors[number][name])


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

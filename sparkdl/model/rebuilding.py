"""Pickling of a module that cannot be pickled itself: the function that builds it, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparkdl.model.preparation import plain
from sparkdl.process.determinism import seeded


@dataclass(frozen=True)
class Rebuilt:
    """A stand-in for a module; its pickle loads as the module.

    Attributes:
        make: Builds a module with the same names.
        seed: The seed for that.
        tensors: All parameters and buffers of the module.
    """

    make: Callable[[], nn.Module]
    seed: int
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(module: nn.Module, make: Callable[[], nn.Module], seed: int) -> Rebuilt:
        """Make the stand-in of a module.

        Args:
            module: The module.
            make: The function that has built it.
            seed: The seed to call ``make`` with.
        """
        return Rebuilt(make, seed, {name: tensor.detach() for name, tensor in _tensors(module)})

    def __reduce__(self) -> Any:
        return _rebuild, (self.make, self.seed, dict(self.tensors))


def _rebuild(
    make: Callable[[], nn.Module], seed: int, tensors: Mapping[str, torch.Tensor]
) -> nn.Module:
    with seeded(seed):
        module = plain(make())
    for name, tensor in _tensors(module):
        if name in tensors:
            tensor.data = tensors[name]
    return module


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers, including non-persistent ones.

    A tied tensor appears under each of its names.
    """
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]

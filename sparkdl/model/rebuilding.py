"""A module as what builds it and its tensors: of modules that cannot be pickled themselves."""

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
    """``make`` builds, with ``seed``, a module with the same names; ``tensors`` are all its parameters
    and buffers.

    A pickle of it is opened as the module.
    """

    make: Callable[[], nn.Module]
    seed: int
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(module: nn.Module, make: Callable[[], nn.Module], seed: int) -> Rebuilt:
        """``module``, which ``make`` has built."""
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
    """Parameters and buffers, also those that no state_dict holds; a tied one by each name."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]

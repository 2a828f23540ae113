"""A replica that can be trained: a built recipe on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.replica.care import runnable
from sparkdl.replica.flat import FlatModule
from sparkdl.replica.recipe import Recipe


@dataclass
class LiveReplica:
    """A built recipe. ``call`` runs the module; ``version`` names the weights that ``flat.flat``
    holds now."""

    recipe: Recipe
    flat: FlatModule
    call: Callable[..., Any]
    version: str = ""

    @staticmethod
    def of(recipe: Recipe, device: torch.device | str = "cpu") -> LiveReplica:
        """Build ``recipe`` on ``device``."""
        flat = FlatModule(recipe.build(), device)
        return LiveReplica(recipe, flat, runnable(flat.module, recipe.policy))

    def clear_gradients(self) -> None:
        """Let go of every parameter's gradient."""
        for _, parameter in self.flat.parameters:
            parameter.grad = None

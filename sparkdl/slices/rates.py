"""The learning rate of a step with a share of all gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sparkdl.slices.optimizer import GroupSpec, OptimizerSpec

Hyperparameters = tuple[Mapping[str, Any], ...] | None


def scaled_rates(
    optimizer: OptimizerSpec, hyperparameters: Hyperparameters, share: float, scale: str | None
) -> Hyperparameters:
    """Return hyperparameters with the learning rates of a step with a share of all gradients.

    ``scale`` is that of :class:`sparkdl.Asynchronous`.
    """
    if share == 1.0 or scale is None:
        return hyperparameters
    found: list[Mapping[str, Any]] = []
    for part in optimizer.parts:
        root = scale == "root" or (scale == "auto" and ignores_size(part))
        for group in part.groups:
            values = dict(hyperparameters[len(found)]) if hyperparameters else {}
            rate = values.get("lr", group.get("lr"))
            if rate is not None:
                values["lr"] = rate * (math.sqrt(share) if root else share)
            found.append(values)
    return tuple(found)


def ignores_size(part: GroupSpec) -> bool:
    """Return whether an optimizer's first step is the same for twice the gradient."""
    try:
        once, twice = (_first_step(part, factor) for factor in (1.0, 2.0))
    except Exception:  # it needs what a trial does not have, such as a sparse gradient
        return False
    return torch.allclose(once, twice, rtol=1e-3, atol=0.0)


def _first_step(part: GroupSpec, factor: float) -> torch.Tensor:
    optimizer = part.mirror()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01 * factor)
    optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])

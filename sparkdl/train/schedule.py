"""Learning-rate schedules: torch's own, stepped on the driver on a mirror of the parameter groups.

A schedule is stepped once an iteration. Its values travel with the iteration, so that the slices,
which have the parameters but no scheduler, use them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparkdl.errors import ModelError
from sparkdl.sync.optimizer import OptimizerPlan


class Schedule:
    """The hyperparameters of each group at the current iteration."""

    def __init__(
        self, plan: OptimizerPlan, make: Callable[[torch.optim.Optimizer], Any] | None
    ) -> None:
        self._mirror = plan.mirror()
        self._first = [_hyperparameters(group) for group in self._mirror.param_groups]
        self._scheduler = None
        if make is not None:
            try:
                self._scheduler = make(self._mirror)
            except Exception as error:
                raise ModelError(
                    f"schedule cannot be built on the optimizer ({type(error).__name__}: {error}). "
                    "Give a partial of a torch.optim.lr_scheduler class, such as "
                    "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
                ) from error
            if not isinstance(self._scheduler, torch.optim.lr_scheduler.LRScheduler):
                raise ModelError(
                    f"schedule gave a {type(self._scheduler).__name__}, not a "
                    "torch.optim.lr_scheduler.LRScheduler."
                )
            if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ModelError(
                    "schedule ReduceLROnPlateau wants a metric at each step, and schedules here "
                    "follow the iteration alone. Use another, such as "
                    "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
                )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._mirror.param_groups if "lr" in group)

    def changes(self) -> tuple[Mapping[str, Any], ...] | None:
        """What differs from the optimizer's own values, one mapping a group; None without schedule."""
        if self._scheduler is None:
            return None
        return tuple(
            {k: v for k, v in _hyperparameters(group).items() if first.get(k) != v}
            for group, first in zip(self._mirror.param_groups, self._first, strict=True)
        )

    def step(self) -> None:
        """Advance by one iteration."""
        if self._scheduler is not None:
            with warnings.catch_warnings():
                # torch asks for optimizer.step() first; the mirror has nothing to step
                warnings.filterwarnings("ignore", message="Detected call of")
                self._scheduler.step()


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}

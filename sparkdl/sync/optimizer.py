"""The user's torch optimizer on a slice.

The optimizer is taken apart once into its class and its parameter groups, and put together again on
the pieces of a slice. That is exact for an optimizer that treats every element by itself (SGD, Adam,
AdamW, RMSprop, Adagrad, ...); :meth:`OptimizerPlan.check_elementwise` finds out by trying.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ModelError
from sparkdl.replica.recipe import Recipe, optimizer_class


@dataclass(frozen=True)
class OptimizerPlan:
    """An optimizer without its tensors.

    ``groups``: the hyperparameters of each parameter group. ``members``: for each group, the
    numbers of its trainable parameters in the layout's order.
    """

    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    name: str
    groups: tuple[dict[str, Any], ...]
    members: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(
        recipe: Recipe, parameters: Sequence[torch.nn.Parameter], module: torch.nn.Module
    ) -> OptimizerPlan:
        """Take the recipe's optimizer apart; ``parameters`` are the trainable ones in layout order.

        Raises :class:`sparkdl.errors.ModelError`.
        """
        optimizer = recipe.build_optimizer(module)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ModelError(
                f"optimizer gave a {type(optimizer).__name__}: give a torch.optim class, a partial "
                "of one, or a callable(module) that returns a torch.optim.Optimizer."
            )
        number = {id(p): i for i, p in enumerate(parameters)}
        frozen = {id(p) for p in module.parameters() if not p.requires_grad}
        members = []
        for group in optimizer.param_groups:
            strangers = [p for p in group["params"] if id(p) not in number and id(p) not in frozen]
            if strangers:
                raise ModelError(
                    f"the optimizer holds a parameter of shape {list(strangers[0].shape)} that is "
                    "not one of the module's: build it from the module it is given."
                )
            members.append(tuple(number[id(p)] for p in group["params"] if id(p) in number))
        groups = tuple(
            {k: v for k, v in g.items() if k not in ("params", "param_names")}
            for g in optimizer.param_groups
        )
        if optimizer_class(recipe.optimizer) is not None:
            make = recipe.optimizer
        else:
            make = _Rebuild(type(optimizer), dict(optimizer.defaults))
        return OptimizerPlan(make, type(optimizer).__name__, groups, tuple(members))

    def build(
        self,
        pieces: Mapping[int, torch.Tensor],
        hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    ) -> torch.optim.Optimizer:
        """The optimizer on ``pieces`` (parameter number -> tensor).

        ``hyperparameters``, one mapping a group, replace those of the plan (a schedule's values).
        """
        groups = []
        for i, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            values = {**group, **(hyperparameters[i] if hyperparameters else {})}
            groups.append({**values, "params": [pieces[n] for n in members if n in pieces]})
        return self.make(groups)

    def mirror(self) -> torch.optim.Optimizer:
        """The optimizer on one small tensor a group, for a schedule to act on."""
        members = tuple((n,) for n in range(len(self.members)))
        groups = copy.deepcopy(self.groups)  # a schedule changes a tensor lr in place
        plan = OptimizerPlan(self.make, self.name, groups, members)
        return plan.build({n: torch.zeros(1) for n in range(len(self.members))})

    def check_elementwise(self) -> None:
        """Raise ModelError unless cutting a tensor gives the same update as leaving it whole.

        In float64, and by the updates, so that a small learning rate hides nothing.
        """
        generator = torch.Generator().manual_seed(0)
        start, *steps = torch.randn(4, 6, 4, generator=generator, dtype=torch.float64)
        plan = OptimizerPlan(self.make, self.name, self.groups[:1], ((0, 1),))
        whole, parts = (
            start.clone(),
            [start.reshape(-1)[:10].clone(), start.reshape(-1)[10:].clone()],
        )
        try:
            on_whole = plan.build({0: whole})
            on_parts = plan.build({0: parts[0], 1: parts[1]})
            for step in steps:
                whole.grad = step.clone()
                parts[0].grad = step.reshape(-1)[:10].clone()
                parts[1].grad = step.reshape(-1)[10:].clone()
                on_whole.step()
                on_parts.step()
        except Exception as error:
            raise ModelError(
                f"optimizer {self.name} does not work on slices of a parameter ({error}). Use one "
                "that treats each element by itself: SGD, Adam, AdamW, RMSprop, Adagrad, ..."
            ) from None
        updates = (whole - start).reshape(-1), torch.cat(parts) - start.reshape(-1)
        if not torch.allclose(*updates, rtol=1e-4, atol=1e-14):
            raise ModelError(
                f"optimizer {self.name} needs whole tensors: cutting a parameter changes its update. "
                "Use one that treats each element by itself: SGD, Adam, AdamW, RMSprop, ..."
            )


@dataclass(frozen=True)
class _Rebuild:
    """Makes an optimizer of a class whose instance was built by the user's own function."""

    kind: type[torch.optim.Optimizer]
    defaults: dict[str, Any]

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        accepted = inspect.signature(self.kind).parameters
        return self.kind(groups, **{k: v for k, v in self.defaults.items() if k in accepted})

"""The optimizers of a recipe: one, several by name of submodule, or a list that a function returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ModelError, kind_of, nearest, shown
from sparkdl.model.recipe import Recipe, optimizer_class

Factory = Callable[..., Any]
_WILDCARDS = re.compile(r"\[[^]]*\]|[*?]")


def build_optimizers(
    recipe: Recipe, module: nn.Module
) -> list[tuple[Factory | None, torch.optim.Optimizer]]:
    """Build every optimizer of ``recipe`` on ``module``.

    Each comes with the class or partial that makes another one like it, or with None if a user's
    function built it.
    """
    factory = recipe.optimizer
    if isinstance(factory, Mapping):
        return [
            (make if optimizer_class(make) else None, _checked(make(parameters), f" for {key!r}"))
            for key, make, parameters in _assigned(factory, module)
        ]
    if optimizer_class(factory) is not None:
        return [(factory, recipe.build_optimizer(module))]
    built: Any = recipe.build_optimizer(module)
    return [(None, _checked(o)) for o in (built if isinstance(built, (list, tuple)) else [built])]


def _checked(optimizer: Any, where: str = "") -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"optimizer{where} gave {kind_of(optimizer)}: give a torch.optim class, a "
            "partial of one, or a callable(module) that returns a torch.optim.Optimizer."
        )
    return optimizer


def _assigned(
    factories: Mapping[str, Any], module: nn.Module
) -> list[tuple[str, Factory, list[nn.Parameter]]]:
    """Return each key that gets trainable parameters, with its factory and these parameters."""
    for key, make in factories.items():
        if not isinstance(key, str) or not callable(make):
            raise ModelError(
                f"optimizer[{shown(key)}] is {shown(make)}: give the name of a submodule or "
                "parameter, and "
                "for it a torch.optim class or a partial of one, such as partial(Adam, lr=1e-3)."
            )
    names: dict[int, list[str]] = {}  # a tied parameter has several
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    won: dict[str, list[nn.Parameter]] = {key: [] for key in factories}
    matching: set[str] = set()
    for name, parameter in module.named_parameters():
        ranks = {
            key: rank
            for key in factories
            for alias in names[id(parameter)]
            if (rank := _rank(key, alias)) is not None
        }
        if parameter.requires_grad:
            if not ranks:
                raise ModelError(
                    f'no optimizer is given for parameter "{name}" (keys: '
                    f'{", ".join(map(repr, factories))}): add a key for it, or "" for all the rest.'
                )
            matching |= ranks.keys()
            won[max(ranks, key=lambda key: ranks[key])].append(parameter)
    known = [name for name, _ in (*module.named_modules(), *module.named_parameters()) if name]
    for key in factories:
        if key and key not in matching:
            reason = (
                "holds no trainable parameter"
                if any(_rank(key, name) is not None for name in known)
                else "is no submodule or parameter of the model"
            )
            raise ModelError(f'optimizer: "{key}" {reason}.{nearest(key, known)}')
    return [(key, factories[key], held) for key, held in won.items() if held]


def _rank(key: str, name: str) -> tuple[int, bool] | None:
    """Return how well ``key`` matches ``name``, or None if it does not.

    Keys with more non-wildcard characters match better; among equals, names are better than patterns.
    """
    if _WILDCARDS.search(key):
        return (len(_WILDCARDS.sub("", key)), False) if fnmatchcase(name, key) else None
    return (len(key), True) if key in ("", name) or name.startswith(f"{key}.") else None

"""The user's torch optimizers without their tensors, so that they can be built on the fragments of
a slice.

An optimizer is described by its class, its parameter groups and the numbers of their parameters.
Built on fragments it is exact if slices are cut as its update rule allows: anywhere for an
optimizer that treats every element by itself (SGD, Adam, AdamW, RMSprop, Adagrad, ...), between
tensors for one that uses whole tensors (Muon, Adafactor, LARS, LAMB), nowhere for one that uses all
tensors together (LBFGS).

The optimizers of a recipe: one, several by name of submodule, or a list that a function returns.

The learning rate of a step with a share of all gradients.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

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


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One optimizer without its tensors."""

    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    kind: type[torch.optim.Optimizer]
    groups: tuple[dict[str, Any], ...]
    members: tuple[tuple[int, ...], ...]  # by group: parameters' numbers, in layout order
    dimensions: tuple[int, ...]  # by group: those of its first parameter

    @property
    def name(self) -> str:
        return self.kind.__name__

    def build(
        self,
        fragments: Mapping[int, torch.Tensor],
        hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    ) -> torch.optim.Optimizer | None:
        """Build the optimizer on tensors by parameter number; None if none of them is its."""
        groups = []
        for i, (group, members) in enumerate(zip(self.groups, self.members, strict=True)):
            if params := [fragments[n] for n in members if n in fragments]:
                values = {**group, **(hyperparameters[i] if hyperparameters else {})}
                tensors = {k: v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
                groups.append({**values, **tensors, "params": params})  # a step may change them
        return self._made(groups) if groups else None

    def mirror(self) -> torch.optim.Optimizer:
        """Build the optimizer on one small tensor for each group, for a learning-rate schedule to
        act on."""
        groups = copy.deepcopy(self.groups)  # a schedule changes a tensor lr in place
        return self._made(
            [
                {**group, "params": [torch.zeros((1,) * max(1, ndim))]}
                for group, ndim in zip(groups, self.dimensions, strict=True)
            ]
        )

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer, ready for a step."""
        optimizer = self.make(groups)
        if callable(train := getattr(optimizer, "train", None)):
            train()  # it has no state yet, so this moves no weights
        return optimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """All optimizers of a run, and how the flat vector may be cut for them.

    Parameter groups are numbered over all parts, in order.
    """

    parts: tuple[GroupSpec, ...]
    elementwise: bool = True  # slices may be cut anywhere; else only between tensors
    separate: bool = True  # there may be several slices

    @staticmethod
    def of(
        recipe: Recipe, parameters: Sequence[torch.nn.Parameter], module: torch.nn.Module
    ) -> OptimizerSpec:
        """Describe the optimizers of a recipe.

        ``elementwise`` and ``separate`` are not known yet, see
        :func:`sparkdl.slices.optimizer_probe.probe_cut_rule`.
        """
        number = {id(p): i for i, p in enumerate(parameters)}
        names = {id(p): name for name, p in module.named_parameters()}
        parts: list[GroupSpec] = []
        holder: dict[int, str] = {}
        for make, optimizer in build_optimizers(recipe, module):
            name = type(optimizer).__name__
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if id(p) not in names:
                    raise ModelError(
                        f"the optimizer has a parameter of shape {list(p.shape)} that is not one "
                        "of the module's: build it from the module it is given."
                    )
                if id(p) in holder:
                    raise ModelError(
                        f"two optimizers, {holder[id(p)]} and {name}, have the parameter "
                        f'"{names[id(p)]}": give it to one.'
                    )
                holder[id(p)] = name
            groups = optimizer.param_groups
            parts.append(
                GroupSpec(
                    make=make or _Rebuild(type(optimizer), dict(optimizer.defaults)),
                    kind=type(optimizer),
                    groups=tuple(_fastest(optimizer, _without_tensors(group)) for group in groups),
                    members=tuple(
                        tuple(number[id(p)] for p in group["params"] if id(p) in number)
                        for group in groups
                    ),
                    dimensions=tuple(
                        group["params"][0].ndim if group["params"] else 1 for group in groups
                    ),
                )
            )
        return OptimizerSpec(parts=tuple(parts))

    @property
    def name(self) -> str:
        return " and ".join(part.name for part in self.parts)

    @property
    def groups(self) -> tuple[dict[str, Any], ...]:
        return tuple(group for part in self.parts for group in part.groups)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return tuple(members for part in self.parts for members in part.members)

    def build(
        self,
        fragments: Mapping[int, torch.Tensor],
        hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[torch.optim.Optimizer]:
        """Build the optimizers that have any of the given tensors as parameters."""
        built, first = [], 0
        for part in self.parts:
            last = first + len(part.groups)
            own = part.build(fragments, hyperparameters[first:last] if hyperparameters else None)
            if own is not None:
                built.append(own)
            first = last
        return built

    @property
    def evaluates(self) -> bool:
        """Return whether the weights that count are those after ``eval()`` of an optimizer, as with
        schedule-free ones."""
        return any(callable(getattr(part.kind, "eval", None)) for part in self.parts)

    def schedule_targets(self) -> list[torch.optim.Optimizer]:
        """Build each optimizer on one small tensor for each group, for a schedule to act on."""
        return [part.mirror() for part in self.parts]


def _without_tensors(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _fastest(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the group with torch's fused kernel selected, if that is faster and the user chose no
    kernel.

    Fused Adam reads and writes memory once instead of ten times: it is 2.5 times as fast at 25 M
    parameters. Its bits do not depend on where slices are cut, but differ in the last place from
    the default's.
    """
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    special = group.get("capturable") or group.get("differentiable")
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or chosen or special:
        return group
    return {**group, "fused": True}


@dataclass(frozen=True)
class _Rebuild:
    """A factory for an optimizer class whose instance was built by the user's own function."""

    kind: type[torch.optim.Optimizer]
    defaults: dict[str, Any]

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        accepted = inspect.signature(self.kind).parameters
        return self.kind(groups, **{k: v for k, v in self.defaults.items() if k in accepted})


def take_step(optimizer: torch.optim.Optimizer, *closure: Callable[[], Any]) -> None:
    """Step as ``optimizer.step(*closure)`` does, with the same bits.

    torch's own steps import its compiler first, which takes a second of processor time in each process
    that makes one, and then tell it of nothing. Where nobody has put a hook or a method of his own
    around a step of torch, it is called without that.
    """
    step = None if _is_hooked(optimizer) else _computing(type(optimizer).step)
    if step is None:
        optimizer.step(*closure)
        return
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        step(optimizer, *closure)


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    hooks = (
        *(getattr(optimizer, f"_optimizer_step_{when}_hooks", True) for when in ("pre", "post")),
        *(
            getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", True)
            for when in ("pre", "post")
        ),
    )
    return any(hooks) or "step" in vars(optimizer)  # set on the instance by a schedule, say


@functools.cache
def _computing(step: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the step that torch has wrapped for its profiler and its compiler; None: it has not."""
    try:
        profiled = torch.optim.Optimizer.profile_hook_step(_computing).__code__
        compiled = torch_optimizer._use_grad_for_differentiable(_computing).__code__
    except AttributeError:  # another version of torch does otherwise
        return None
    while getattr(step, "__code__", None) is profiled:
        step = step.__wrapped__  # type: ignore[attr-defined]
    if getattr(step, "__code__", None) is not compiled:
        return None
    return step.__wrapped__  # type: ignore[attr-defined, no-any-return]


def _build_without_compiler() -> None:
    """Let the constructors of optimizers do without torch's compiler, as :func:`take_step` does.

    torch asks it, once in a process, for a form of ``add_param_group`` that it does not compile.
    """
    add = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if not hasattr(add, _UNCOMPILED):
        setattr(add, _UNCOMPILED, add)


_UNCOMPILED = "__dynamo_disable"
_build_without_compiler()


DECLARED = "update_depends_on"
"""The class attribute in which an optimizer declares its kind: "element", "tensor" or "all"."""


KINDS = ("element", "tensor", "all")
"""The kinds of an optimizer: by what the update of an element depends on, the least first."""


def declared(kind: type[torch.optim.Optimizer]) -> str | None:
    """Return the kind that an optimizer class declares itself, or None."""
    answer: str | None = getattr(kind, DECLARED, None)
    if answer is not None and answer not in KINDS:
        raise ModelError(
            f"{kind.__name__}.{DECLARED} is {answer!r}: an element's update depends on that "
            '"element", on its "tensor", or on "all" of them.'
        )
    return answer


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
    take_step(optimizer)
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])

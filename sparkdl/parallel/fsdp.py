"""The units of a sharded model, and checks of whether a model can be sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from sparkdl.errors import ModelError, nearest
from sparkdl.model.flat import Layout
from sparkdl.model.preparation import matches_module
from sparkdl.parallel.base import FSDP, check_dense, check_elementwise, check_rows
from sparkdl.slices.optimizer import OptimizerSpec

UNIT_PARAMETERS = 100_000
"""The smallest number of parameters in a unit. Smaller blocks would not be worth a message."""


def check_sharding(
    strategy: FSDP, module: nn.Module, layout: Layout, optimizer: OptimizerSpec
) -> None:
    """Check that a model and its optimizer can be sharded.

    Raises:
        sparkdl.ModelError: If they cannot.
    """
    _check_torch()
    check_elementwise(strategy.word, optimizer)
    check_dense(strategy.word, layout)
    trainable = [segment for segment in layout.segments if segment.kind == "parameter"]
    for segment in trainable:
        if segment.dtype != trainable[0].dtype:
            raise ModelError(
                f'strategy="fsdp" needs one dtype: "{trainable[0].name}" is {trainable[0].dtype} and '
                f'"{segment.name}" is {segment.dtype}.'
            )
    check_rows(strategy.word, module.named_parameters())
    _check_shared(module, units_of(module, strategy.units))


def _check_torch() -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ModelError(
            f'strategy="fsdp" needs a newer torch than {torch.__version__}: install torch 2.13, or use '
            'strategy="zero1".'
        )


def check_all_used(word: str, module: nn.Module) -> None:
    """Check that every trainable parameter got a gradient in a pass of the model.

    With the strategy ``word``, ranks would wait for a missing one.

    Raises:
        sparkdl.ModelError: If one got none.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise ModelError(
                f'strategy="{word}" needs a gradient of every parameter, and "{name}" gets none: '
                f'freeze it (freeze=["{name}"]), or use strategy="zero1".'
            )


def units_of(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the submodules that are units, inner ones first.

    Raises:
        sparkdl.ModelError: If a pattern matches nothing, or a list of modules, which is never called.
    """
    if not patterns:
        uses = _uses(module)
        return [block for block in _blocks(module) if _uses(block).items() <= uses.items()]
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = [name for name in names if matches_module(pattern, name)]
        if not matching:
            raise ModelError(
                f'strategy=FSDP: no submodule matches "{pattern}".{nearest(pattern, names)} The model '
                f"has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
            )
        for name in matching:
            child = module.get_submodule(name)
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                raise ModelError(
                    f'strategy=FSDP: "{name}" is a list of modules, which is never called itself: '
                    f'name its members, "{name}.*".'
                )
            found[name] = child
    with_parameters = {n: m for n, m in found.items() if next(m.parameters(), None) is not None}
    return [with_parameters[n] for n in sorted(with_parameters, key=lambda n: -n.count("."))]


def _uses(module: nn.Module) -> Counter[int]:
    """Count the places in which each parameter is used."""
    return Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest blocks in the model's lists."""
    for child in module.children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and _is_large(child):
            yield child
        else:
            yield from _blocks(child)


def _is_large(module: nn.Module) -> bool:
    called = not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return called and sum(p.numel() for p in module.parameters()) >= UNIT_PARAMETERS


def _check_shared(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Check that no two units share a parameter, which one would gather and both would use."""
    holders: dict[int, set[int]] = {}
    for number, unit in enumerate([*units, module]):
        inside = {id(m) for other in units[:number] for m in other.modules()}
        for child in unit.modules():
            if id(child) not in inside:
                for parameter in child.parameters(recurse=False):
                    holders.setdefault(id(parameter), set()).add(number)
    for name, parameter in module.named_parameters():
        if len(holders[id(parameter)]) > 1:
            raise ModelError(
                f'strategy="fsdp": "{name}" is shared by several units. Name units that hold all of '
                'its places, strategy=sparkdl.FSDP(units=[...]), or use strategy="zero1".'
            )

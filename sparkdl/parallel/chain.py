"""Models as chains of modules, each of which takes the output of the one before. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparkdl.errors import ModelError, nearest
from sparkdl.parallel.trace import Items, trace_stages


def chain_of(
    module: nn.Module, split: Sequence[str] = (), inputs: Sequence[torch.Tensor] = ()
) -> Items:
    """Return the modules that a model calls one after another, with their names.

    For an ``nn.Sequential`` they are its members. For another model they are found by tracing its
    forward, see :func:`sparkdl.parallel.trace.trace_stages`.
    """
    if not is_chain(module):
        return trace_stages(module, split, inputs)
    found: Items = []
    for name, child in module.named_children():
        if is_chain(child) and len(list(child.children())):
            found += [(f"{name}.{inner}", item) for inner, item in chain_of(child)]
        else:
            found.append((name, child))
    return found


def is_chain(module: nn.Module) -> bool:
    """Return whether calling the module means no more than calling its members in turn."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    plain = type(module).forward is nn.Sequential.forward and not any(hooks)
    return isinstance(module, nn.Sequential) and plain


def first_of(items: Items, name: str) -> int:
    """Return the position of the item with this name, or of the first one inside it."""
    for place, (known, _) in enumerate(items):
        if known == name or known.startswith(f"{name}."):
            return place
    names = [known for known, _ in items]
    raise ModelError(
        f'strategy=Pipeline: no module of the chain is called "{name}".{nearest(name, names)} It has '
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
    )

"""A model as a chain of modules, each of which takes what the one before puts out. Plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparkdl.errors import ModelError, nearest
from sparkdl.parallel.trace import Items, trace_stages


def chain_of(
    module: nn.Module, split: Sequence[str] = (), inputs: Sequence[torch.Tensor] = ()
) -> Items:
    """The modules that a model calls one after another, with their names.

    Those of an ``nn.Sequential`` are its members. Of another model they are found by following its
    forward, see :func:`sparkdl.parallel.trace.trace_stages`; ``split``: names that are to be among
    them; ``inputs``: a few rows of each. Raises :class:`sparkdl.ModelError` where that cannot be
    followed.
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
    """Whether calling it is nothing but calling its members in turn."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    plain = type(module).forward is nn.Sequential.forward and not any(hooks)
    return isinstance(module, nn.Sequential) and plain


def first_of(items: Items, name: str) -> int:
    """The place of the item of this name, or of the first one inside it."""
    for place, (known, _) in enumerate(items):
        if known == name or known.startswith(f"{name}."):
            return place
    names = [known for known, _ in items]
    raise ModelError(
        f'strategy=Pipeline: no module of the chain is called "{name}".{nearest(name, names)} It has '
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
    )

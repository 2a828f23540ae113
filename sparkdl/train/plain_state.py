"""State that a model keeps beside its parameters and buffers, which no engine carries.

Each Python process would have its own of it, and the trained module none. It is found by comparing
what the modules hold before and after passes over the same rows: what changes with every pass is
state (a counter, a running mean, a generator of its own); what every pass leaves behind in the same
way is not (a cache, a constant made at the first call, the last activations).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.errors import ModelError
from sparkdl.replica.flat import changed_form, form_of

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, children, hooks."""
_NOT_LOOKED_INTO = (type, types.FunctionType, types.MethodType, types.ModuleType, weakref.ref)
_DEPTH = 8


class PlainState:
    """What the modules inside ``module`` hold now, beside parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forms = {
            (owner, name): form_of(buffer)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }
        self._before = self._held()

    def check(self, run: Callable[[], object]) -> None:
        """Raise :class:`ModelError` for state that the pass has changed which was made since, and for a
        buffer of the state_dict that has taken another form. ``run()`` makes that pass again."""
        for path, module in self._module.named_modules():
            for (owner, name), form in self._forms.items():
                found = form_of(module._buffers.get(name))
                if owner is module and found != form and _persistent(module, name):
                    raise ModelError(changed_form(f"{path}.{name}".lstrip("."), form, found))
        if self._held() == self._before:
            return
        buffers = self._carried()
        once = self._after(run, buffers)
        twice = self._after(run, buffers)
        for place, value in twice.items():
            if once.get(place) != value:
                raise ModelError(
                    f'forward changes "{place}" in each pass, and it is neither a parameter nor a '
                    "buffer: each worker would have its own, and the trained model none. Make it a "
                    "buffer: give register_buffer a tensor in __init__, which forward may change."
                )

    def _after(
        self, run: Callable[[], object], buffers: Mapping[tuple[nn.Module, str], torch.Tensor]
    ) -> dict[str, Hashable]:
        """What is held after a pass that begins with these buffers."""
        for (owner, name), content in buffers.items():
            owner._buffers[name] = content.clone()
        run()
        return self._held()

    def _carried(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """The buffers that an engine carries: all that have the form that they were built with."""
        return {
            (owner, name): buffer.detach().clone()
            for (owner, name), form in self._forms.items()
            if (buffer := owner._buffers.get(name)) is not None and form_of(buffer) == form
        }

    def _held(self) -> dict[str, Hashable]:
        """A value for each attribute, by its path."""
        known: list[Any] = [*self._module.modules(), *self._module.parameters()]
        found = {}
        for path, module in self._module.named_modules():
            own = {k: v for k, v in vars(module).items() if k not in _OF_ALL_MODULES}
            for name, buffer in module._buffers.items():
                if form_of(buffer) == self._forms.get((module, name)):
                    known.append(buffer)
                else:
                    own[name] = buffer
            seen = {id(value): value for value in known}
            for name, value in own.items():
                found[f"{path}.{name}".lstrip(".")] = _value(value, seen, _DEPTH)
        return found


def _persistent(module: nn.Module, name: str) -> bool:
    return name not in module._non_persistent_buffers_set


def _value(value: Any, seen: dict[int, Any], depth: int) -> Hashable:
    """Something equal for equal values; None where that cannot be seen. ``seen``: values by their ids,
    which are not looked into again."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float | complex | itertools.count):
        return repr(value)
    if depth == 0 or id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
        return None
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return _digest_of(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.shape, _digest(value.tobytes())
    if isinstance(value, torch.Generator):
        return _digest_of(value.get_state())
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    elif isinstance(value, np.random.RandomState | random.Random):
        value = value.__getstate__()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(_value(item, seen, depth - 1) for item in value)
    if isinstance(value, Set):
        return frozenset(_value(item, seen, depth - 1) for item in value)
    own = getattr(value, "__dict__", None)
    return _value(dict(own), seen, depth - 1) if isinstance(own, dict) else None


def _digest_of(tensor: torch.Tensor) -> Hashable:
    form = form_of(tensor)
    try:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, without values, ...
        return form
    return form, _digest(raw.data)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()

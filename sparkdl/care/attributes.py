"""Checks for state that a model has beside its parameters and buffers, and that no engine carries.

Each Python process would have its own copy of such state, and the trained module none. The checks
compare what the modules hold before and after passes over the same rows. An attribute that changes
with every pass is state (a counter, a running mean, a generator of its own). One that every pass
leaves the same is not (a cache, a constant made at the first call, the last activations). Attributes
that a module names in ``sparkdl_no_state``, such as a time that forward measures, are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkdl.care.differences import found as tell
from sparkdl.errors import ModelError
from sparkdl.model.buffers import known_rule, owner_of
from sparkdl.model.flat import changed_form, form_of
from sparkdl.model.loss import PerReplica, StepLoss
from sparkdl.usercode.content import NO_STATE, digest_of_tensor

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, children, hooks."""
_NOT_LOOKED_INTO = (type, types.FunctionType, types.MethodType, types.ModuleType, weakref.ref)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 8


class Attributes:
    """The values that ``loss`` and the modules of ``module`` hold now beside parameters and buffers."""

    def __init__(self, module: nn.Module, loss: object = None) -> None:
        self._module, self._loss = module, loss
        self._forms = {
            inner: {
                name: form_of(buffer)
                for name, buffer in inner._buffers.items()
                if buffer is not None
            }
            for inner in module.modules()
        }
        self._shared = _shared_buffers(module)
        self._of_loss = [
            (held, name, form_of(buffer), _digest_of(buffer))
            for held in _modules_of(loss)
            for name, buffer in held.named_buffers()
            if known_rule(*owner_of(held, name)) is None  # passes need no running statistics
        ]
        self._before = self._held()

    def check(self, run: Callable[[], object]) -> None:
        """Raise an error if passes change state that is neither a parameter nor a buffer.

        Of the loss these are buffers. Other state of it causes only a warning, since it may have no
        effect.
        ``run`` repeats the pass that was made since this object was created.
        """
        self._check_forms()
        self._check_loss()
        if self._held() == self._before:
            return
        buffers = self._carried()
        once = self._after(run, buffers)
        twice = self._after(run, buffers)
        for (whose, place), value in twice.items():
            if once.get((whose, place)) == value:
                continue
            if whose == "model":
                self._tell(place)
            tell("an attribute of the loss", name=place)

    def check_made(
        self,
        run: Callable[[], object],
        other: Callable[[nn.Module], object],
        build: Callable[[], nn.Module],
    ) -> None:
        """Raise an error if the first pass made a value from its rows that later passes depend on.

        Each worker would make its own value, from the rows that it sees first. A value that is the
        same for all rows, such as a mask or a table of positions, is allowed, and so is one that
        only the rows of the last pass decide, such as its activations. ``run`` repeats the pass
        that was made since this object was created, ``other`` makes one over other rows of the same
        shapes.
        """
        now = self._held()
        made = {place for place, value in now.items() if self._before.get(place) is None and value}
        if not made:
            return
        buffers = self._carried()
        before = self._after(run, buffers)
        other(self._module)
        after = self._held()
        again = self._after(run, buffers)
        for place in sorted(made):
            if place[0] == "model" and again[place] != before[place]:  # such as a running mean
                self._tell(place[1])
        kept = {place for place in made if place[0] == "model" and after[place] == now[place]}
        if not kept:
            return
        anew = Attributes(build())
        other(anew._module)
        found = anew._held()
        for place in sorted(kept):
            if found.get(place) not in (None, now[place]):
                tell("made of the first rows", name=place[1])

    def _tell(self, place: str) -> None:
        path, _, last = place.rpartition(".")
        value = vars(self._module.get_submodule(path)).get(last)
        kind = "a generator" if isinstance(value, _GENERATORS) else "an attribute"
        tell(kind, name=place, last=last)

    def _check_loss(self) -> None:
        for held, name, form, before in self._of_loss:
            buffer = dict(held.named_buffers()).get(name)
            if buffer is not None and form_of(buffer) == form and _digest_of(buffer) != before:
                tell("a buffer of the loss", name=name)

    def _check_forms(self) -> None:
        for path, module in self._module.named_modules():
            for name, form in self._forms.get(module, {}).items():
                found = form_of(module._buffers.get(name))
                if found != form and name not in module._non_persistent_buffers_set:
                    raise ModelError(changed_form(f"{path}.{name}".lstrip("."), form, found))
        for (name, owner, attribute), *others in self._shared:
            for other, its_owner, its_attribute in others:
                if its_owner._buffers.get(its_attribute) is not owner._buffers.get(attribute):
                    raise ModelError(
                        f'__init__ makes "{name}" and "{other}" one buffer, and forward assigns '
                        "another tensor to one of them: replicas and checkpoints carry one value "
                        f"for both. Write into it instead (self.{its_attribute}.copy_(...)), or "
                        "make two buffers in __init__."
                    )

    def _carried(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Return copies of the buffers that an engine carries, which still have their first form."""
        return [
            (module, name, buffer.detach().clone())
            for module, forms in self._forms.items()
            for name, form in forms.items()
            if (buffer := module._buffers.get(name)) is not None and form_of(buffer) == form
        ]

    def _after(
        self, run: Callable[[], object], buffers: Sequence[tuple[nn.Module, str, torch.Tensor]]
    ) -> dict[tuple[str, str], Hashable]:
        """Return the values that are held after a pass that begins with these buffers."""
        for module, name, content in buffers:
            module._buffers[name] = content.clone()
        run()
        return self._held()

    def _held(self) -> dict[tuple[str, str], Hashable]:
        """Return a value for each attribute, by its owner ("model" or "loss") and path."""
        known: list[Any] = [*self._module.modules(), *self._module.parameters()]
        found = {}
        for path, module in self._module.named_modules():
            named = getattr(module, NO_STATE, ())
            ignored = {*_OF_ALL_MODULES, *([named] if isinstance(named, str) else named)}
            own = {k: v for k, v in vars(module).items() if k not in ignored}
            forms = self._forms.get(module, {})
            for name, buffer in module._buffers.items():
                if name in forms and form_of(buffer) == forms[name]:
                    known.append(buffer)
                else:
                    own[name] = buffer
            seen = {id(value): value for value in known}
            for name, value in own.items():
                found["model", f"{path}.{name}".lstrip(".")] = _value(value, seen, _DEPTH)
        for name, value in getattr(self._loss, "__dict__", {}).items():
            if name != "training":
                found["loss", name.lstrip("_")] = _value(value, {}, _DEPTH)
        return found


def _shared_buffers(module: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places of each buffer of the state_dict that several modules, or names, have."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                place = f"{path}.{name}".lstrip("."), owner, name
                places.setdefault(id(buffer), []).append(place)
    return [each for each in places.values() if len(each) > 1]


_CALLED = (functools.partial, types.FunctionType, types.MethodType, PerReplica, StepLoss)


def _modules_of(loss: object, seen: frozenset[int] = frozenset()) -> Iterator[nn.Module]:
    """Yield the modules that a loss is, or holds as an attribute, an argument or in a closure."""
    if isinstance(loss, nn.Module):
        yield loss
        return
    held = [getattr(loss, "__self__", None), *getattr(loss, "__dict__", {}).values()]
    if isinstance(loss, functools.partial):
        held += [loss.func, *loss.args, *loss.keywords.values()]
    for cell in getattr(loss, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    for value in held:
        if isinstance(value, (nn.Module, *_CALLED)) and id(value) not in seen:
            yield from _modules_of(value, seen | {id(loss)})


def comparable(value: Any) -> Hashable:
    """Return an object that is equal for equal values, as far as these can be compared."""
    return _value(value, {}, _DEPTH)


def _value(value: Any, seen: dict[int, Any], depth: int) -> Hashable:
    """Return an object that is equal for equal values, or None if ``value`` cannot be compared.

    ``seen`` has values, by their ids, that are not examined again.
    """
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
    form, digest = form_of(tensor), digest_of_tensor(tensor)
    return form if digest is None else (form, digest)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()

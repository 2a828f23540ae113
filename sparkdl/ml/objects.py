"""The Params that are no plain values, by name: model, loss, optimizer and arguments of ``Trainer``."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sparkdl.codec.safe import decode, encode
from sparkdl.errors import ModelError, TrustError
from sparkdl.infer.recipe import (
    WithoutName,
    is_module_builder,
    member_of,
    recipe_by_name,
    resolved,
)
from sparkdl.loop.triggers import Trigger
from sparkdl.model.preparation import dumps

OBJECTS = ("model", "loss", "optimizer", "trainerArgs")
"""The Params that may hold what JSON cannot."""


def objects_by_name(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects as JSON, or raise :class:`WithoutName` for one that has no such form."""
    try:
        return {name: encode(value, name, leaf=_leaf) for name, value in objects.items()}
    except (TypeError, RecursionError) as error:
        raise WithoutName(str(error)) from None


def pickled_objects(objects: Mapping[str, Any]) -> bytes:
    """Return objects as a pickle."""
    return dumps(dict(objects))


def objects_of(
    named: dict[str, Any] | None, pickled: bytes, trust: bool, path: str
) -> dict[str, Any]:
    """Return the objects of a saved estimator; ``named`` is None if they are in the pickle.

    With ``trust``, functions of any kind may be imported.
    """
    try:
        if named is None:
            return dict(pickle.loads(pickled))
        read = functools.partial(_of_leaf, trust=trust, path=path)
        return {name: decode(value, {}, read) for name, value in named.items()}
    except (TrustError, ModelError):
        raise
    except Exception as error:  # importing a module may raise anything
        raise ModelError(
            f"{path}: the objects of the estimator cannot be loaded ({type(error).__name__}: {error}). "
            "Put their modules on the Python path, or pass model=make_model."
        ) from None


def _leaf(value: Any, where: str) -> dict[str, Any]:
    """Return an object as JSON. Raises TypeError if it has no name."""
    if isinstance(value, nn.Module):
        kind = type(value)
        if not list(value.parameters()) and _is_plainly(kind, value):
            return {**recipe_by_name(kind), "kind": "instance"}
        raise TypeError(f"{where} is a {kind.__name__} object with options or weights of its own")
    if isinstance(value, Trigger) and dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        given = {key: encode(part, f"{where}.{key}", leaf=_leaf) for key, part in fields.items()}
        return {**recipe_by_name(type(value)), "kind": "trigger", "kwargs": given}
    if not callable(value):
        raise TypeError(f"{where} is a {type(value).__name__} object")
    try:
        return recipe_by_name(value)
    except WithoutName as error:
        raise TypeError(f"{where}: {error}") from None


def _is_plainly(kind: type[nn.Module], value: nn.Module) -> bool:
    """Return whether a module is what its class makes without arguments, as ``CrossEntropyLoss()``."""
    try:
        plain = kind()
        return bool(vars(plain) == vars(value))
    except Exception:  # the class needs arguments, or its attributes cannot be compared
        return False


def _of_leaf(content: dict[str, Any], trust: bool, path: str) -> Any:
    """Return the object that :func:`_leaf` wrote."""
    found = resolved(content["name"])
    harmless = isinstance(found, type) and issubclass(found, (torch.optim.Optimizer, Trigger))
    if not trust and not harmless and not is_module_builder(found):
        raise TrustError(
            f'{path} names "{content["name"]}", which is neither a class of modules or optimizers, nor '
            'a function that is annotated "-> torch.nn.Module". Annotate it, or pass trust=True.'
        )
    if content["kind"] == "instance":
        return found()
    trigger = content["kind"] == "trigger"
    read = functools.partial(_of_leaf if trigger else _of_argument, trust=trust, path=path)
    args = [decode(value, {}, read) for value in content["args"]]
    kwargs = {key: decode(value, {}, read) for key, value in content["kwargs"].items()}
    if trigger:
        return found(**kwargs)
    return functools.partial(found, *args, **kwargs) if args or kwargs else found


def _of_argument(content: dict[str, Any], trust: bool, path: str) -> Any:
    """Return an argument of a recipe: a dtype, a member of an enum, or what has a name."""
    if "dtype" in content:
        return getattr(torch, content["dtype"])
    if "enum" in content:
        return member_of(content["enum"])
    plain: dict[str, Any] = {"kind": "name", "name": content.get("name"), "args": [], "kwargs": {}}
    return _of_leaf(content.get("recipe", plain), trust, path)

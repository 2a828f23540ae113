"""How a saved model says what builds its module: by name, or by a pickle."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pickle
import types
from typing import Any

from torch import nn

from sparkdl.errors import ModelError, TrustError
from sparkdl.train.saved import MODEL, PICKLE, Saved


def by_name(model: Any) -> dict[str, Any] | None:
    """The recipe as an import path and JSON arguments, or None where it has none."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    while isinstance(model, functools.partial):
        args, kwargs, model = [*model.args, *args], {**model.keywords, **kwargs}, model.func
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    if (
        not module
        or module == "__main__"
        or "<" in name
        or not isinstance(model, (type, types.FunctionType))
    ):
        return None
    try:
        if _resolve(module, name) is not model or json.loads(json.dumps([args, kwargs])) != [
            args,
            kwargs,
        ]:
            return None
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return {"kind": "name", "name": f"{module}:{name}", "args": args, "kwargs": kwargs}


def read_recipe(saved: Saved, trust: bool) -> Any:
    """The callable that builds the module, or the module itself.

    Raises :class:`sparkdl.TrustError` and :class:`sparkdl.ModelError`.
    """
    folder, told = saved.folder, saved.content.get("recipe")
    recipe: dict[str, Any] = told if isinstance(told, dict) else {}
    if recipe.get("kind") == "pickle":
        if not trust:
            raise TrustError(
                f"{folder} holds its model as a pickle, which can run any code when opened. Pass "
                "model=make_model to build the module yourself, or trust=True if you trust the file."
            )
        data = saved.checked(PICKLE)
        try:
            return pickle.loads(data)
        except Exception as error:
            raise ModelError(
                f"{folder}/{PICKLE} cannot be opened ({type(error).__name__}: {error}). It needs the "
                "modules and versions that it was saved with; or pass model=make_model."
            ) from error
    if recipe.get("kind") != "name" or not _is_named(recipe):
        raise ModelError(f"{folder}/{MODEL} is damaged: it holds no recipe.")
    module, _, name = recipe["name"].partition(":")
    try:
        found = _resolve(module, name)
    except Exception as error:  # whatever the module raises that is imported
        raise ModelError(
            f'{folder} names the model "{recipe["name"]}", which cannot be imported ({error}). Put '
            "it on the Python path, or pass model=make_model."
        ) from None
    if not trust and not _vouched_for(found):
        raise TrustError(
            f'{folder} names "{recipe["name"]}", which is no module class, nor a function of your '
            'own that is annotated "-> torch.nn.Module". Annotate it, pass model=make_model, or '
            "pass trust=True."
        )
    return functools.partial(found, *recipe["args"], **recipe["kwargs"])


def _is_named(recipe: dict[str, Any]) -> bool:
    kinds = {"name": str, "args": list, "kwargs": dict}
    return all(isinstance(recipe.get(name), kind) for name, kind in kinds.items())


def _vouched_for(found: Any) -> bool:
    """A module class, or a function that says of itself that it makes one.

    Of torch only the classes of ``torch.nn``: some others (``torch.fx``) make a module from source
    code in arguments.
    """
    torchs = str(getattr(found, "__module__", "")).split(".")[0] == "torch"
    if isinstance(found, type):
        return issubclass(found, nn.Module) and (
            not torchs or found.__module__.startswith("torch.nn.")
        )
    if not isinstance(found, types.FunctionType) or torchs:
        return False
    try:
        returned = inspect.signature(found, eval_str=True).return_annotation
    except (NameError, TypeError, ValueError):
        return False
    return isinstance(returned, type) and issubclass(returned, nn.Module)


def _resolve(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found

"""The description of a model in JSON: columns, and the recipe of its module, by name or pickled."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from sparkdl.codec.safe import decode, encode, to_plain
from sparkdl.data.columns.base import NamedFunction, Specs, name_of, specs_from_json, specs_to_json
from sparkdl.errors import ModelError, TrustError, kind_of
from sparkdl.infer.manifest import (
    FORMAT,
    MODEL,
    PICKLE,
    VERSION,
    ModelData,
    ModelDescription,
    Saved,
)
from sparkdl.infer.new_forward import build_around
from sparkdl.infer.program import Program
from sparkdl.model.preparation import plain
from sparkdl.model.recipe import Signature, problems_of_part
from sparkdl.model.squared_error import SquaredError
from sparkdl.model.windows import Windows
from sparkdl.process.determinism import seeded
from sparkdl.process.system import reports_silenced

REMEDY = (
    "A class or function of a module that can be imported, or a partial of one with plain values, is "
    "built by its name."
)

_OF_SPARKDL = (build_around, Program, SquaredError, Windows)
_OF_THE_EXAMPLE = "sparkdl.jobs.digits:convnet"


Kinds = tuple[type, ...]
"""Classes of which a folder may name a subclass without trust."""


class WithoutName(ValueError):
    """The builder of a module cannot be told by name; the message says why, to be put after a colon."""


def recipe_by_name(model: Any) -> dict[str, Any]:
    """Return the recipe as an import path and arguments, in JSON. Raises :class:`WithoutName`.

    Arguments can be numbers, text, None, dtypes, members of enums, classes and functions with a
    name, partials of these, and lists, tuples and dicts of them.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    while isinstance(model, functools.partial):
        args, kwargs, model = [*model.args, *args], {**model.keywords, **kwargs}, model.func
    name = _name_of(model)
    try:
        encoded_args = [
            encode(value, f"its argument {i}", leaf=_leaf) for i, value in enumerate(args, 1)
        ]
        encoded = {
            key: encode(value, f'its argument "{key}"', leaf=_leaf) for key, value in kwargs.items()
        }
    except (TypeError, RecursionError) as error:
        raise WithoutName(str(error)) from None
    return {"kind": "name", "name": name, "args": encoded_args, "kwargs": encoded}


def _name_of(thing: Any) -> str:
    """Return ``module:name`` of a class or a function. Raises :class:`WithoutName`."""
    if isinstance(thing, nn.Module):
        raise WithoutName("it is a module, not a function that builds one")
    if not isinstance(thing, (type, types.FunctionType)):
        raise WithoutName(f"it is {kind_of(thing)}, not a class or a function")
    module, name = thing.__module__, thing.__qualname__
    if "<lambda>" in name:
        raise WithoutName("it is a lambda")
    if "<" in name:
        raise WithoutName(f'"{thing.__name__}" is defined inside a function')
    if not module or module == "__main__":
        raise WithoutName(f'"{name}" is defined in the program or notebook itself')
    try:
        found = resolved(f"{module}:{name}")
    except (ImportError, AttributeError) as error:
        raise WithoutName(f'"{module}:{name}" cannot be imported ({error})') from None
    if found is not thing:
        raise WithoutName(f'"{module}:{name}" now means something else')
    return f"{module}:{name}"


def _leaf(value: Any, where: str) -> dict[str, Any]:
    """Return an argument that is not a plain value as JSON. Raises TypeError."""
    if isinstance(value, functools.partial):
        try:
            return {"recipe": recipe_by_name(value)}
        except WithoutName as error:
            raise TypeError(f"{where} cannot be named: {error}") from None
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    member = isinstance(value, Enum) and value.name in type(value).__members__  # no flags together
    if member or isinstance(value, (type, types.FunctionType)):
        try:
            if member:
                return {"enum": [_name_of(type(value)), value.name]}
            return {"name": _name_of(value)}
        except WithoutName as error:
            raise TypeError(f"{where} cannot be named: {error}") from None
    raise TypeError(f"{where} is {kind_of(value)}")


def read_recipe(saved: Saved, trust: bool) -> Any:
    """Return the function that builds the module, or the module; TrustError if not trusted."""
    folder, named = saved.folder, saved.content.get("recipe")
    recipe: dict[str, Any] = named if isinstance(named, dict) else {}
    if recipe.get("kind") == "pickle":
        program = recipe.get("program")
        if not trust and isinstance(program, dict) and _is_named(program):
            return by_name(folder, program, trust)
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
    if recipe.get("kind") == "none":
        raise ModelError(
            f"{folder} does not record how its model is built: {recipe.get('why')}. Pass "
            "model=make_model to build the module yourself."
        )
    if recipe.get("kind") != "name" or not _is_named(recipe):
        raise ModelError(f"{folder}/{MODEL} is damaged: it holds no recipe.")
    return by_name(folder, recipe, trust)


def by_name(folder: Any, recipe: dict[str, Any], trust: bool, harmless: Kinds = ()) -> Any:
    """Return the function that a recipe names. Raises the errors of :func:`read_recipe`."""
    build = named_object(folder, recipe["name"], trust, harmless)
    read = functools.partial(_of_leaf, folder, trust, harmless)
    try:
        args = [decode(value, {}, read) for value in recipe["args"]]
        kwargs = {key: decode(value, {}, read) for key, value in recipe["kwargs"].items()}
    except (TrustError, ModelError):
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
        RecursionError,
    ) as error:
        raise ModelError(f"{folder} is damaged: the arguments of its recipe: {error}.") from error
    return functools.partial(build, *args, **kwargs) if args or kwargs else build


def named_object(folder: Any, name: str, trust: bool, harmless: Kinds = ()) -> Any:
    """Return the class or function with this name; without trust, only one that builds a module or is
    a subclass of ``harmless``. Raises the errors of :func:`read_recipe`."""
    try:
        found = resolved(name)
    except Exception as error:  # importing the module may raise anything
        raise ModelError(
            f'{folder} names the model "{name}", which cannot be imported ({error}). Put '
            "it on the Python path, or pass model=make_model."
        ) from None
    known = isinstance(found, type) and issubclass(found, harmless)
    if not trust and not known and not is_module_builder(found):
        raise TrustError(
            f'{folder} names "{name}", which is neither a module class nor a function of '
            'yours that is annotated "-> torch.nn.Module". Annotate it, pass model=make_model, or '
            "pass trust=True."
        )
    return found


def _of_leaf(folder: Any, trust: bool, harmless: Kinds, content: Mapping[str, Any]) -> Any:
    """Return the argument that :func:`_leaf` wrote."""
    ((kind, text),) = content.items()
    if kind == "recipe" and isinstance(text, dict) and _is_named(text):
        return by_name(folder, text, trust, harmless)
    if kind == "name":
        return named_object(folder, text, trust, harmless)
    if kind == "enum":
        return member_of(text)
    dtype = getattr(torch, text) if kind == "dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no {kind} {text!r}")
    return dtype


def member_of(named: Sequence[str]) -> Enum:
    """Return the member (``module:class``, name) of an enum; ValueError if the class is none."""
    found = resolved(named[0])
    if not isinstance(found, type) or not issubclass(found, Enum):
        raise ValueError(f"{named[0]} is no enum")
    return found[named[1]]


def _is_named(recipe: dict[str, Any]) -> bool:
    kinds = {"name": str, "args": list, "kwargs": dict}
    return all(isinstance(recipe.get(name), kind) for name, kind in kinds.items())


def is_module_builder(found: Any) -> bool:
    """Return whether ``found`` is a module class, or a function annotated as returning a module.

    Of torch only the classes of ``torch.nn`` count, and of sparkdl those that saved models name: some
    others make a module from source code (``torch.fx``) or from a pickle in arguments.
    """
    package = str(getattr(found, "__module__", "")).split(".")[0]
    if package == "sparkdl":
        name = f"{found.__module__}:{getattr(found, '__qualname__', '')}"
        return found in _OF_SPARKDL or name == _OF_THE_EXAMPLE
    if isinstance(found, type):
        return issubclass(found, nn.Module) and (
            package != "torch" or found.__module__.startswith("torch.nn.")
        )
    if not isinstance(found, types.FunctionType) or package == "torch":
        return False
    try:
        returned = inspect.signature(found, eval_str=True).return_annotation
    except (NameError, TypeError, ValueError):
        return False
    return isinstance(returned, type) and issubclass(returned, nn.Module)


def resolved(named: str) -> Any:
    """Return what an import path names, as ``module:name``. Raises what importing the module raises."""
    module, _, name = named.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def content_of(trained: ModelData, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``model.json``, except for its files."""
    part = trained.signature.part
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": recipe,
        **to_plain(trained, ModelDescription),
        "columns": specs_to_json(trained.columns),
        "inputs": list(trained.signature.inputs),
        "part": {"function": name_of(part, "given as output=")} if callable(part) else part,
    }


def columns_of(saved: Saved, trust: bool) -> Specs:
    """Return the conversions of columns to tensors.

    A function that the folder names is imported only with ``trust``. Raises
    :class:`sparkdl.TrustError` and :class:`sparkdl.ModelError`.
    """
    found: dict[str, Any] = {}
    folder = saved.folder
    try:
        specs = specs_from_json(saved.content.get("columns", {}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}/{MODEL} is damaged: columns: {error}") from error
    for name, spec in specs.items():
        if isinstance(spec, NamedFunction):
            if not trust:
                raise TrustError(
                    f'{folder} names the function "{spec.name}" for the column "{name}". Pass '
                    "trust=True if you trust the folder to run it."
                )
            spec = spec.load()
        found[name] = spec
    return found


def signature_of(saved: Saved, trust: bool) -> Signature:
    """Return the way to call the module, and the part of its result that is the output.

    A function that the folder names is imported only with ``trust``. Raises
    :class:`sparkdl.TrustError` and :class:`sparkdl.ModelError`.
    """
    folder, part = saved.folder, saved.content.get("part")
    if isinstance(part, dict) and isinstance(part.get("function"), str):
        if not trust:
            raise TrustError(
                f'{folder} names the function "{part["function"]}" for output=. Pass trust=True if '
                "you trust the folder to run it."
            )
        part = NamedFunction(name=part["function"]).load()
    elif problems_of_part(part):
        raise ModelError(f"{folder}/{MODEL} is damaged: part is {kind_of(part)}.")
    return Signature(saved.manifest.inputs, part)


def built(build: Any, saved: Saved) -> nn.Module:
    """Return the module to fill with weights.

    ``build`` is a module, which is copied, or a function that makes it, from the saved recipe or from
    the caller. Raises :class:`sparkdl.ModelError`.
    """
    if isinstance(build, nn.Module):
        return plain(copy.deepcopy(build))
    folder = saved.folder
    try:
        with seeded(saved.manifest.seed), reports_silenced():  # weights are replaced afterwards
            module = build()
    except Exception as error:
        raise ModelError(
            f"the model of {folder} cannot be built ({type(error).__name__}: {error}). Pass "
            "model=make_model to build it yourself."
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"the model of {folder} is {kind_of(module)}: it must be a torch.nn.Module."
        )
    return plain(module)

"""A trained model on disk: safetensors, JSON, and how to build the module again.

A folder with ``model.safetensors`` (the plain state_dict), ``model.json`` (the recipe by name, the
columns, the output) and ``history.json``. Where the recipe is importable by name, no pickle is
written; else ``recipe.pkl`` holds it, which :func:`load` opens only with ``trust=True``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import pickle
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from sparkdl.data.columns import NamedFunction, Specs, specs_from_json, specs_to_json
from sparkdl.data.handle import Field
from sparkdl.data.ragged import Padding
from sparkdl.errors import ModelError, TrustError
from sparkdl.infer.output import Output
from sparkdl.train.history import History
from sparkdl.train.reading import built, undamaged
from sparkdl.train.trained import TrainedModel

FORMAT = "sparkdl-model"
VERSION = 1


def save(trained: TrainedModel, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Write ``trained`` into the folder ``path``. Raises FileExistsError unless ``overwrite``."""
    folder = Path(path)
    if (folder / "model.json").exists() and not overwrite:
        raise FileExistsError(f"{folder} holds a model already: pass overwrite=True to replace it.")
    folder.mkdir(parents=True, exist_ok=True)
    recipe = _by_name(trained.model) or _by_pickle(trained.model, folder)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "recipe": recipe,
        "columns": specs_to_json(trained.columns),
        "features": list(trained.features),
        "label": list(trained.label),
        "fields": [asdict(field) for field in trained.fields],
        "num_features": trained.num_features,
        "float_dtype": trained.float_dtype,
        "output": asdict(trained.output) if trained.output else None,
    }
    if recipe["kind"] == "name":
        (folder / "recipe.pkl").unlink(missing_ok=True)
    safetensors.torch.save_model(trained.module, str(folder / "model.safetensors"))
    trained.history.save(folder / "history.json")
    (folder / "model.json").write_text(json.dumps(content, indent=1) + "\n")
    return folder


def load(
    path: str | os.PathLike[str],
    model: Callable[[], nn.Module] | nn.Module | None = None,
    loss: Callable[..., Any] | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Read what :func:`save` wrote.

    ``model``: the module or the callable that builds it, instead of the saved recipe. ``loss``: for
    ``evaluate``, which a saved model does not hold. ``trust``: allow the folder to run code of its
    own choice (its pickle, or any function that it names). Without it only ``torch.nn.Module``
    classes and functions annotated ``-> torch.nn.Module`` are called. Raises
    :class:`sparkdl.TrustError`, :class:`sparkdl.ModelError`, FileNotFoundError.
    """
    folder = Path(path)
    if not (folder / "model.json").is_file():
        raise FileNotFoundError(f"{folder} holds no sparkdl model (no model.json in it).")
    content = _content(folder)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ModelError(
            f"{folder}/model.json is not a {FORMAT} of version {VERSION} "
            f"(format {content.get('format')!r}, version {content.get('version')!r})."
        )
    with undamaged(folder / "model.json"):
        build = model if model is not None else _recipe(content["recipe"], folder, trust)
        columns = _columns(content.get("columns", {}), folder, trust)
        known = {
            "features": tuple(content["features"]),
            "label": tuple(content["label"]),
            "fields": tuple(_field(f) for f in content["fields"]),
            "num_features": content["num_features"],
            "float_dtype": content["float_dtype"],
            "output": Output(tuple(content["output"]["shape"]), content["output"]["dtype"])
            if content["output"]
            else None,
        }
    with undamaged(folder / "history.json"):
        history = History.load(folder / "history.json")
    module = built(build, folder)
    try:
        safetensors.torch.load_model(module, str(folder / "model.safetensors"))
    except OSError as error:
        raise ModelError(f"the weights in {folder} cannot be read ({error}).") from error
    except (RuntimeError, safetensors.SafetensorError) as error:
        raise ModelError(f"the weights in {folder} do not fit the model: {error}") from error
    return TrainedModel(
        module=module.eval(), model=build, loss=loss, columns=columns, history=history, **known
    )


def _content(folder: Path) -> dict[str, Any]:
    with undamaged(folder / "model.json"):
        return dict(json.loads((folder / "model.json").read_text()))


def _field(content: dict[str, Any]) -> Field:
    padding = content.get("padding")
    return Field(
        content["name"],
        content["dtype"],
        tuple(content["shape"]),
        Padding(**padding) if padding else None,
    )


def _columns(content: dict[str, Any], folder: Path, trust: bool) -> Specs:
    """How columns become tensors; a function that the folder names is imported with trust only."""
    found: dict[str, Any] = {}
    for name, spec in specs_from_json(content).items():
        if isinstance(spec, NamedFunction):
            if not trust:
                raise TrustError(
                    f'{folder} names the function "{spec.name}" for the column "{name}". Pass '
                    "trust=True if you trust the folder to run it."
                )
            spec = spec.load()
        found[name] = spec
    return found


def _by_name(model: Any) -> dict[str, Any] | None:
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


def _by_pickle(model: Any, folder: Path) -> dict[str, Any]:
    from pyspark import cloudpickle

    data = cloudpickle.dumps(model)
    (folder / "recipe.pkl").write_bytes(data)
    return {"kind": "pickle", "sha256": hashlib.sha256(data).hexdigest()}


def _recipe(recipe: dict[str, Any], folder: Path, trust: bool) -> Any:
    if recipe["kind"] == "pickle":
        if not trust:
            raise TrustError(
                f"{folder} holds its model as a pickle, which can run any code when opened. Pass "
                "model=make_model to build the module yourself, or trust=True if you trust the file."
            )
        data = (folder / "recipe.pkl").read_bytes()
        if hashlib.sha256(data).hexdigest() != recipe["sha256"]:
            raise ModelError(
                f"{folder}/recipe.pkl is not the file that was saved (checksum differs)."
            )
        return pickle.loads(data)
    module, _, name = recipe["name"].partition(":")
    try:
        found = _resolve(module, name)
    except (ImportError, AttributeError) as error:
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


def _vouched_for(found: Any) -> bool:
    """A module class, or a function that says of itself that it makes one.

    Not so torch's own functions: some (``torch.fx``) make a module from source code in arguments.
    """
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    if not isinstance(found, types.FunctionType) or found.__module__.split(".")[0] == "torch":
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

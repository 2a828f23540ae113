"""The description of a model in ``model.json`` or a checkpoint's manifest, and the reading of it."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from torch import nn

from sparkdl.data.columns.base import NamedFunction, Specs, name_of, specs_from_json, specs_to_json
from sparkdl.errors import ModelError, TrustError, kind_of
from sparkdl.infer.saved_model import FORMAT, MODEL, VERSION, Saved
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.model.preparation import plain
from sparkdl.model.recipe import Signature, problems_of_part
from sparkdl.process.determinism import seeded
from sparkdl.process.system import reports_silenced


def content_of(trained: TrainedModel, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``model.json``, except for its files."""
    part = trained.signature.part
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": recipe,
        "seed": trained.seed,
        "columns": specs_to_json(trained.columns),
        "features": list(trained.features),
        "label": list(trained.label),
        "fields": [asdict(field) for field in trained.fields],
        "num_features": trained.num_features,
        "float_dtype": trained.float_dtype,
        "output": asdict(trained.output) if trained.output else None,
        "judging": asdict(trained.judging),
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

"""Another forward for a trained model: a module around the trained one, which shares its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sparkdl.data.columns.base import Specs, padding_of
from sparkdl.data.fields import Field
from sparkdl.errors import ModelError, ParameterError, kind_of, nearest, shown
from sparkdl.model.recipe import Part, Signature, SparseInput
from sparkdl.plain import plain

Around = nn.Module | Callable[[nn.Module], nn.Module]
"""A module, or a class or function that makes one of the trained module."""


def build_around(make: Callable[[nn.Module], nn.Module], model: Any) -> nn.Module:
    """Return the module that ``make`` makes of the model; saved models name this function."""
    return make(model if isinstance(model, nn.Module) else model())


def recipe_and_module(around: Around, module: nn.Module, model: Any) -> tuple[Any, nn.Module]:
    """Return how the new module is built, and the module itself in evaluation mode."""
    if isinstance(around, nn.Module):
        return around, around.eval()
    made = around(module)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"with_module: the function returned {kind_of(made)}: it must return a torch.nn.Module."
        )
    return functools.partial(build_around, around, model), made.eval()


def fields_of(names: Sequence[str], known: Mapping[str, Field]) -> tuple[Field, ...]:
    """Return the fields of the new module's columns."""
    problems = [
        f'"{name}" is no column of the training, which has {", ".join(known)}.{nearest(name, known)}'
        for name in names
        if name not in known
    ]
    if problems:
        raise ParameterError(f"with_module(features=...): {' '.join(problems)}")
    return tuple(known[name] for name in names)


def names_of(features: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the feature columns, and the keywords for them."""
    found: Any = plain(features)
    keywords: tuple[Any, ...] = ()
    if isinstance(found, Mapping):
        keywords, found = tuple(found), list(found.values())
    names = (found,) if isinstance(found, str) else tuple(found or ())
    if not names or not all(isinstance(name, str) for name in (*names, *keywords)):
        raise ParameterError(
            f"features={shown(features)}: give a column name, a list of names, or a mapping from "
            "keywords of the model to names."
        )
    return names, keywords


def signature_of(
    names: Sequence[str], keywords: Sequence[str], columns: Specs, output: Part = None
) -> Signature:
    """Return the way to call a model with feature columns, by keyword if there are some."""
    inputs = input_names(keywords, names, columns) if keywords else ()
    return Signature(inputs, output, sparse_inputs(names, columns))


def sparse_inputs(features: Sequence[str], columns: Specs) -> tuple[SparseInput, ...]:
    """Return which of a model's inputs are sparse vectors, given the feature columns."""
    found, place = [], 0
    for name in features:
        rule = padding_of(columns, name)
        if rule is not None and rule.entries_of is not None:
            found.append(SparseInput(place, rule.entries_of, rule.form))
        place += 1 if rule is None else 1 + rule.lengths + rule.mask + rule.types
    return tuple(found)


def input_names(
    keywords: Sequence[str], features: Sequence[str], columns: Specs
) -> tuple[str, ...]:
    """Return the names of a model's inputs, with those of lengths and masks."""
    names: list[str] = []
    for name, column in zip(keywords, features, strict=True):
        padding = padding_of(columns, column)
        names += [name] if padding is None else padding.names(name)
    return tuple(names)

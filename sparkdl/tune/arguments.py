"""The arguments that a search varies: fields of the trainer, and arguments of its factories."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import nn

from sparkdl.errors import ParameterError, kind_of, nearest
from sparkdl.loop.callbacks import Callback
from sparkdl.train.placed_samples import READ
from sparkdl.train.trainer import Trainer
from sparkdl.tune.folder import Objective
from sparkdl.tune.space import Domain

READING = (*READ, "replicas", "validation")
"""The fields of a trainer that say how the data is read; each of their values needs samples of its
own."""
FIXED = {
    "engine": "parallel= says whether trials run side by side or each by the engine of the trainer",
    "checkpoint": "each trial has a folder of its own in the checkpoint path of the trainer",
}
"""The fields that a search does not vary, and why."""


def problems_of_names(trainer: Trainer, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the names of a search space."""
    known = [field.name for field in fields(trainer) if field.init]
    if not names:
        yield 'the space is empty: name what varies, such as {"optimizer.lr": [0.01, 0.1]}.'
    for name in names:
        first, _, rest = str(name).partition(".")
        if not isinstance(name, str) or first not in known:
            yield (
                f'space has "{name}", and the trainer has no such argument.{nearest(first, known)} '
                'Name one of its fields ("batch_size"), or an argument of one that builds something '
                '("model.width", "optimizer.lr").'
            )
        elif first in FIXED:
            yield f'space has "{name}", which a search does not vary: {FIXED[first]}.'
        elif rest:
            try:
                changed(getattr(trainer, first), rest, None, first, try_only=True)
            except ParameterError as error:
                yield str(error)


def with_values(trainer: Trainer, values: Mapping[str, Any]) -> Trainer:
    """Return the trainer with some of its arguments replaced, such as "optimizer.lr"."""
    found: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: name.count(".")):  # a factory before its arguments
        first, _, rest = name.partition(".")
        before = found.get(first, getattr(trainer, first))
        found[first] = changed(before, rest, values[name], first)
    return replace(trainer, **found)


@dataclass(frozen=True)
class SearchSpec:
    """The trainer, the values to try, and the aim of a search."""

    trainer: Trainer
    space: Mapping[str, Domain]
    objective: Objective

    def trainer_of(self, arguments: Mapping[str, Any], *callbacks: Callback | None) -> Trainer:
        """Return the trainer of a trial with ``arguments`` as they are shown, and more callbacks."""
        values = {name: self.space[name].value(shown) for name, shown in arguments.items()}
        trainer, added = with_values(self.trainer, values), list(filter(None, callbacks))
        return replace(trainer, callbacks=[*trainer.callbacks, *added]) if added else trainer


def changed(before: Any, path: str, value: Any, where: str, try_only: bool = False) -> Any:
    """Return ``before`` (a factory, a dataclass or a mapping) with one of its arguments replaced.

    Dots in ``path`` lead into arguments, or into keys of a mapping; "" is the value itself. With
    ``try_only`` the names are looked up, but no dataclass is made with the value.
    """
    if not path:
        return value
    if isinstance(before, Mapping):
        key = _key(before, path)
        if key is None:
            raise ParameterError(
                f'space has "{where}.{path}", and {where} has the keys '
                f"{', '.join(repr(key) for key in before)}."
            )
        rest = path[len(key) :].removeprefix(".")
        inner = changed(before[key], rest, value, f"{where}.{key}", try_only)
        return {**before, key: inner}
    name, _, rest = path.partition(".")
    if is_dataclass(before) and not isinstance(before, type):
        known = [field.name for field in fields(before) if field.init]
        if name not in known:
            raise ParameterError(
                f'space has "{where}.{path}", and {where}, {type(before).__name__}, has no argument '
                f'"{name}".{nearest(name, known)} It takes {", ".join(known)}.'
            )
        inner = changed(getattr(before, name), rest, value, f"{where}.{name}", try_only)
        return before if try_only else replace(before, **{name: inner})
    if not callable(before) or isinstance(before, nn.Module):
        built = f'give a list of whole values, {{"{where}": [...]}}'
        if where == "model":
            built = "give the trainer a function or class that builds it"
        raise ParameterError(
            f'space has "{where}.{path}", and {where} is {kind_of(before)}, which takes no '
            f"arguments any more: {built}."
        )
    if rest:
        value = changed(
            getattr(before, "keywords", {}).get(name), rest, value, f"{where}.{name}", try_only
        )
    return functools.partial(before, **{name: value})


def _key(mapping: Mapping[str, Any], path: str) -> str | None:
    """Return the longest key of ``mapping`` with which ``path`` begins; "" fits any path."""
    keys = [key for key in mapping if key in ("", path) or path.startswith(f"{key}.")]
    return max(keys, key=len, default=None)

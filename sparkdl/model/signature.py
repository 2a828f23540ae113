"""The way a model is called, and the part of its return value that is its output."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sparkdl.errors import ModelError, kind_of, nearest, shown
from sparkdl.model.model_loss import OwnLoss, inner, is_own_loss

Part: TypeAlias = str | int | Callable[[Any], Any] | None
"""A part of a model's return value: a key, an attribute, an index, a function of it, or None (all)."""


@dataclass(frozen=True)
class Signature:
    """A description of how a model is called, and which part of its return value is the output."""

    inputs: tuple[str, ...] = ()  # keywords; (): the model takes them by position
    part: Part = None

    def bound(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``model`` as a function of its inputs by position; labels may follow by keyword."""
        if not self.inputs:
            return model

        def call(*inputs: Any, **others: Any) -> Any:
            named = dict(zip(self.inputs, inputs, strict=False))
            return model(*inputs[len(named) :], **named, **others)

        return call

    def call(self, model: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Call ``model`` on ``inputs``."""
        return self.bound(model)(*inputs)

    def call_for_loss(
        self,
        loss: Any,
        model: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """Return what ``model`` returns for a mini-batch, or what a step makes of it."""
        own, call = inner(loss), self.bound(model)
        if isinstance(own, OwnLoss):
            return own.returned(model, call, inputs, targets)
        return call(*inputs)

    def output(self, returned: Any) -> Any:
        return part_of(returned, self.part)

    def for_loss(self, loss: Any, returned: Any) -> Any:
        """Return the argument of ``loss``: the output, or all if the loss is an :class:`OwnLoss`."""
        return returned if is_own_loss(loss) else self.output(returned)


BY_POSITION = Signature()


def part_of(returned: Any, part: Part) -> Any:
    """Return a part of a model's return value."""
    if part is None:
        return returned
    if callable(part):
        return part(returned)
    try:
        if isinstance(returned, torch.Tensor):
            raise KeyError(part)
        if isinstance(part, int) or isinstance(returned, Mapping):
            return returned[part]
        return getattr(returned, part)
    except (LookupError, AttributeError, TypeError):
        raise ModelError(
            f"output={shown(part)}: the model returned {described(returned)}, which has no such part."
            f"{nearest(str(part), map(str, parts_of(returned)))}"
        ) from None


def problems_of_part(part: Any, where: str = "") -> list[str]:
    """Return the problems of a part that a user gave."""
    if (
        part is None
        or callable(part)
        or (isinstance(part, (str, int)) and not isinstance(part, bool))
    ):
        return []
    return [
        f"{where}output={shown(part)}: name a field of what the model returns, or give a function of "
        "it, or None."
    ]


def parts_of(returned: Any) -> dict[Any, Any]:
    """Return the fields of a mapping, named tuple or dataclass by name, or of a list or tuple by index.

    Return nothing for any other value.
    """
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        return dict(returned._asdict())
    if isinstance(returned, (list, tuple)):
        return dict(enumerate(returned))
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {f.name: getattr(returned, f.name, None) for f in dataclasses.fields(returned)}
    return {}


def described(returned: Any) -> str:
    """Return a description of a return value for messages: its shape, or its fields with theirs."""
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {list(returned.shape)}"
    shown = [
        f"{name!r} {list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
        for name, value in list(parts_of(returned).items())[:8]
    ]
    return kind_of(returned) + (f" of {', '.join(shown)}" if shown else "")


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a model's return value, of the same types, with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = {name: with_tensors(part, change) for name, part in parts_of(value).items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(*parts.values())
            if hasattr(value, "_asdict")
            else type(value)(parts.values())
        )
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return parts
    if not parts:
        return value
    changed = copy.copy(value)
    if isinstance(value, MutableMapping):
        for name, part in parts.items():
            changed[name] = part
    if dataclasses.is_dataclass(value):  # transformers' ModelOutput is both
        for name, part in parts.items():
            object.__setattr__(changed, name, part)
    return changed


def for_example(returned: Any) -> str:
    """Return an example of how to name a tensor in the model's return value."""
    parts = parts_of(returned).items()
    names = [name for name, value in parts if isinstance(value, torch.Tensor) and value.ndim]
    named = f"output={shown(names[0])}, or " if names else ""
    return f"{named}output=function of what it returns"

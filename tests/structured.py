"""Models that return several things, and take their inputs by keyword, for tests of any directory."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


@dataclass
class AsDataclass:
    logits: torch.Tensor
    hidden: torch.Tensor


class AsNamedTuple(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Made as that of transformers is: an ordered dict whose items are attributes, too."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


KINDS: dict[str, Any] = {
    "dict": lambda logits, hidden: {"logits": logits, "hidden": hidden},
    "tuple": lambda logits, hidden: (logits, hidden),
    "named tuple": AsNamedTuple,
    "dataclass": AsDataclass,
    "ModelOutput": ModelOutput,
}


class Structured(nn.Module):
    """Takes its input by keyword only."""

    def __init__(self, width: int = 2, classes: int = 3, kind: str = "ModelOutput") -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.Sequential(nn.Linear(width, 8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, classes))

    def forward(self, *, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        return KINDS[self.kind](
            self.head(hidden), hidden.view_as(hidden)
        )  # which torch's fsdp warns of

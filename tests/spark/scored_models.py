"""Models that tests score with; executors import this module by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn


class Several(nn.Module):
    """A model with two outputs, as a mapping."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"total": x.sum(1), "doubled": 2 * x, "note": "no tensor", "mean": x.mean()}


class Boxes(nn.Module):
    """A detector: a mapping for each row, of as many boxes as the row's number says, modulo 3."""

    def forward(self, number: torch.Tensor) -> list[dict[str, Any]]:
        if (number == 13).any():
            raise RuntimeError("no thirteen")
        return [
            {
                "boxes": n.half() * torch.ones(int(n) % 3, 4),
                "count": int(n) % 3,
                "name": f"row {n:g}",
            }
            for n in number
        ]


def late(found: list[dict[str, Any]]) -> list[Any]:
    """Entities of the rows, of which only those from 20 on have any."""
    return [
        [{"text": one["name"], "span": (i, i + 1)} for i in range(one["count"])]
        if float(one["name"][4:]) >= 20
        else []
        for one in found
    ]


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class Tokenized(nn.Module):
    """A module with the attributes of a pipeline of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.tokenizer = model, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Ends(nn.Module):
    """A model that returns a named tuple."""

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x.amin(1), x.amax(1))


class Elements(nn.Module):
    """A model of sequences: an output for each element, and one for the whole. It notes its batches."""

    def __init__(self, notes: str | None = None) -> None:
        super().__init__()
        self.notes = notes

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.notes:
            with open(self.notes, "a") as file:
                file.write(f"{tuple(ids.shape)}\n")
        return ids * 10, ids.sum(1) / lengths


class Columns(nn.Module):
    """A model of any number of columns of numbers."""

    def forward(self, *columns: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"all": torch.stack(columns, 1), "first": columns[0]}


class Plus(nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.amount


class Fails(nn.Module):
    """A model that fails on a number, as long as a file is there, and notes how many rows it saw."""

    def __init__(self, number: float, while_there: str, notes: str) -> None:
        super().__init__()
        self.number = number
        self.while_there, self.notes = Path(while_there), notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.while_there.exists() and bool((x == self.number).any()):
            raise ValueError(f"{self.number} is no number")
        with open(self.notes, "a") as file:
            file.write(f"{len(x)}\n")
        return x + 0.5


def word_lengths(texts: list[str]) -> list[list[int]]:
    """A tokenizer that is a function."""
    return [[len(word) for word in text.split()] for text in texts]

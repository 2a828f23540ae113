"""What a strategy that cuts tensors cannot cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sparkdl.errors import ModelError
from sparkdl.model.flat import Layout
from sparkdl.slices.optimizer import OptimizerSpec


def check_elementwise(word: str, optimizer: OptimizerSpec) -> None:
    """Raise :class:`sparkdl.ModelError` for an optimizer that looks at whole tensors. ``word``: the
    strategy's; so for what follows."""
    if not (optimizer.elementwise and optimizer.separate):
        raise ModelError(
            f'strategy="{word}" cuts tensors, and optimizer {optimizer.name} needs whole ones: use '
            'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.'
        )


def check_dense(word: str, layout: Layout, instead: str = "zero1") -> None:
    """Raise :class:`sparkdl.ModelError` for a sparse table. ``instead``: a strategy for such models."""
    for segment in layout.segments:
        if segment.sparse:
            raise ModelError(
                f'strategy="{word}" does not go with the embedding '
                f'"{segment.name.rpartition(".")[0]}", which has sparse=True: use '
                f'strategy="{instead}", or sparse=False.'
            )


def check_rows(word: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise :class:`sparkdl.ModelError` for a parameter without rows."""
    for name, parameter in parameters:
        if not parameter.ndim:
            raise ModelError(
                f'strategy="{word}" cuts parameters by rows, and "{name}" is a single number: give it '
                "the shape [1], or make it a buffer."
            )

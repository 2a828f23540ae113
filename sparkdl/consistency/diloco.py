"""DiLoCo: replicas take many steps by themselves, and an outer optimizer follows their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparkdl.consistency.base import Consistency
from sparkdl.errors import shown
from sparkdl.plain import make_plain

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Consistency):
    """Each replica takes ``inner_steps`` steps by itself; an outer optimizer applies their mean.

    This is Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023. The trainer's optimizer is the inner one. Each replica keeps its state from one iteration
    to the next. The difference between the weights at the beginning and at the end of its steps is
    what a replica sends, and the outer optimizer takes it as the gradient. An iteration uses
    ``inner_steps`` batches of ``batch_size``, and sends one gradient. A schedule sets the learning
    rate of the inner optimizer, and steps once in an iteration.

    Attributes:
        inner_steps: The number of steps of each replica in an iteration.
        outer_optimizer: A ``torch.optim`` class or a ``partial`` of one.
    """

    inner_steps: int = 30
    outer_optimizer: Callable[..., Any] | None = NESTEROV

    def __post_init__(self) -> None:
        make_plain(self, "inner_steps")

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`, also for the method below."""
        steps = self.inner_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            yield f"inner_steps={shown(steps)}: give a whole number of at least 1."
        if not callable(self.outer_optimizer):
            yield (
                f"outer_optimizer={shown(self.outer_optimizer)}: give a torch.optim class, or a "
                "partial of "
                "one such as partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
            )

    def problems_with(self, trainer: Any) -> Iterator[str]:
        if trainer.local_steps != 1:
            yield (
                f"consistency=DiLoCo with local_steps={shown(trainer.local_steps)}: inner_steps says "
                "how many steps a replica takes by itself. Leave local_steps out."
            )
        if trainer.compression is not None:
            yield (
                "consistency=DiLoCo with compression: a replica keeps the state of its optimizer "
                'where compression keeps its residuals. Leave one of the two out; wire="bf16" halves '
                "what is sent."
            )
        if trainer.precision == "fp16":
            yield (
                'consistency=DiLoCo with precision="fp16": a loss scale that overflows in one of the '
                'inner steps would lose all of them. Use precision="bf16".'
            )
        if trainer.sync_batchnorm:
            yield (
                "consistency=DiLoCo with sync_batchnorm=True: replicas do not wait for one another in "
                "their inner steps. Leave one of the two out."
            )

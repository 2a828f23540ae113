"""DiLoCo: replicas take many steps by themselves, and an outer optimizer follows their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparkdl.consistency.base import FEWEST_PARTS, Consistency, conflicts, share_problems
from sparkdl.errors import known_arguments, shown
from sparkdl.plain import is_whole, make_plain

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper."""


@known_arguments
@dataclass(frozen=True, kw_only=True)
class DiLoCo(Consistency):
    """Each replica takes ``inner_steps`` steps by itself; an outer optimizer applies their mean.

    This is Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    2023. The trainer's optimizer is the inner one. Each replica keeps its state from one iteration
    to the next. The difference between the weights at the beginning and at the end of its steps is
    what a replica sends, and the outer optimizer takes it as the gradient. An iteration uses
    ``inner_steps`` batches of ``batch_size``, and sends one gradient. A schedule sets the learning
    rate of the inner optimizer, and steps once in an iteration.

    With ``drop_stragglers`` a slow replica takes fewer steps: it stops after the one that ends
    nearest to a limit, which is learned from the times of the replicas. The difference of a replica
    counts by the rows of all its steps, also those that it left out: after fewer steps it is smaller
    already, and a smaller weight would count that twice. If more than this fraction of the rows would
    be left out, the iteration is repeated with all of them. The history has what each replica did
    (:attr:`sparkdl.History.inner_steps`), and ``fit(replay=history)`` repeats it.

    Attributes:
        inner_steps: The number of steps of each replica in an iteration.
        outer_optimizer: A ``torch.optim`` class or a ``partial`` of one.
        drop_stragglers: The largest share of the rows of an iteration to leave out, above 0 and at
            most 0.5, such as 0.25 for one of four replicas. None: none are.
    """

    inner_steps: int = 30
    outer_optimizer: Callable[..., Any] | None = NESTEROV
    drop_stragglers: float | None = None

    def __post_init__(self) -> None:
        make_plain(self, "inner_steps", "drop_stragglers")

    @property
    def may_drop(self) -> float:  # type: ignore[override]
        """Return the share of the rows that may be left out."""
        return self.drop_stragglers or 0.0

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`, also for the method below."""
        steps = self.inner_steps
        if not is_whole(steps, 1):
            yield f"inner_steps={shown(steps)}: give a whole number of at least 1."
        if not callable(self.outer_optimizer):
            yield (
                f"outer_optimizer={shown(self.outer_optimizer)}: give a torch.optim class, or a "
                "partial of "
                "one such as partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
            )
        yield from share_problems(self.drop_stragglers, "round")
        if self.drop_stragglers is not None and isinstance(steps, int) and 0 < steps < FEWEST_PARTS:
            yield (
                f"inner_steps={steps} with drop_stragglers={shown(self.drop_stragglers)}: a replica "
                f"stops between its steps, so it needs several. Use inner_steps={FEWEST_PARTS} or more."
            )

    def problems_with(self, trainer: Any) -> Iterator[str]:
        if self.drop_stragglers is not None and trainer.engine == "gang":
            yield (
                f"consistency=DiLoCo with drop_stragglers={shown(self.drop_stragglers)} and "
                'engine="gang": its ranks sum what their steps have moved before the driver knows how '
                'many these were. Use engine="shuffle", or leave drop_stragglers out.'
            )
        yield from conflicts("consistency=DiLoCo", trainer, _REASONS)


_REASONS = {
    "local_steps": "inner_steps says how many steps a replica takes by itself. Leave local_steps out.",
    "compression": "a replica keeps the state of its optimizer where compression keeps its residuals. "
    'Leave one of the two out; wire="bf16" halves what is sent.',
    "precision=fp16": "a loss scale that overflows in one of the inner steps would lose all of them. "
    'Use precision="bf16".',
    "sync_batchnorm": "replicas do not wait for one another in their inner steps. Leave one of the two "
    "out.",
}

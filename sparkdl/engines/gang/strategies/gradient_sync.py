"""What the ways to sum gradients over ranks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkdl.codec.packed import ByParameter


class GradientSync:
    """What rank ``rank`` does for the gradients of an iteration.

    ``needs_all_losses``: whether an update needs to know every rank's loss, or that it is finite:
    then a rank must know that of its own samples. ``kept``: what a hook left out of the gradients
    so far, by parameter number; None where nothing is. ``count``: what the rank's rows of the last
    pass count for, which of a loss that returns ``(sum, count)`` is known only then.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.needs_all_losses, self.count = rank, True, 0.0
        self.kept: ByParameter | None = None

    @property
    def loss_rank(self) -> int:
        """The rank that knows the loss of this one's samples."""
        return self._rank

    def scored(self, batches: int, score: Callable[[], Any]) -> Any:
        """What ``score`` makes of this rank's ``batches`` of the validation's samples."""
        return score()

"""The decision of a replica to leave out the rest of its mini-batch."""

from __future__ import annotations

import torch

from sparkdl.replica.iteration import ALL_PARTS, Clock, Limit, PassedParts


class EarlyStop:
    """A function object that says after each micro-batch whether to leave out the others.

    A replica stops after the micro-batch that ends nearest to the limit: another one, as long as
    those before, would end farther beyond it. Every replica does one at least.

    Args:
        limit: The limit of the iteration.
        replica: The number of the replica.
        clock: The clock of the replica's work.
        device: The device that it computes on.
    """

    passed: PassedParts = ALL_PARTS
    """The part of the mini-batch that was done, once it has passed."""

    def __init__(self, limit: Limit, replica: int, clock: Clock, device: torch.device) -> None:
        self._limit, self._replica, self._clock, self._device = limit, replica, clock, device

    def finish(self, passed: PassedParts) -> None:
        """Note which part of the mini-batch was done."""
        self.passed = passed

    def __call__(self, done: int) -> bool:
        """Return whether to stop after ``done`` micro-batches."""
        limit, clock = self._limit, self._clock
        if limit.parts:
            return done >= limit.parts[self._replica]
        if limit.seconds is None:
            return False
        if self._device.type == "cuda":  # which is behind what it was told
            torch.cuda.synchronize(self._device)
            clock.lap("backward")
        passes = clock.seconds.get("forward", 0.0) + clock.seconds.get("backward", 0.0)
        return sum(clock.seconds.values()) + passes / done / 2 > limit.seconds

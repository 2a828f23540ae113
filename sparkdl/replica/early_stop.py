"""The decision of a replica to leave out the rest of its rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparkdl.replica.iteration import ALL_PARTS, Clock, Limit, PassedParts


class EarlyStop:
    """A function object that says after each part whether to leave out the others.

    A part is a micro-batch, or a step of the replica's own. A replica stops after the part that ends
    nearest to the limit: another one, as long as those before, would end farther beyond it. Every
    replica does one at least.
    """

    passed: PassedParts = ALL_PARTS
    """The parts that the replica did; set when it has finished."""

    def __init__(self, limit: Limit, replica: int, clock: Clock, device: torch.device) -> None:
        self._limit, self._replica, self._clock, self._device = limit, replica, clock, device

    def finish(self, passed: PassedParts) -> None:
        """Note what was done."""
        self.passed = passed

    def __call__(self, done: int) -> bool:
        """Return whether to stop after ``done`` parts."""
        limit, clock = self._limit, self._clock
        if limit.parts:
            return done >= limit.parts[self._replica]
        if limit.seconds is None:
            return False
        if self._device.type == "cuda":  # which is behind what it was told
            torch.cuda.synchronize(self._device)
            clock.lap("backward")
        half = seconds_of_parts(clock.seconds) / done / 2
        return sum(clock.seconds.values()) + half > limit.seconds


def seconds_of_parts(seconds: Mapping[str, float]) -> float:
    """Return the seconds of a replica that grow with the parts that it does, from those by activity."""
    return sum(seconds.get(activity, 0.0) for activity in ("forward", "backward", "update"))

"""Triggers: pure predicates over (previous state, current state), combined with ``&`` and ``|``.

A trigger says when something happens: when training stops, when a callback acts. It has no memory,
so it means the same after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.errors import ParameterError
from sparkdl.train.state import TrainState


class Trigger:
    """Base class: ``trigger(previous, current) -> bool``."""

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        raise TypeError(f"{type(self).__name__} does not define __call__(previous, current)")

    def limit(self, iterations_per_epoch: int) -> int | None:
        """The iteration at which it is first true, where that is known beforehand (for a bar)."""
        return None

    def __and__(self, other: Trigger) -> Trigger:
        return Both(self, other)

    def __or__(self, other: Trigger) -> Trigger:
        return Either(self, other)


@dataclass(frozen=True)
class Both(Trigger):
    """True where both are."""

    left: Trigger
    right: Trigger

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return self.left(previous, current) and self.right(previous, current)

    def limit(self, iterations_per_epoch: int) -> int | None:
        limits = [t.limit(iterations_per_epoch) for t in (self.left, self.right)]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == 2 else None


@dataclass(frozen=True)
class Either(Trigger):
    """True where one is."""

    left: Trigger
    right: Trigger

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return self.left(previous, current) or self.right(previous, current)

    def limit(self, iterations_per_epoch: int) -> int | None:
        limits = [t.limit(iterations_per_epoch) for t in (self.left, self.right)]
        return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class MaxEpoch(Trigger):
    """See :func:`max_epoch`."""

    epochs: int

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.epoch >= self.epochs

    def limit(self, iterations_per_epoch: int) -> int | None:
        return self.epochs * iterations_per_epoch


@dataclass(frozen=True)
class MaxIteration(Trigger):
    """See :func:`max_iteration`."""

    iterations: int

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.iteration >= self.iterations

    def limit(self, iterations_per_epoch: int) -> int | None:
        return self.iterations


@dataclass(frozen=True)
class EveryEpoch(Trigger):
    """See :func:`every_epoch`."""

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.epoch > previous.epoch


@dataclass(frozen=True)
class Every(Trigger):
    """See :func:`every`."""

    iterations: int

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.iteration // self.iterations > previous.iteration // self.iterations


def max_epoch(epochs: int) -> Trigger:
    """True once ``epochs`` epochs are complete."""
    return MaxEpoch(_positive("max_epoch", epochs))


def max_iteration(iterations: int) -> Trigger:
    """True once ``iterations`` iterations are complete."""
    return MaxIteration(_positive("max_iteration", iterations))


def every_epoch() -> Trigger:
    """True at the end of each epoch."""
    return EveryEpoch()


def every(iterations: int) -> Trigger:
    """True at each multiple of ``iterations`` iterations."""
    return Every(_positive("every", iterations))


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ParameterError(f"{name}({value!r}): give a whole number of at least 1.")
    return value

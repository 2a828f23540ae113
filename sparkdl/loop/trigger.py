"""What a trigger is, and the boolean algebra over triggers: ``&``, ``|`` and ``~``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sparkdl.loop.state import TrainState


class Trigger:
    """A pure predicate over two states: ``trigger(previous, current) -> bool``.

    A class is declared with ``predictable=True`` if it reads nothing but counters and validations that
    have been: iterations may then be sent to an engine before those that precede them have ended. That
    is not inherited: each class says so for itself.
    """

    _predictable: ClassVar[bool] = False

    def __init_subclass__(cls, *, predictable: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._predictable = predictable

    @property
    def predictable(self) -> bool:
        """Whether the trigger reads nothing but counters and validations that have been."""
        return self._predictable

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        raise TypeError(f"{type(self).__name__} does not define __call__(previous, current)")

    def limit(self, iterations_per_epoch: int) -> int | None:
        """The iteration from which on it is always true, where that is known beforehand.

        A run that stops on it is no longer than that (the total of a progress bar).
        """
        return None

    def metrics(self) -> frozenset[str]:
        """Names of the metrics that it looks at; without them in a validation it is never true."""
        return frozenset()

    def __and__(self, other: Trigger) -> Trigger:
        return And(self, other)

    def __or__(self, other: Trigger) -> Trigger:
        return Or(self, other)

    def __invert__(self) -> Trigger:
        return Not(self)


@dataclass(frozen=True)
class And(Trigger):
    """True where both are."""

    left: Trigger
    right: Trigger

    @property
    def predictable(self) -> bool:
        return self.left.predictable and self.right.predictable

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return self.left(previous, current) and self.right(previous, current)

    def limit(self, iterations_per_epoch: int) -> int | None:
        limits = [t.limit(iterations_per_epoch) for t in (self.left, self.right)]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == 2 else None

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()

    def __invert__(self) -> Trigger:
        return Or(~self.left, ~self.right)  # so that limits are known through a negation


@dataclass(frozen=True)
class Or(Trigger):
    """True where one is."""

    left: Trigger
    right: Trigger

    @property
    def predictable(self) -> bool:
        return self.left.predictable and self.right.predictable

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return self.left(previous, current) or self.right(previous, current)

    def limit(self, iterations_per_epoch: int) -> int | None:
        limits = [t.limit(iterations_per_epoch) for t in (self.left, self.right)]
        return min((limit for limit in limits if limit is not None), default=None)

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()

    def __invert__(self) -> Trigger:
        return And(~self.left, ~self.right)


@dataclass(frozen=True)
class Not(Trigger):
    """True where ``trigger`` is not. When it is true for good is not known: no limit."""

    trigger: Trigger

    @property
    def predictable(self) -> bool:
        return self.trigger.predictable

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return not self.trigger(previous, current)

    def metrics(self) -> frozenset[str]:
        return self.trigger.metrics()

    def __invert__(self) -> Trigger:
        return self.trigger

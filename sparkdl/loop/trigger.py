"""The interface of a trigger, and the Boolean operators on triggers: ``&``, ``|`` and ``~``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sparkdl.errors import ParameterError
from sparkdl.loop.state import TrainState


class Trigger:
    """A pure predicate over two states: ``trigger(previous, current) -> bool``.

    Declare a class with ``predictable=True`` if it uses only counters and past validations: then
    iterations may be sent to an engine before those that precede them have ended. This is not
    inherited: each class declares it for itself.
    """

    _predictable: ClassVar[bool] = False

    def __init_subclass__(cls, *, predictable: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._predictable = predictable

    @property
    def predictable(self) -> bool:
        """Return whether the trigger uses only counters and past validations."""
        return self._predictable

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        raise TypeError(f"{type(self).__name__} does not define __call__(previous, current)")

    def limit(self, iterations_per_epoch: int) -> int | None:
        """Return the iteration from which on the trigger is always true, if that is known in
        advance.

        A run that stops on the trigger is not longer (the total of a progress bar).
        """
        return None

    def metrics(self) -> frozenset[str]:
        """Return the names of the metrics that it uses; if a validation lacks them it is never
        true."""
        return frozenset()

    def true_part(self, previous: TrainState, current: TrainState) -> Trigger:
        """Return the trigger; of several that are joined by ``|``, the first that is true."""
        return self

    def __and__(self, other: Trigger) -> Trigger:
        return And(self, _checked("&", other))

    def __or__(self, other: Trigger) -> Trigger:
        return Or(self, _checked("|", other))

    def __bool__(self) -> bool:
        raise ParameterError(
            "a trigger has no truth value before the training: combine triggers with |, & and ~ in "
            "place of or, and, not."
        )

    def __invert__(self) -> Trigger:
        return Not(self)


def _checked(sign: str, other: object) -> Trigger:
    """Return ``other``, or raise an error if it cannot stand behind ``sign``."""
    if isinstance(other, Trigger):
        return other
    found = (
        f"{other.__name__}, not called"
        if callable(other) and hasattr(other, "__name__")
        else repr(other)
    )
    raise ParameterError(
        f"behind {sign} stands {found}: give a trigger, such as sparkdl.max_epoch(5) or "
        "sparkdl.every_epoch()."
    )


@dataclass(frozen=True)
class _Pair(Trigger):
    """Two triggers together."""

    left: Trigger
    right: Trigger

    @property
    def predictable(self) -> bool:
        return self.left.predictable and self.right.predictable

    def metrics(self) -> frozenset[str]:
        return self.left.metrics() | self.right.metrics()

    def limits(self, iterations_per_epoch: int) -> list[int]:
        """Return those limits of the two that are known."""
        limits = [t.limit(iterations_per_epoch) for t in (self.left, self.right)]
        return [limit for limit in limits if limit is not None]


class And(_Pair):
    """True if both are."""

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return self.left(previous, current) and self.right(previous, current)

    def limit(self, iterations_per_epoch: int) -> int | None:
        known = self.limits(iterations_per_epoch)
        return max(known) if len(known) == 2 else None

    def __invert__(self) -> Trigger:
        return Or(~self.left, ~self.right)  # so that limits survive a negation


class Or(_Pair):
    """True if at least one is."""

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return self.left(previous, current) or self.right(previous, current)

    def true_part(self, previous: TrainState, current: TrainState) -> Trigger:
        side = self.left if self.left(previous, current) else self.right
        return side.true_part(previous, current)

    def limit(self, iterations_per_epoch: int) -> int | None:
        return min(self.limits(iterations_per_epoch), default=None)

    def __invert__(self) -> Trigger:
        return And(~self.left, ~self.right)


@dataclass(frozen=True)
class Not(Trigger):
    """True if ``trigger`` is not. From when on it stays true is not known, so it has no limit."""

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

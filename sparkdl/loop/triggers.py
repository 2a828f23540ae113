"""Triggers: pure predicates over (previous, current) state, combined with ``&``, ``|`` and ``~``.

A trigger says when something happens: when training stops, when a callback acts. It has no memory,
so it means the same after a resume. The set follows BigDL's (Dai et al., 2019).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sparkdl.errors import ParameterError, shown
from sparkdl.loop.state import TrainState
from sparkdl.plain import is_number, is_whole, plain


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


__all__ = [
    "MaxEpoch",
    "Trigger",
    "every",
    "every_epoch",
    "every_seconds",
    "max_epoch",
    "max_iteration",
    "max_score",
    "max_time",
    "min_loss",
    "plateau",
    "several_iterations",
]


@dataclass(frozen=True)
class MaxEpoch(Trigger, predictable=True):
    """The trigger of :func:`max_epoch`."""

    epochs: int

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.epoch >= self.epochs

    def limit(self, iterations_per_epoch: int) -> int | None:
        return self.epochs * iterations_per_epoch


@dataclass(frozen=True)
class MaxIteration(Trigger, predictable=True):
    """The trigger of :func:`max_iteration`."""

    iterations: int

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.iteration >= self.iterations

    def limit(self, iterations_per_epoch: int) -> int | None:
        return self.iterations


@dataclass(frozen=True)
class EveryEpoch(Trigger, predictable=True):
    """The trigger of :func:`every_epoch`."""

    epochs: int = 1

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.epoch // self.epochs > previous.epoch // self.epochs


@dataclass(frozen=True)
class Every(Trigger, predictable=True):
    """The trigger of :func:`every`."""

    iterations: int

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.iteration // self.iterations > previous.iteration // self.iterations


@dataclass(frozen=True)
class EverySeconds(Trigger):
    """The trigger of :func:`every_seconds`."""

    seconds: float

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.seconds // self.seconds > previous.seconds // self.seconds


@dataclass(frozen=True)
class MaxTime(Trigger):
    """The trigger of :func:`max_time`."""

    seconds: float

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.seconds >= self.seconds


@dataclass(frozen=True)
class MinLoss(Trigger):
    """The trigger of :func:`min_loss`."""

    loss: float

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        return current.loss <= self.loss


@dataclass(frozen=True)
class MaxScore(Trigger, predictable=True):
    """The trigger of :func:`max_score`."""

    metric: str
    score: float

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        if self.metric not in current.metrics:
            return False
        sign = _sign(self.metric, current)
        return sign * current.metrics[self.metric] >= sign * self.score

    def metrics(self) -> frozenset[str]:
        return frozenset({self.metric})


@dataclass(frozen=True)
class Plateau(Trigger, predictable=True):
    """The trigger of :func:`plateau`."""

    metric: str
    patience: int
    min_delta: float = 0.0

    def __call__(self, previous: TrainState, current: TrainState) -> bool:
        sign = _sign(self.metric, current)
        scores = [
            sign * validated.metrics[self.metric]
            for validated in current.validations
            if self.metric in validated.metrics
        ]
        before, recent = scores[: -self.patience], scores[-self.patience :]
        if not before:
            return False
        best = max((s for s in before if not math.isnan(s)), default=-math.inf)
        return not any(score - best > self.min_delta for score in recent)

    def metrics(self) -> frozenset[str]:
        return frozenset({self.metric})


def max_epoch(epochs: int) -> Trigger:
    """Return a trigger that is true once ``epochs`` epochs are complete."""
    return MaxEpoch(_positive("max_epoch", epochs))


def max_iteration(iterations: int) -> Trigger:
    """Return a trigger that is true once ``iterations`` iterations are complete."""
    return MaxIteration(_positive("max_iteration", iterations))


def every_epoch(epochs: int = 1) -> Trigger:
    """Return a trigger that is true at the end of each epoch, or of each ``epochs``-th one."""
    return EveryEpoch(_positive("every_epoch", epochs))


def every(iterations: int) -> Trigger:
    """Return a trigger that is true at each multiple of ``iterations`` iterations."""
    return Every(_positive("every", iterations))


def several_iterations(iterations: int) -> Trigger:
    """Return the trigger of :func:`every`, under BigDL's name."""
    return Every(_positive("several_iterations", iterations))


def every_seconds(seconds: float) -> Trigger:
    """Return a trigger that is true after the first iteration that ends past each multiple of
    ``seconds`` seconds of training."""
    return EverySeconds(_duration("every_seconds", seconds))


def max_time(seconds: float) -> Trigger:
    """Return a trigger that is true once training has taken ``seconds`` seconds, with the earlier
    parts of a resumed run."""
    return MaxTime(_duration("max_time", seconds))


def min_loss(loss: float) -> Trigger:
    """Return a trigger that is true if the loss of the last global batch is at most ``loss``."""
    return MinLoss(_number(f"min_loss({shown(loss)})", loss))


def max_score(metric: str, score: float) -> Trigger:
    """Return a trigger that is true if ``metric`` was at least ``score`` in the last validation.

    If less of the metric is better, it must be at most ``score``. The trigger is false before the
    first validation.
    """
    call = f"max_score({shown(metric)}, {shown(score)})"
    return MaxScore(_name(call, metric), _number(call, score))


def plateau(metric: str, patience: int, min_delta: float = 0.0) -> Trigger:
    """Return a trigger for early stopping, true once ``patience`` validations in a row brought no
    improvement.

    It is true if none of the last ``patience`` values of the metric is better than the best value
    before them by more than ``min_delta``. Whether more or less is better is a property of the
    metric. A NaN is no improvement.

    Args:
        metric: The name of a metric of the validation.
        patience: The number of validations, at least 1.
        min_delta: The smallest difference that counts, at least 0.

    Raises:
        ParameterError: An argument is wrong.
    """
    call = f"plateau({shown(metric)}, {shown(patience)}, {shown(min_delta)})"
    patience = plain(patience)
    if not is_whole(patience, 1):
        raise ParameterError(f"{call}: give a patience of at least 1 validation.")
    least = _number(call, min_delta)
    if least < 0:
        raise ParameterError(f"{call}: give a min_delta of at least 0.")
    return Plateau(_name(call, metric), patience, least)


def no_trigger(place: str, value: object, example: str, of: Callable[..., Trigger] = every) -> str:
    """Return the error message for a value that is no trigger; ``place`` has "{}" for it."""
    name = getattr(value, "__name__", "")
    if name in __all__ and globals()[name] is value and not isinstance(value, type):
        arguments = ", ".join(inspect.signature(globals()[name]).parameters)
        return f"{place.format(f'sparkdl.{name}')}: call it, as in sparkdl.{name}({arguments})."
    if is_whole(value, 1):
        example = f"sparkdl.{of.__name__}({value})"
    return f"{place.format(shown(value))}: give a trigger, such as {example}."


def _sign(metric: str, state: TrainState) -> int:
    """Return the factor that makes more of the metric better."""
    return 1 if state.higher_is_better.get(metric, True) else -1


def _positive(name: str, value: int) -> int:
    value = plain(value)
    if not is_whole(value, 1):
        raise ParameterError(f"{name}({shown(value)}): give a whole number of at least 1.")
    return value


def _duration(name: str, value: float) -> float:
    seconds = _number(f"{name}({shown(value)})", value)
    if seconds <= 0:
        raise ParameterError(f"{name}({shown(value)}): give more than 0 seconds.")
    return seconds


def _number(call: str, value: float) -> float:
    value = plain(value)
    if not is_number(value):
        raise ParameterError(f"{call}: {shown(value)} is not a finite number.")
    return float(value)


def _name(call: str, metric: str) -> str:
    if not isinstance(metric, str) or not metric:
        raise ParameterError(f'{call}: name a metric of the validation, such as "accuracy".')
    return metric

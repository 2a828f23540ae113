"""The domains of a search space: the values that an argument takes from trial to trial."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from sparkdl.codec.describe import describe
from sparkdl.errors import ParameterError, kind_of, shown
from sparkdl.plain import is_number, plain, plain_list

Shown: TypeAlias = bool | int | float | str | None
"""A value of an argument as the table has it: the value itself, or its description."""


class Domain(Protocol):
    """The values of one argument."""

    @property
    def size(self) -> float:
        """The number of values, or infinity."""

    def draw(self, generator: random.Random) -> Shown:
        """Return a random value, as it is shown."""

    def suggest(self, trial: Any, name: str) -> Shown:
        """Return the value that an Optuna trial suggests, as it is shown."""

    def value(self, shown: Any) -> Any:
        """Return the value to pass for one that is shown."""


@dataclass(frozen=True)
class _Between:
    """Numbers from ``low`` to ``high``; with ``log``, uniform in their logarithm."""

    low: Any
    high: Any
    log: bool = False

    def value(self, shown: Any) -> Any:
        return shown

    def _draw(self, generator: random.Random, above: float) -> float:
        """Return a number below ``above``, by its logarithm."""
        return math.exp(generator.uniform(math.log(self.low), math.log(above)))


@dataclass(frozen=True)
class Uniform(_Between):
    """Floating-point numbers from ``low`` to ``high``; with ``log``, uniform in their logarithm."""

    @property
    def size(self) -> float:
        return math.inf

    def draw(self, generator: random.Random) -> Shown:
        if self.log:
            found = self._draw(generator, self.high)
        else:
            found = generator.uniform(self.low, self.high)
        return min(max(found, self.low), self.high)  # rounding may leave the range

    def suggest(self, trial: Any, name: str) -> Shown:
        return float(trial.suggest_float(name, self.low, self.high, log=self.log))


@dataclass(frozen=True)
class Integers(_Between):
    """Whole numbers from ``low`` to ``high``, both included; with ``log``, uniform in the logarithm."""

    @property
    def size(self) -> float:
        return self.high - self.low + 1

    def draw(self, generator: random.Random) -> Shown:
        if not self.log:
            return generator.randint(self.low, self.high)
        drawn = self._draw(generator, self.high + 1)
        return min(max(int(drawn), self.low), self.high)

    def suggest(self, trial: Any, name: str) -> Shown:
        return int(trial.suggest_int(name, self.low, self.high, log=self.log))


@dataclass(frozen=True)
class Choice:
    """One of some values of any kind."""

    options: tuple[Any, ...]
    labels: tuple[Shown, ...]  # each as shown: itself if it is plain, else described

    @staticmethod
    def of(options: Sequence[Any]) -> Choice:
        """Make a choice among ``options``; those that would be shown alike get a number."""
        values = tuple(map(plain, options))
        labels: list[Shown] = []
        for number, option in enumerate(values):
            simple = option is None or isinstance(option, (bool, int, float, str))
            label = option if simple and option == option else describe(option)  # nan is not nan
            twice = any(_same(one, label) for one in labels)
            labels.append(f"{label} ({number})" if twice else label)
        return Choice(values, tuple(labels))

    @property
    def size(self) -> float:
        return len(self.options)

    def draw(self, generator: random.Random) -> Shown:
        return generator.choice(self.labels)

    def suggest(self, trial: Any, name: str) -> Shown:
        found: Shown = trial.suggest_categorical(name, self.labels)
        return found

    def value(self, shown: Any) -> Any:
        return next(
            option
            for option, label in zip(self.options, self.labels, strict=True)
            if _same(label, shown)
        )


def _same(one: Shown, other: Shown) -> bool:
    """Return whether two values are shown alike; True and 1 are not."""
    return type(one) is type(other) and one == other


def uniform(low: float, high: float) -> Uniform:
    """Return the domain of floating-point numbers from ``low`` to ``high``.

    Raises:
        ParameterError: The bounds are no finite numbers, or ``low`` is not below ``high``.
    """
    return Uniform(*_bounds("uniform", low, high))


def loguniform(low: float, high: float) -> Uniform:
    """Return the domain of floating-point numbers from ``low`` to ``high``, uniform in their
    logarithm.

    It suits learning rates and other numbers whose order of magnitude is sought:
    ``loguniform(1e-4, 1e-1)``.

    Raises:
        ParameterError: The bounds are no finite numbers above 0, or ``low`` is not below ``high``.
    """
    return Uniform(*_bounds("loguniform", low, high, positive=True), log=True)


def integers(low: int, high: int, log: bool = False) -> Integers:
    """Return the domain of whole numbers from ``low`` to ``high``, both included.

    Args:
        low: The smallest number.
        high: The largest number.
        log: Whether the numbers are uniform in their logarithm.

    Raises:
        ParameterError: The bounds are no whole numbers, ``low`` is not below ``high``, or ``low``
            is below 1 with ``log``.
    """
    low, high = plain(low), plain(high)
    if not all(isinstance(bound, int) for bound in (low, high)):
        raise ParameterError(f"tune.integers({shown(low)}, {shown(high)}): give whole numbers.")
    _bounds("integers", low, high, positive=log)
    return Integers(low, high, log)


def choice(options: Sequence[Any]) -> Choice:
    """Return the domain of some values of any kind; a plain list in a space means the same.

    Raises:
        ParameterError: ``options`` is no list, or it is empty.
    """
    return _choice(options, f"tune.choice({shown(options)}): give a list of at least one value.")


def _choice(options: Any, problem: str) -> Choice:
    """Return the domain of values that are a list and not empty; else raise the problem."""
    values = plain_list(options)
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ParameterError(problem)
    return Choice.of(values)


def _bounds(name: str, low: Any, high: Any, positive: bool = False) -> tuple[float, float]:
    low, high = plain(low), plain(high)
    if not (is_number(low) and is_number(high)) or not low < high or (positive and low <= 0):
        above = " above 0" if positive else ""
        raise ParameterError(
            f"tune.{name}({shown(low)}, {shown(high)}): give two numbers{above}, the smaller one first."
        )
    return float(low), float(high)


def domains_of(space: Mapping[str, Any]) -> dict[str, Domain]:
    """Return the domain of each argument of a space."""
    remedy = "tune.uniform(low, high), tune.loguniform(low, high) or tune.integers(low, high)."
    return {
        name: values
        if isinstance(values, (Uniform, Integers, Choice))
        else _choice(
            values, f'space["{name}"] is {kind_of(values)}: give a list of values, or {remedy}'
        )
        for name, values in space.items()
    }

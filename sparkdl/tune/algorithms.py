"""The algorithms that choose the values of each trial: all combinations, or random ones."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Mapping
from typing import Any

from sparkdl.errors import ParameterError
from sparkdl.loop.callbacks import Callback
from sparkdl.tune.folder import TrialRecord
from sparkdl.tune.space import Choice, Domain

logger = logging.getLogger("sparkdl")
TRIALS = 16
"""The number of trials if none is given, unless the values have fewer combinations."""


class Algorithm:
    """A choice of values for trial after trial.

    What it chooses is a function of the seed, the number of the trial, and the records that it was
    told before.
    """

    trials: int
    """The number of trials."""
    learns: bool = False
    """True if it must be told the earlier records, in their order, before it is asked."""

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the values of a trial, as they are shown.

        Args:
            number: The number of the trial; the calls have the numbers 0, 1, 2, ...
            known: The values, if the trial has been made already.
        """
        raise NotImplementedError

    def pruning(self) -> Callback | None:
        """Return the callback that stops the trial asked for last if it is not worth going on; by
        default None."""
        return None

    def tell(self, record: TrialRecord) -> None:
        """Take the record of a trial into account; by default nothing is done."""


def combinations(space: Mapping[str, Domain]) -> float:
    """Return the number of combinations of the values of a space, or infinity."""
    return math.prod(domain.size for domain in space.values())


def trials_that_differ(space: Mapping[str, Domain], trials: int | None, default: int) -> int:
    """Return the number of trials, at most that of combinations, since each is tried once."""
    size = combinations(space)
    if trials is not None and trials > size:
        logger.warning(
            "trials=%d: the values of the space have only %d combinations, and each is tried once.",
            trials,
            size,
        )
    return int(min(default if trials is None else trials, size))


class Grid(Algorithm):
    """All combinations of the values of a space, the last argument varying fastest."""

    def __init__(self, space: Mapping[str, Domain], trials: int | None) -> None:
        endless = [name for name, domain in space.items() if not isinstance(domain, Choice)]
        if endless:
            raise ParameterError(
                f'algorithm="grid" tries all combinations of values, and space["{endless[0]}"] is a '
                'range: give a list of values, or take algorithm="random".'
            )
        self._space = {n: d.labels for n, d in space.items() if isinstance(d, Choice)}
        self.trials = trials_that_differ(space, trials, int(combinations(space)))
        self._combinations = itertools.product(*self._space.values())

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return dict(zip(self._space, next(self._combinations), strict=True))


class Random(Algorithm):
    """Random values, the same ones only once. More trials begin with those of fewer."""

    def __init__(self, space: Mapping[str, Domain], trials: int | None, seed: int) -> None:
        self._space, self._seed = space, seed
        self.trials = trials_that_differ(space, trials, TRIALS)
        self._endless = math.isinf(combinations(space))
        self._asked: set[str] = set()

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        generators = {name: random.Random(f"{self._seed}/{number}/{name}") for name in self._space}
        while True:
            drawn = {name: d.draw(generators[name]) for name, d in self._space.items()}
            if self._endless or repr(drawn) not in self._asked:
                self._asked.add(repr(drawn))
                return drawn

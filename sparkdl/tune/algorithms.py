"""The algorithms that choose the values of each trial: all combinations, or random ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any, Protocol

from sparkdl.errors import ParameterError
from sparkdl.loop.callbacks import Callback
from sparkdl.tune.record import TrialRecord
from sparkdl.tune.space import Choice, Domain

TRIALS = 16
"""The number of trials if none is given and the algorithm has no end of its own."""


class Algorithm(Protocol):
    """A choice of values for trial after trial.

    What it chooses is a function of the seed, the number of the trial, and the records that it was
    told before.
    """

    trials: int
    """The number of trials."""
    learns: bool
    """True if it must be told the earlier records, in their order, before it is asked."""

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the values of a trial, as they are shown.

        Args:
            number: The number of the trial; the calls have the numbers 0, 1, 2, ...
            known: The values, if the trial has been made already.
        """

    def pruning(self) -> Callback | None:
        """Return the callback that stops the trial asked for last if it is not worth going on."""

    def tell(self, record: TrialRecord) -> None:
        """Take the record of a trial into account."""


class Grid:
    """All combinations of the values of a space, the last argument varying fastest."""

    learns = False

    def __init__(self, space: Mapping[str, Domain], trials: int | None) -> None:
        """Create a grid.

        Args:
            space: The domains, which must be choices.
            trials: The number of trials, or None for all combinations.

        Raises:
            ParameterError: A domain has no list of values.
        """
        endless = [name for name, domain in space.items() if not isinstance(domain, Choice)]
        if endless:
            raise ParameterError(
                f'algorithm="grid" tries all combinations of values, and space["{endless[0]}"] is a '
                'range: give a list of values, or take algorithm="random".'
            )
        self._space = {n: d.labels for n, d in space.items() if isinstance(d, Choice)}
        size = math.prod(map(len, self._space.values()))
        self.trials = size if trials is None else min(trials, size)
        self._combinations = itertools.product(*self._space.values())

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return dict(zip(self._space, next(self._combinations), strict=True))

    def pruning(self) -> Callback | None:
        return None

    def tell(self, record: TrialRecord) -> None:
        """Do nothing: a grid does not learn."""


class Random:
    """Independent random values. More trials begin with those of fewer."""

    learns = False

    def __init__(self, space: Mapping[str, Domain], trials: int | None, seed: int) -> None:
        self._space, self._seed = space, seed
        self.trials = TRIALS if trials is None else trials

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return {
            name: domain.draw(random.Random(f"{self._seed}/{number}/{name}"))
            for name, domain in self._space.items()
        }

    def pruning(self) -> Callback | None:
        return None

    def tell(self, record: TrialRecord) -> None:
        """Do nothing: random values do not depend on earlier ones."""

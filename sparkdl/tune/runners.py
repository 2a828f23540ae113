"""The interface of the two ways to make trials: side by side, and one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from py4j.protocol import Py4JError
from pyspark import SparkContext

from sparkdl.errors import TrainingError
from sparkdl.loop.callbacks import Callback
from sparkdl.tune.record import TrialOutcome, TrialRecord


class SearchInterrupted(Exception):
    """The user has interrupted a trial, which has ended early and does not count."""


class Proposed(NamedTuple):
    """A trial to start."""

    number: int
    arguments: Mapping[str, Any]  # as they are shown
    pruning: Callback | None
    best: TrialRecord | None  # so far


class RunningTrial(Protocol):
    """A trial that was started."""

    @property
    def done(self) -> bool:
        """Return whether it has ended."""

    def outcome(self) -> TrialOutcome:
        """Wait for the end, and return the outcome."""


class Runner(Protocol):
    """A way to make trials."""

    slots: int
    """The number of trials that run at once."""

    def start(self, trial: Proposed) -> RunningTrial:
        """Start a trial."""


@dataclass(frozen=True)
class Ended:
    """A trial that has ended."""

    found: TrialOutcome
    done: bool = True

    def outcome(self) -> TrialOutcome:
        """Return the outcome."""
        return self.found


def check_alive(context: SparkContext) -> None:
    """Raise TrainingError if Spark has ended, so that a trial is not to blame."""
    with contextlib.suppress(Py4JError, OSError):
        if context._jsc is not None and not context._jsc.sc().isStopped():
            return
    raise TrainingError("Spark has ended; with path= the search goes on when it is called again.")

"""News of a fit over Spark Connect: rank 0 tells them while it runs, and the client shows them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.connect.control import ControlClient
from sparkdl.gang.connect import tell_line
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.progress import Progress, log_line, shows_bar
from sparkdl.loop.state import TrainState
from sparkdl.settings import Settings
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")
HIDDEN = "false"
"""The value of ``spark.sparkdl.progress`` with which nothing is shown."""


@dataclass(frozen=True)
class Question:
    """A question to rank 0."""

    known: int  # lines of its log that the client has
    end: bool  # after the current iteration


@dataclass(frozen=True)
class News:
    """The answer of rank 0."""

    facts: str  # "" before training
    state: TrainState | None  # without histograms; None before training
    log: Sequence[tuple[int, str]]  # level and text of further lines
    doing: str = ""  # before training


class ReportedProgress(Progress):
    """The progress of a run in rank 0, which answers the client's questions."""

    patience: float | None = None  # seconds without a question, once there was one; None: no bound

    def __init__(self, log: Sequence[tuple[int, str]]) -> None:
        """Take the lines that rank 0 logs, a list that grows."""
        self.interrupt = Interrupt()
        self._log, self._facts, self._doing = log, "", ""
        self._state: TrainState | None = None
        self._heard: float | None = None

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        self._doing = what

    def describe(self, facts: str) -> None:
        self._facts = facts

    def answer(self, question: Question) -> News:
        """Answer a question; called in another thread."""
        self._heard = time.monotonic()
        if question.end:
            self.interrupt.asked = True
        state, log = self._state, list(self._log[question.known :])
        known = None if state is None else replace(state, histograms=None)
        return News(self._facts, known, log, self._doing)

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        self._state = state

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        self._state = state
        if self.patience is None or self._heard is None or self.interrupt.asked:
            return
        silent = time.monotonic() - self._heard
        if silent > self.patience:
            logger.warning(
                "Nothing was heard from the client for %.0f s: the fit ends after iteration %d, as "
                'spark.sparkdl.client.seconds says. resume="latest" continues it.',
                silent,
                state.iteration,
            )
            self.interrupt.asked = True

    def on_validation_end(self, trainer: Any, state: TrainState) -> None:
        self._state = state

    def on_checkpoint(self, trainer: Any, state: TrainState) -> None:
        self._state = state


class FollowedFit:
    """A follower of a fit on the client: it shows the progress, and passes an interrupt on."""

    def __init__(
        self,
        control: ControlClient,
        trainer: TrainerSpec,
        ranks: int,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self._control = control
        self._trainer, self._ranks = trainer, ranks
        self._mode, self._awaited = settings.progress, settings.client_seconds is not None
        self._interrupt, self._follows, self._doing = Interrupt(), False, ""
        self._progress = progress
        self.known, self.training = 0, False  # lines of the log; whether rank 0 trains

    def trains(self) -> bool:
        """Return whether rank 0 trains, as far as is known."""
        return self.training

    def pass_on(self, interrupt: Interrupt) -> None:
        """Ask rank 0 to end the training once the user has asked for that."""
        self._interrupt = interrupt

    def ask(self) -> bool | None:
        """See :class:`sparkdl.gang.connect.Follower`, also for the next method."""
        wanted = self._mode != HIDDEN or not self.training or self._interrupt.asked
        if not wanted and not self._awaited:
            return None
        news: News | None = self._control.ask(Question(self.known, self._interrupt.asked))
        if news is None:
            return False
        self.training = news.state is not None
        for level, text in news.log:
            tell_line(level, text)
        self.known += len(news.log)
        if news.state is not None:
            self._progress.describe(news.facts)
            self._progress.follow(self._trainer, news.state)
            self._follows = True
        elif news.doing not in ("", self._doing):
            self._doing = news.doing
            self._progress.doing(news.doing)
        return True

    def waiting(self, seconds: float, begun: bool) -> None:
        if self._mode != HIDDEN:
            what = "training with {} ranks" if begun else "waiting for {} task slots"
            log_line(f"{what.format(self._ranks)}, for {seconds:.0f} s so far")

    def ended(self, state: TrainState) -> None:
        """Show the end of the run."""
        if self._follows or shows_bar(self._mode):
            self._progress.follow(self._trainer, state)
            self._progress.on_fit_end(self._trainer, state)

    def close(self) -> None:
        """End the questions."""
        self._control.close()

"""Files of a run: its report, and its history as CSV or JSON."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparkdl.codec.charts import check_bokeh
from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError
from sparkdl.loop.history import History
from sparkdl.loop.report import run_page
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Trigger, every_epoch
from sparkdl.summaries.base import Recorder, check_replaceable, replacing

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

SHARE = 0.05
"""The largest share of the time that pages may take while training goes on."""


class _FileOfRun(Recorder):
    """A recorder that writes what it has recorded to a file of one of these ``suffixes``."""

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: str | Path, every: Trigger | None = None) -> None:
        super().__init__(every_epoch() if every is None else every)
        self._path = path_here(path).absolute()  # the callback may run elsewhere
        if self._path.suffix.lower() not in self.suffixes:
            known = " or ".join(self.suffixes)
            raise ParameterError(f'{type(self).__name__}("{path}"): end the name in {known}.')

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        check_replaceable(type(self).__name__, self._path)


class Report(_FileOfRun):
    """A callback that writes the page of :meth:`sparkdl.History.report` while training goes on.

    The file is replaced as a whole. The page of a resumed run includes the time before. Recoveries,
    checkpoints and the environment are in it when the fit has ended. It needs the extra ``report``.

    Args:
        path: The file, with the suffix .html.
        every: The trigger that writes; None is every epoch. Pages take at most a twentieth of the
            time: one that is due too early is left out.

    Raises:
        ParameterError: The extra is not installed, or the suffix is another one; or, when the fit
            starts, the file cannot be written.
    """

    suffixes = (".html",)

    def __init__(self, path: str | Path, every: Trigger | None = None) -> None:
        check_bokeh()
        super().__init__(path, every)
        self._next = -math.inf

    def on_fit_end(self, trainer: Trainer, state: TrainState) -> None:
        self._next = -math.inf
        super().on_fit_end(trainer, state)

    def on_result(self, trainer: Trainer, trained: Any) -> None:
        self._write(trained.history)

    def write(self, trainer: Trainer, state: TrainState) -> None:
        began = time.monotonic()
        if began >= self._next:
            self._write(self.history)
            now = time.monotonic()
            self._next = now + (now - began) / SHARE

    def _write(self, history: History) -> None:
        with replacing(self._path) as part:
            run_page(history, self._path.stem, self._path.parent).save(part)


class HistoryFile(_FileOfRun):
    """A callback that writes the history to a file at each ``every`` and with each checkpoint.

    It writes :meth:`sparkdl.History.save`, and replaces the file as a whole, so it can be opened at
    any time. The history of a resumed run includes the time before: from the checkpoint, or without
    one from the file that is there.

    Args:
        path: The file, with the suffix .csv or .json.
        every: The trigger that writes; None is every epoch.

    Raises:
        ParameterError: The suffix is another one; or, when the fit starts, the file cannot be
            written.
    """

    suffixes = (".csv", ".json")

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        if state.iteration > 0 and not len(self.history) and self._path.is_file():
            self.history = History.load(self._path)
            self.history.truncate(state.iteration)
            self.history.follow(state)

    def on_checkpoint(self, trainer: Trainer, state: TrainState) -> None:
        """Write the file, so that a run that resumes from this checkpoint finds the whole history."""
        self.write(trainer, state)

    def write(self, trainer: Trainer, state: TrainState) -> None:
        with replacing(self._path) as part:
            self.history.save(part)

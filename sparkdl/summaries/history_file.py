"""The history as a file that grows while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Trigger, every_epoch
from sparkdl.summaries.base import Recorder, check_replaceable, replacing

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


class HistoryFile(Recorder):
    """Writes :meth:`sparkdl.History.save` to ``path``, ``.csv`` or ``.json``, at each ``every``, and
    with each checkpoint.

    The file is replaced as a whole, so it can be opened at any time. Of a resumed run it has what was
    before, too: from the checkpoint, or without one from the file that is there. Raises
    :class:`sparkdl.ParameterError` for another suffix, and as the fit starts for a path that cannot be
    written.
    """

    def __init__(self, path: str | Path, every: Trigger | None = None) -> None:
        super().__init__(every_epoch() if every is None else every)
        self._path = path_here(path)
        if self._path.suffix.lower() not in (".csv", ".json"):
            raise ParameterError(f'HistoryFile("{path}"): end the name in .csv or .json.')

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        check_replaceable("HistoryFile", self._path)
        if state.iteration > 0 and not len(self.history) and self._path.is_file():
            self.history = History.load(self._path)
            self.history.truncate(state.iteration)
            self.history.follow(state)

    def on_checkpoint(self, trainer: Trainer, state: TrainState) -> None:
        """So that a run that goes on from there finds all that was before."""
        self.write(trainer, state)

    def write(self, trainer: Trainer, state: TrainState) -> None:
        with replacing(self._path) as part:
            self.history.save(part)

"""Rescue of a trained model when the run fails after its last iteration, by writing a checkpoint.

The failure may be in a callback's last hook, or in bringing the model to the driver.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdl.checkpoint.config import Checkpoint
from sparkdl.checkpoint.manifest import RunIdentity
from sparkdl.checkpoint.save import Checkpointer
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.errors import CheckpointError, SparkdlError, StalledError, counted
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.engine import Engine
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

logger = logging.getLogger("sparkdl")


class Rescue(Callback):
    """A context manager around the loop and what follows it.

    It is also the first of the loop's callbacks, which tells it where the run stands.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        identity: RunIdentity,
        manifest_model: Mapping[str, Any],
        history: History,
        one_pass: bool = False,
    ) -> None:
        self._manifest_model, self._one_pass = manifest_model, one_pass
        self._trainer, self._engine = trainer, engine
        self._identity, self._history = identity, history
        self._before: TrainState | None = None
        self._state: TrainState | None = None

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        self._state = state

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self._before, self._state = self._state, state

    def on_validation_end(self, trainer: Trainer, state: TrainState) -> None:
        self._state = state

    def on_checkpoint(self, trainer: Trainer, state: TrainState) -> None:
        self._state = state

    def __enter__(self) -> Rescue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep the model if ``error`` came after the last iteration, and add the place to the error."""
        before, state = self._before, self._state
        if not isinstance(error, Exception) or before is None or state is None:
            return
        try:
            if self._history.stopped is None and not self._trainer.stop(before, state):
                return
            if isinstance(error, StalledError):  # a checkpoint would stall as long
                raise CheckpointError("Spark does nothing")
            again = "fit(data, resume=path) returns it without training again"
            if self._one_pass:
                again = "partial_fit(data, resume=path) of a new trainer continues it"
            note = (
                f"Training had finished, after {counted(state.iteration, 'iteration')}. The model is "
                f"kept in the checkpoint {self._kept(state)}: sparkdl.load(path) loads it, and {again}."
            )
        except Exception as failure:
            reason = str(failure).partition("\n")[0].rstrip(".") or type(failure).__name__
            note = f"The trained model could not be kept in a checkpoint ({reason})."
            if state.checkpoint is not None:
                note += (
                    f' The last one is {state.checkpoint}: continue with fit(data, resume="...").'
                )
        logger.error("%s", note)
        if isinstance(error, SparkdlError) and error.args:
            error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
        else:
            error.add_note(note)

    def _kept(self, state: TrainState) -> str:
        """Return the path of a checkpoint with this state.

        That is the run's last one, or a new one in the run's folder or in a temporary folder of this
        machine.
        """
        if state.checkpoint is not None:
            (_, manifest), *_ = CheckpointStore.open(state.checkpoint).candidates()
            if manifest.iteration == state.iteration:
                return state.checkpoint
        own = self._trainer.checkpoint
        if own is not None:
            with contextlib.suppress(CheckpointError):  # its disk is full, for example
                return self._written(own, state)
        folder = tempfile.mkdtemp(prefix="kept-by-sparkdl-")
        try:
            try:
                return self._written(Checkpoint(folder), state)
            except CheckpointError:  # the executors do not share this folder
                return self._written(Checkpoint(folder), state, here=True)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _written(self, where: Checkpoint, state: TrainState, here: bool = False) -> str:
        writer = Checkpointer(
            where,
            self._engine,
            self._identity,
            self._history,
            model=self._manifest_model,
            begun=state,
        )
        return writer.written(state, here)

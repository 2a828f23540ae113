"""The result of a fit: the trained model, or where it is kept if it cannot be brought to the user."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from sparkdl.checkpoint.config import Checkpoint
from sparkdl.checkpoint.manifest import ModelIdentity, RunIdentity
from sparkdl.checkpoint.save import Checkpointer
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.data.samples import SampleSet
from sparkdl.errors import CheckpointError, SparkdlError, StalledError, counted
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import Output
from sparkdl.infer.saved import StoredState
from sparkdl.loop.callbacks import Callback, tell_result
from sparkdl.loop.engine import AVERAGE, BEST, CURRENT, Engine
from sparkdl.loop.history import History
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.model.flat import filled
from sparkdl.model.recipe import weights_digest
from sparkdl.train.placed_samples import as_read
from sparkdl.train.prepare import PreparedModel, build_model
from sparkdl.train.request import CarriedRun
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class FitEnd:
    """The end of a fit, without its weights."""

    samples: SampleSet
    output: Output | None
    kinds: Sequence[str]  # of weights
    history: History
    state: TrainState = field(default_factory=TrainState)
    packed: tuple[bytes, ...] | None = None  # the optimizer state, if it was wanted and collected
    packed_best: tuple[bytes, ...] | None = None  # None, as below: no pass goes on from here
    schedule: Schedule | None = None

    def carried(
        self, trainer: TrainerSpec, model: PreparedModel, weights: Callable[[str], torch.Tensor]
    ) -> CarriedRun:
        """Return the end of the run with its model.

        ``weights`` returns a vector by its kind; one is held at a time.
        """
        make = result_maker(trainer, model, self.samples, self.output)
        models = {
            kind: make(
                module=filled(build_model(model.payload), weights(kind)), history=self.history
            )
            for kind in self.kinds
        }
        trained = models[CURRENT]
        trained.ema, trained.best = models.get(AVERAGE), models.get(BEST)
        if self.packed is not None:
            digest, identity = weights_digest(trained.module), ModelIdentity.of(model.layout)
            trained.optimizer_state = StoredState(self.packed, identity, model.optimizers, digest)
        return CarriedRun(trained, self.state, self.packed_best, self.schedule)


@dataclass(frozen=True)
class FinishedFit:
    """A fit that has trained, whose engine still has the weights."""

    trainer: TrainerSpec
    model: PreparedModel
    engine: Engine
    end: FitEnd
    callbacks: list[Callback]

    def carried(self, weights: Callable[[str], torch.Tensor] | None = None) -> CarriedRun:
        """Return the end of the run with its model, once the callbacks know of that; the ``weights``
        are the engine's, or are given."""
        run = self.end.carried(self.trainer, self.model, weights or self.engine.weights)
        tell_result(self.callbacks, self.trainer, run.trained)
        return run


def result_maker(
    trainer: TrainerSpec, model: PreparedModel, samples: SampleSet, output: Output | None
) -> Callable[..., TrainedModel]:
    """Return a function that makes the result from a ``module`` and a ``history``."""
    trainer = as_read(trainer, samples)
    return functools.partial(
        TrainedModel,
        model=trainer.model,
        loss=trainer.objective,
        features=trainer.feature_columns,
        label=trainer.label_columns,
        columns=trainer.columns,
        fields=samples.fields[: samples.num_features + samples.num_labels],
        num_features=samples.num_features,
        float_dtype=model.float_dtype,
        output=output,
        seed=trainer.seed,
        signature=trainer.signature,
    )


@dataclass
class Rescue(Callback):
    """A context manager around the loop and what follows it.

    It is also the first of the loop's callbacks, which tells it where the run stands.
    """

    trainer: TrainerSpec
    engine: Engine
    identity: RunIdentity
    manifest_model: Mapping[str, Any]
    history: History
    one_pass: bool
    _before: TrainState | None = None
    _state: TrainState | None = None

    def checkpointer(
        self, where: Checkpoint, begun: TrainState, noting: Any = None, background: Any = None
    ) -> Checkpointer:
        """Return the writer of the run's checkpoints."""
        return Checkpointer(
            *(where, self.engine, self.identity, self.history, noting, background),
            model=self.manifest_model,
            begun=begun,
            endless=self.one_pass,
        )

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        self._state = state

    on_validation_end = on_checkpoint = on_fit_start

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        self._before, self._state = self._state, state

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
            if self.history.stopped is None and not self.trainer.stop(before, state):
                return
            if isinstance(error, StalledError):  # a checkpoint would stall as long
                raise CheckpointError("Spark does nothing")
            again = "fit(data, resume=path) returns it without training again"
            if self.one_pass:
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
        own = self.trainer.checkpoint
        if own is not None:
            with contextlib.suppress(CheckpointError):  # its disk is full, for example
                return self.checkpointer(own, state).written(state)
        folder = tempfile.mkdtemp(prefix="kept-by-sparkdl-")
        try:
            try:
                return self.checkpointer(Checkpoint(folder), state).written(state)
            except CheckpointError:  # the executors do not share this folder
                return self.checkpointer(Checkpoint(folder), state).written(state, True)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

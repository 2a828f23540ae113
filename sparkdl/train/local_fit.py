"""A fit by the local engine on samples in place, in a process that need not have a Spark session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.engines.local.groups import local_engine as build_local
from sparkdl.errors import ModelError
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import Output
from sparkdl.loop.advance import catch_up, first_state
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.config import LoopConfig
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import Interrupt
from sparkdl.loop.loop import PeriodicTask, train
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.loop.validation import Validator
from sparkdl.replica.run import RunSpec
from sparkdl.slab.root import SlabConfig
from sparkdl.train.carried import begin_batch
from sparkdl.train.engine_inputs import run_spec, settings_of
from sparkdl.train.fit_result import result_maker, trained_model, wanted_weights
from sparkdl.train.place_samples import validation_set
from sparkdl.train.preflight import preflight, with_dimensions
from sparkdl.train.prepare import PreparedModel, prepare

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


@dataclass(frozen=True)
class LocalResult:
    """The end of a local fit."""

    weights: Mapping[str, torch.Tensor]  # flat vectors by kind
    history: History


@dataclass(frozen=True)
class LocalFit:
    """Fits by the local engine on samples that this process can map, for any trainer that reads the
    data alike.

    A fit has the bits of ``trainer.fit`` with ``engine="local"`` on the same samples.
    """

    training: SampleSet
    validation: SampleSet | None
    float_dtype: str

    def run(
        self, trainer: Trainer, callbacks: Sequence[Callback], slab: SlabConfig, threads: int
    ) -> LocalResult:
        """Train with ``callbacks`` in place of the trainer's; its validation data is not looked at.

        Nothing is written to ``slab``, which only names the run.
        """
        model, validation, _ = self._tried(trainer)
        run, history = run_spec(trainer, model, self.training, slab, threads), History()
        history.note_settings(settings_of(trainer, len(self.training.counts)))
        engine = local_engine(trainer, model, self.training, run, validation)
        tasks: list[PeriodicTask] = []
        if validation is not None and trainer.validation is not None:
            tasks.append(Validator(engine, trainer.validation, validation.scorer, history))
        state = train_here(trainer, engine, model.schedule, tasks, callbacks, history)
        weights = {which: engine.weights(which) for which in wanted_weights(trainer, state)}
        return LocalResult(weights, history)

    def trained(
        self,
        trainer: Trainer,
        kinds: Sequence[str],
        weights: Callable[[str], torch.Tensor],
        history: History,
    ) -> TrainedModel:
        """Return the trained model of a fit that :meth:`run` made in another process."""
        model, _, output = self._tried(trainer)
        result = result_maker(trainer, model, self.training, output)
        return trained_model(result, model.payload, kinds, weights, history)

    def _tried(self, trainer: Trainer) -> tuple[PreparedModel, ValidationSet | None, Output | None]:
        """Return the prepared model, the validation samples and the model's output, after trials on
        a few rows."""
        model = prepare(trainer, None, check_data=lambda data: None)  # it is in place
        if model.float_dtype != self.float_dtype:
            raise ModelError(
                f"the model is of {model.float_dtype}, and the samples were placed for one of "
                f"{self.float_dtype}: let all models have one floating dtype."
            )
        validation = validation_set(trainer, self.validation, model.float_dtype)
        output, sums = preflight(trainer, model, self.training, validation, endless=False)
        return replace(model, sums=sums), with_dimensions(validation, output), output


def local_engine(
    trainer: Trainer,
    model: PreparedModel,
    samples: SampleSet,
    run: RunSpec,
    validation: ValidationSet | None = None,
) -> LocalEngine:
    """Return an engine of this process that holds the first state."""
    batch = trainer.batch_size * trainer.options.local_steps
    engine = build_local(samples, run, model.payload, batch, validation, trainer.consistency_model)
    engine.load()
    return engine


def train_here(
    trainer: Trainer,
    engine: LocalEngine,
    schedule: Schedule,
    tasks: Sequence[PeriodicTask],
    callbacks: Sequence[Callback],
    history: History,
) -> TrainState:
    """Run the loop from the first iteration to the trainer's ``stop``; return the last state.

    ``schedule`` must be fresh; ``callbacks`` take the place of the trainer's; ``history`` grows.
    """
    state = begin_batch(first_state(trainer.options), engine.plan.num_iterations)
    state = catch_up(schedule, state, history)
    config = LoopConfig.of(trainer)
    return train(trainer, config, engine, schedule, tasks, callbacks, state, history, Interrupt())

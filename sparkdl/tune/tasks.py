"""The task of a trial: a fit by the local engine, in a task of Spark."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.data.samples import SampleSet
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.state import TrainState
from sparkdl.process.determinism import Numerics
from sparkdl.process.system import label_output
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.worker import finish_task, task_cancelled
from sparkdl.train.local_fit import LocalFit
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import with_values
from sparkdl.tune.record import Objective, TrialOutcome, TrialRecord, failed
from sparkdl.tune.sample_files import SampleFiles
from sparkdl.tune.space import Domain


@dataclass(frozen=True)
class TrialSetup:
    """The common part of all trials on the same samples."""

    trainer: Trainer  # its validation has no data
    space: Mapping[str, Domain]
    objective: Objective
    training: SampleSet  # as the driver mapped them
    validation: SampleSet
    float_dtype: str
    threads: int
    numerics: Numerics


@dataclass(frozen=True)
class RunTrial:
    """A task that makes one trial and yields its pickled :class:`TrialOutcome`.

    An error of the training is an outcome too, because Spark would try a task again that fails. The
    files are no part of the setup, because Spark loads only the broadcasts that a task refers to.
    """

    setup: BroadcastBytes
    files: SampleFiles
    number: int
    arguments: Mapping[str, Any]
    pruning: Callback | None
    best: TrialRecord | None  # when the trial started; the weights of a worse one stay here
    logged: bool = False  # the history is wanted in any case

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for _ in frames:
            pass
        yield pickle.dumps(self._outcome())
        finish_task()

    def _outcome(self) -> TrialOutcome:
        label_output(f"trial {self.number}")
        try:
            setup: TrialSetup = pickle.loads(self.setup.value)
            return self._trained(setup)
        except Exception as error:
            return TrialOutcome(failed(self.number, self.arguments, error))

    def _trained(self, setup: TrialSetup) -> TrialOutcome:
        trainer = trainer_of(setup.trainer, setup.space, self.arguments)
        setup.numerics.use()
        callbacks = [EndWithTask(), *trainer.callbacks]
        if self.pruning is not None:
            callbacks.append(self.pruning)
        fit = LocalFit(
            self.files.here(setup.training),
            self.files.here(setup.validation),
            setup.float_dtype,
        )
        done = fit.run(trainer, callbacks, self.files.slab, setup.threads)
        record = setup.objective.record(self.number, self.arguments, done.history)
        if not setup.objective.is_better(record, self.best):
            return TrialOutcome(record, history=done.history if self.logged else None)
        return TrialOutcome(record, done.weights, done.history)


def trainer_of(
    trainer: Trainer, space: Mapping[str, Domain], arguments: Mapping[str, Any]
) -> Trainer:
    """Return the trainer of a trial."""
    return with_values(trainer, {n: space[n].value(shown) for n, shown in arguments.items()})


class EndWithTask(Callback):
    """A callback that ends the training of a task that Spark has cancelled."""

    def on_iteration_start(self, trainer: Any, state: TrainState) -> None:
        if task_cancelled():
            raise InterruptedError("Spark cancelled the task")

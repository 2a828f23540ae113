"""The two ways to make trials: side by side as tasks, or one distributed fit after another."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from sparkdl.checkpoint.files import Folder
from sparkdl.errors import ModelError, ParameterError, TrainingError
from sparkdl.gang.slots import cpus_of
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.engine import AVERAGE, BEST, CURRENT
from sparkdl.loop.interrupt import INTERRUPTED
from sparkdl.model.flat import FlatModule
from sparkdl.model.pickling import dumps
from sparkdl.process.numerics import Numerics
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.executors import task_per_executor
from sparkdl.spark.failures import explain
from sparkdl.spark.frames import RunningJob, map_frames, stage_name
from sparkdl.train.placed_samples import PlacedSamples
from sparkdl.train.trainer import Trainer
from sparkdl.tune.placements import Placements
from sparkdl.tune.record import Objective, TrialOutcome, TrialRecord, failed
from sparkdl.tune.sample_files import SampleFiles
from sparkdl.tune.space import Domain
from sparkdl.tune.tasks import RunTrial, TrialSetup, trainer_of
from sparkdl.usercode import accompanied


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

    def start(
        self,
        number: int,
        arguments: Mapping[str, Any],
        pruning: Callback | None,
        best: TrialRecord | None,
    ) -> RunningTrial:
        """Start a trial.

        Args:
            number: The number of the trial.
            arguments: Its values, as they are shown.
            pruning: A callback that may stop it, or None.
            best: The best record so far, or None.
        """


@dataclass(frozen=True)
class Ended:
    """A trial that has ended."""

    found: TrialOutcome
    done: bool = True

    def outcome(self) -> TrialOutcome:
        """Return the outcome."""
        return self.found


class SideBySide:
    """Trials as tasks of Spark, several at once, each a fit by the local engine.

    Use it as a context manager; leaving it cancels trials that run.
    """

    def __init__(
        self,
        context: SparkContext,
        trainer: Trainer,
        space: Mapping[str, Domain],
        objective: Objective,
        placements: Placements,
        slots: int,
        name: str,
    ) -> None:
        """Create a runner.

        Args:
            context: The Spark context.
            trainer: The user's trainer, with the local engine.
            space: The domains by the names of arguments.
            objective: What the search looks for.
            placements: The samples.
            slots: The number of trials that run at once.
            name: The name of the job group.
        """
        self.slots = slots
        self._context, self._trainer, self._space = context, trainer, space
        self._objective, self._placements, self._name = objective, placements, name
        self._setups: dict[int, BroadcastBytes] = {}
        self._broadcasts: list[BroadcastBytes] = []

    def start(
        self,
        number: int,
        arguments: Mapping[str, Any],
        pruning: Callback | None,
        best: TrialRecord | None,
    ) -> RunningTrial:
        try:
            trainer = trainer_of(self._trainer, self._space, arguments)
            setup = self._setup(self._placements.of(trainer, arguments))
        except (ModelError, ParameterError) as error:
            return Ended(TrialOutcome(failed(number, arguments, error)))
        task = RunTrial(setup, number, arguments, pruning, best)
        shown = " · ".join(f"{name} {value}" for name, value in arguments.items())
        self._context.setJobGroup(self._name, f"sparkdl: trial {number} · {shown}")
        with stage_name(self._context, f"trial {number}"):
            places = task_per_executor(self._context, [None])
            job = RunningJob(map_frames(places, accompanied(task)), 1)
        return _TaskOfTrial(self._context, job, number, arguments)

    def _setup(self, placed: PlacedSamples) -> BroadcastBytes:
        """Return the broadcast of what trials on these samples have in common."""
        known = self._setups.get(id(placed))
        if known is not None:
            return known
        validation = self._trainer.validation
        assert validation is not None
        assert placed.validation is not None
        files = SampleFiles.of(self._context, placed.slab, [placed.training, placed.validation])
        if files.copies is not None:
            self._broadcasts.append(files.copies)
        nothing: Any = None  # a DataFrame does not travel, and the samples are in place
        setup = TrialSetup(
            trainer=replace(self._trainer, validation=replace(validation, data=nothing)),
            space=self._space,
            objective=self._objective,
            training=placed.training,
            validation=placed.validation,
            float_dtype=placed.float_dtype,
            files=files,
            threads=cpus_of(self._context, None),
            numerics=Numerics.here(),
        )
        made = BroadcastBytes.of(self._context, [dumps(accompanied(setup))])
        self._broadcasts.append(made)
        self._setups[id(placed)] = made
        return made

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(Py4JError, OSError):
            self._context.cancelJobGroup(self._name)
        for broadcast in self._broadcasts:
            broadcast.destroy()


@dataclass(frozen=True)
class _TaskOfTrial:
    context: SparkContext
    job: RunningJob
    number: int
    arguments: Mapping[str, Any]

    @property
    def done(self) -> bool:
        return self.job.done

    def outcome(self) -> TrialOutcome:
        try:
            (frame,) = self.job.frames()
        except (Py4JError, PySparkException) as error:
            check_alive(self.context)
            lost = TrainingError(f"the task of the trial failed: {explain(str(error))}")
            return TrialOutcome(failed(self.number, self.arguments, lost))
        found: TrialOutcome = pickle.loads(frame)
        return found


class OneByOne:
    """Trials one after another, each a fit by the trainer's engine on the whole cluster."""

    slots = 1

    def __init__(
        self,
        context: SparkContext,
        trainer: Trainer,
        space: Mapping[str, Domain],
        objective: Objective,
        placements: Placements,
        keep: bool,
    ) -> None:
        """Create a runner.

        Args:
            context: The Spark context.
            trainer: The user's trainer.
            space: The domains by the names of arguments.
            objective: What the search looks for.
            placements: The samples.
            keep: Whether outcomes have the weights, to be written to a folder.
        """
        self._context, self._trainer, self._space = context, trainer, space
        self._objective, self._placements, self._keep = objective, placements, keep

    def start(
        self,
        number: int,
        arguments: Mapping[str, Any],
        pruning: Callback | None,
        best: TrialRecord | None,
    ) -> RunningTrial:
        try:
            trainer = trainer_of(self._trainer, self._space, arguments)
            placed = self._placements.of(trainer, arguments)
            if pruning is not None:
                trainer = replace(trainer, callbacks=[*trainer.callbacks, pruning])
            trained = self._fit(trainer, placed, number)
        except (ModelError, ParameterError, TrainingError) as error:
            check_alive(self._context)
            return Ended(TrialOutcome(failed(number, arguments, error)))
        if trained.history.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        record = self._objective.record(number, arguments, trained.history)
        if not self._objective.is_better(record, best):
            return Ended(TrialOutcome(record))
        weights = weights_of(trained) if self._keep else {}
        return Ended(TrialOutcome(record, weights, trained.history, trained))

    def _fit(self, trainer: Trainer, placed: PlacedSamples, number: int) -> TrainedModel:
        checkpoint = trainer.checkpoint
        if checkpoint is None:
            return trainer.fit(placed)
        path = Folder.of(checkpoint.path).folder(f"trial-{number:06d}").uri
        own = replace(trainer, checkpoint=replace(checkpoint, path=path))
        return own.fit(placed, resume="latest")


def weights_of(trained: TrainedModel) -> dict[str, Any]:
    """Return the flat vector of each kind of weights of a result."""
    kinds = {CURRENT: trained, AVERAGE: trained.ema, BEST: trained.best}
    return {
        kind: FlatModule(copy.deepcopy(one.module)).flat
        for kind, one in kinds.items()
        if one is not None
    }


def check_alive(context: SparkContext) -> None:
    """Raise TrainingError if Spark has ended, so that a trial is not to blame."""
    with contextlib.suppress(Py4JError, OSError):
        if context._jsc is not None and not context._jsc.sc().isStopped():
            return
    raise TrainingError("Spark has ended; with path= the search goes on when it is called again.")

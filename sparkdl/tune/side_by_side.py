"""Trials side by side: several tasks of Spark at once, each a fit by the local engine."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from sparkdl.errors import ModelError, ParameterError, TrainingError, cannot_travel
from sparkdl.gang.slots import cpus_of
from sparkdl.model.preparation import dumps
from sparkdl.process.determinism import Numerics
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.executors import task_per_executor
from sparkdl.spark.failures import explain
from sparkdl.spark.frames import RunningJob, map_frames, stage_name
from sparkdl.train.placed_samples import PlacedSamples
from sparkdl.train.trainer import Trainer
from sparkdl.tune.placements import Placements
from sparkdl.tune.record import Objective, TrialOutcome, failed
from sparkdl.tune.runners import Ended, Proposed, RunningTrial, check_alive
from sparkdl.tune.sample_files import SampleFiles
from sparkdl.tune.space import Domain
from sparkdl.tune.tasks import RunTrial, TrialSetup, trainer_of
from sparkdl.usercode import accompanied


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
        logged: bool,  # outcomes have the history in any case
    ) -> None:
        self.slots = slots
        self._context, self._trainer, self._space = context, trainer, space
        self._objective, self._placements, self._name = objective, placements, name
        self._logged = logged
        self._setups: dict[int, tuple[BroadcastBytes, SampleFiles]] = {}
        self._broadcasts: list[BroadcastBytes] = []

    def start(self, trial: Proposed) -> RunningTrial:
        number, arguments, pruning, best = trial
        try:
            trainer = trainer_of(self._trainer, self._space, arguments)
            placed = self._placements.of(trainer, arguments)
        except (ModelError, ParameterError) as error:
            return Ended(TrialOutcome(failed(number, arguments, error)))
        self._placements.check_data(arguments)
        setup, files = self._setup(placed)
        task = RunTrial(setup, files, number, arguments, pruning, best, self._logged)
        shown = " · ".join(f"{name} {value}" for name, value in arguments.items())
        self._context.setJobGroup(self._name, f"sparkdl: trial {number} · {shown}")
        with stage_name(self._context, f"trial {number}"):
            places = task_per_executor(self._context, [None])
            job = RunningJob(map_frames(places, accompanied(task)), 1)
        return _TaskOfTrial(self._context, job, number, arguments)

    def _setup(self, placed: PlacedSamples) -> tuple[BroadcastBytes, SampleFiles]:
        """Return the broadcast of what trials on these samples have in common, and their files."""
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
            threads=cpus_of(self._context, None),
            numerics=Numerics.here(),
        )
        made = BroadcastBytes.of(self._context, [_pickled(setup)])
        self._broadcasts.append(made)
        self._setups[id(placed)] = made, files
        return made, files

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(Py4JError, OSError):
            self._context.cancelJobGroup(self._name)
        for broadcast in self._broadcasts:
            broadcast.destroy()


def _pickled(setup: TrialSetup) -> bytes:
    """Return ``setup`` as bytes. Raises ParameterError, which names what cannot be pickled."""
    try:
        return dumps(accompanied(setup))
    except Exception as error:
        validation = setup.trainer.validation
        parts = {
            "callbacks": setup.trainer.callbacks,
            "space": setup.space,
            "stop": setup.trainer.stop,
        }
        parts["validation"] = validation
        culprit = "the trainer"
        for name, part in parts.items():
            try:
                dumps(part)
            except Exception:
                culprit = name
                break
        remedy = "Leave out what has an open file or connection, or give parallel=1."
        raise ParameterError(cannot_travel(culprit, error, remedy)) from None


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

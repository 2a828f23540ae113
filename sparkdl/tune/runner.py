"""How trials of a search are made: as tasks of Spark side by side, or one after another.

Side by side each is a fit by the local engine on all samples. One after another each is a fit by the
trainer's engine on the whole cluster.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from py4j.protocol import Py4JError
from pyspark import RDD, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from sparkdl.checkpoint.files import Folder
from sparkdl.connect.rows import for_gang
from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import segment_files
from sparkdl.data.partition_writer import where_there_is_room
from sparkdl.data.samples import SampleSet
from sparkdl.errors import ModelError, ParameterError, SessionError, TrainingError
from sparkdl.gang.connect import slots_of
from sparkdl.gang.slots import cpus_of
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import Callback, none_added
from sparkdl.loop.engine import AVERAGE, BEST, CURRENT
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import INTERRUPTED
from sparkdl.loop.state import TrainState
from sparkdl.model.flat import FlatModule
from sparkdl.process.determinism import Numerics
from sparkdl.process.system import label_output
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig, open_root, read_private, write_private
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.executors import task_per_executor
from sparkdl.spark.failures import explain
from sparkdl.spark.frames import RunningJob, is_local, map_frames, stage_name
from sparkdl.spark.worker import finish_task, task_cancelled
from sparkdl.train.course import LocalFit
from sparkdl.train.fit import fit
from sparkdl.train.placed_samples import PlacedSamples
from sparkdl.train.prepare import travelling
from sparkdl.train.request import FitRequest
from sparkdl.train.trainer import Trainer
from sparkdl.tune.arguments import READING, SearchSpec
from sparkdl.tune.folder import (
    Objective,
    SearchFolder,
    TrialOutcome,
    TrialRecord,
    failed,
    is_of_trial,
)
from sparkdl.usercode import accompanied

MOST_BYTES = 4 << 30
"""The most bytes of samples that are copied to every node."""


class SearchInterrupted(Exception):
    """The user has interrupted a trial, which has ended early and does not count."""


class Proposed(NamedTuple):
    """A trial to start."""

    number: int
    arguments: Mapping[str, Any]  # as they are shown
    pruning: Callback | None
    best: TrialRecord | None  # so far

    def failed(self, error: BaseException) -> TrialOutcome:
        """Return the outcome if it ends with ``error``."""
        return TrialOutcome(failed(self.number, self.arguments, error))

    def ended(
        self,
        objective: Objective,
        history: History,
        weights: Callable[[], Mapping[str, torch.Tensor]],
        trained: TrainedModel | None = None,
    ) -> TrialOutcome:
        """Return the outcome of a training, with weights and model only if it is the best so far."""
        record = objective.record(self.number, self.arguments, history)
        if not objective.is_better(record, self.best):
            return TrialOutcome(record, history=history)
        return TrialOutcome(record, weights(), history, trained)


class RunningTrial(Protocol):
    """A trial that was started, as a ``Future`` is."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def result(self) -> TrialOutcome:
        """Wait for the end, and return the outcome."""


@dataclass(kw_only=True)
class Runner:
    """A way to make trials; :meth:`close` ends those that run."""

    context: Any  # of Spark; None, as for the next: a session of Spark Connect
    spec: SearchSpec
    placements: Placements | None
    slots: int = 1  # trials that run at once

    def start(self, trial: Proposed) -> RunningTrial:
        """Start a trial."""
        placed = None
        try:
            trainer = self.spec.trainer_of(trial.arguments, trial.pruning)
            if self.placements is not None:
                placed = self.placements.of(trainer, trial.arguments)
        except (ModelError, ParameterError) as error:
            return ended(trial.failed(error))
        if self.placements is not None:
            self.placements.check_data(trial.arguments)
        return self._start(trial, trainer, placed)

    def _start(self, trial: Proposed, trainer: Trainer, placed: Any) -> RunningTrial:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: no trial runs."""


@dataclass(kw_only=True)
class FitsHere(Runner):
    """Trials one after another, each a fit by the trainer's engine on the whole cluster."""

    described: Mapping[str, str] = field(default_factory=dict)  # the search, in words
    keep: bool = False  # outcomes have the weights, to be written to a folder

    def _start(self, trial: Proposed, trainer: Trainer, placed: Any) -> RunningTrial:
        outcome = self._outcome(trial, trainer, placed)
        if outcome.history is not None and outcome.history.stopped == INTERRUPTED:
            raise SearchInterrupted
        return ended(outcome)

    def _outcome(self, trial: Proposed, trainer: Trainer, placed: Any) -> TrialOutcome:
        try:
            trained = self._fit(trainer, placed, trial)
        except Exception as error:
            if not is_of_trial(error):
                raise
            if self.context is not None:
                check_alive(self.context)
            return trial.failed(error)
        weights = partial(weights_of, trained) if self.keep else dict
        return trial.ended(self.spec.objective, trained.history, weights, trained)

    def _fit(self, trainer: Trainer, placed: Any, trial: Proposed) -> TrainedModel:
        checkpoint = trainer.checkpoint
        if checkpoint is None:
            return trainer.fit(placed)
        content = repr([sorted(self.described.items()), sorted(trial.arguments.items())])
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        name = f"trial-{trial.number:06d}-{digest}"  # no trial of another search goes on from it
        path = Folder.of(checkpoint.path).folder(name).uri
        own = replace(trainer, checkpoint=replace(checkpoint, path=path))
        return own.fit(placed, resume="latest")


def ended(outcome: TrialOutcome) -> RunningTrial:
    """Return a trial that has ended."""
    future: Future[TrialOutcome] = Future()
    future.set_result(outcome)
    return future


def check_alive(context: SparkContext) -> None:
    """Raise TrainingError if Spark has ended, so that a trial is not to blame."""
    with contextlib.suppress(Py4JError, OSError):
        if context._jsc is not None and not context._jsc.sc().isStopped():
            return
    raise TrainingError("Spark has ended; with path= the search goes on when it is called again.")


def weights_of(trained: TrainedModel) -> dict[str, Any]:
    """Return the flat vector of each kind of weights of a result."""
    kinds = {CURRENT: trained, AVERAGE: trained.ema, BEST: trained.best}
    return {
        kind: FlatModule(copy.deepcopy(one.module)).flat
        for kind, one in kinds.items()
        if one is not None
    }


class Placements:
    """The samples of a search, placed once for each way to read the data, until ``stack`` ends."""

    def __init__(
        self,
        data: DataFrame | RDD[Any],
        names: Iterable[str],
        folder: SearchFolder | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._data, self._folder, self._stack = data, folder, stack
        self._names = [name for name in names if name.partition(".")[0] in READING]
        self._checked: set[str] = set()
        self._placed: dict[str, PlacedSamples] = {}

    def of(self, trainer: Trainer, arguments: Mapping[str, Any]) -> PlacedSamples:
        """Return the samples as the trainer of a trial reads them."""
        key = self._key(arguments)
        if key not in self._placed:
            placed = PlacedSamples.of(trainer, self._data)
            assert isinstance(placed, PlacedSamples)  # not persisted: no session of Spark Connect
            self._placed[key] = self._stack.enter_context(placed)
        return self._placed[key]

    def check_data(self, arguments: Mapping[str, Any]) -> None:
        """Raise ParameterError if the folder holds trials on other data; looked at once for each way
        to read it."""
        key = self._key(arguments)
        if self._folder is not None and key not in self._checked:
            placed = self._placed[key]
            assert placed.validation is not None
            self._folder.check_data(key, placed.training.handles, placed.validation.handles)
            self._checked.add(key)

    def _key(self, arguments: Mapping[str, Any]) -> str:
        return repr([arguments[name] for name in self._names])


@dataclass(kw_only=True)
class SideBySide(Runner):
    """Trials as tasks of Spark, several at once, each a fit by the local engine."""

    name: str
    settings: Settings
    logged: bool  # outcomes have the history in any case
    _setups: dict[int, tuple[BroadcastBytes, SampleFiles]] = field(default_factory=dict)
    _broadcasts: list[BroadcastBytes] = field(default_factory=list)

    def _start(self, trial: Proposed, trainer: Trainer, placed: Any) -> RunningTrial:
        task = RunTrial(*self._setup(placed), trial, self.logged)
        shown = " · ".join(f"{name} {value}" for name, value in trial.arguments.items())
        self.context.setJobGroup(self.name, f"sparkdl: trial {trial.number} · {shown}")
        with stage_name(self.context, f"trial {trial.number}"):
            places = task_per_executor(self.context, [None])
            job = RunningJob(map_frames(places, accompanied(task)), 1)
        return _TaskOfTrial(self.context, job, trial)

    def _setup(self, placed: PlacedSamples) -> tuple[BroadcastBytes, SampleFiles]:
        """Return the broadcast of what trials on these samples have in common, and their files."""
        known = self._setups.get(id(placed))
        if known is not None:
            return known
        validation = self.spec.trainer.validation
        assert validation is not None
        assert placed.validation is not None
        files = SampleFiles.of(self.context, placed.slab, [placed.training, placed.validation])
        if files.copies is not None:
            self._broadcasts.append(files.copies)
        nothing: Any = None  # a DataFrame does not travel, and the samples are in place
        trainer = replace(self.spec.trainer, validation=replace(validation, data=nothing))
        setup = TrialSetup(
            spec=replace(self.spec, trainer=trainer),
            samples=LocalFit(placed.training, placed.validation, placed.float_dtype),
            settings=self.settings,
            threads=cpus_of(self.context, None),
            numerics=Numerics.here(),
        )
        made = BroadcastBytes.of(self.context, [_pickled(setup)])
        self._broadcasts.append(made)
        self._setups[id(placed)] = made, files
        return made, files

    def close(self) -> None:
        with contextlib.suppress(Py4JError, OSError):
            self.context.cancelJobGroup(self.name)
        for broadcast in self._broadcasts:
            broadcast.destroy()


def _pickled(setup: TrialSetup) -> bytes:
    """Return ``setup`` as bytes. Raises ParameterError, which names what cannot be pickled."""
    remedy = "Leave out what has an open file or connection, or give parallel=1."
    names = ("callbacks", "stop", "validation")
    parts = [(name, getattr(setup.spec.trainer, name), remedy) for name in names]
    parts += [("space", setup.spec.space, remedy), ("the trainer", None, remedy)]
    return travelling(setup, parts)


@dataclass(frozen=True)
class _TaskOfTrial:
    context: SparkContext
    job: RunningJob
    trial: Proposed

    def done(self) -> bool:
        return self.job.done

    def result(self) -> TrialOutcome:
        try:
            (frame,) = self.job.frames()
        except (Py4JError, PySparkException) as error:
            check_alive(self.context)
            lost = TrainingError(f"the task of the trial failed: {explain(str(error))}")
            return self.trial.failed(lost)
        found: TrialOutcome = pickle.loads(frame)
        return found


@dataclass(frozen=True)
class TrialSetup:
    """The common part of all trials on the same samples."""

    spec: SearchSpec  # the validation of its trainer has no data
    samples: LocalFit  # as the driver mapped them
    settings: Settings
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
    trial: Proposed  # the weights of one that is not better than ``best`` stay here
    logged: bool = False  # the history is wanted in any case

    def __call__(self, partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
        for _ in frames:
            pass
        yield pickle.dumps(self._outcome())
        finish_task()

    def _outcome(self) -> TrialOutcome:
        label_output(f"trial {self.trial.number}")
        try:
            setup: TrialSetup = pickle.loads(self.setup.value)
            return self._trained(setup)
        except Exception as error:
            return self.trial.failed(error)

    def _trained(self, setup: TrialSetup) -> TrialOutcome:
        trainer = setup.spec.trainer_of(self.trial.arguments, self.trial.pruning)
        setup.numerics.use()
        fit, callbacks = self.files.here(setup.samples), [EndWithTask(), *trainer.callbacks]
        done = fit.run(trainer, callbacks, setup.settings, self.files.slab, setup.threads)
        outcome = self.trial.ended(setup.spec.objective, done.history, lambda: done.weights)
        return outcome if self.logged or outcome.weights else replace(outcome, history=None)


class EndWithTask(Callback):
    """A callback that ends the training of a task that Spark has cancelled."""

    def on_iteration_start(self, trainer: Any, state: TrainState) -> None:
        if task_cancelled():
            raise InterruptedError("Spark cancelled the task")


@dataclass(frozen=True)
class SampleFiles:
    """Sample files that the driver wrote, for tasks on any node.

    In local mode tasks map the driver's files. On a cluster the files are broadcast, and the first
    task on a node writes them into the slab root there, which other tasks on the node map too.
    """

    slab: SlabConfig
    names: tuple[str, ...]  # without their folders
    copies: BroadcastBytes | None  # None in local mode

    @staticmethod
    def of(context: SparkContext, slab: SlabConfig, samples: Sequence[SampleSet]) -> SampleFiles:
        """Broadcast the files of ``samples``, unless tasks can map them where they are."""
        if is_local(context):
            return SampleFiles(slab, (), None)
        found = (path for one in samples for handle in one.handles for path in _paths(handle))
        paths = list(dict.fromkeys(found))  # partitions may share files
        total = sum(os.path.getsize(path) for path in paths)
        if total > MOST_BYTES:
            raise ParameterError(
                f"the samples have {total / 1e9:,.1f} GB, and trials side by side need all of them on "
                f"every node: at most {MOST_BYTES / 1e9:,.1f} GB are copied. Search on a part of the "
                "rows, or with parallel=1, where each trial is distributed."
            )
        copies = BroadcastBytes.of(context, [read_private(path) for path in paths])
        return SampleFiles(slab, tuple(os.path.basename(path) for path in paths), copies)

    def here(self, fit: LocalFit) -> LocalFit:
        """Return a fit on samples as this task can map them."""
        if self.copies is None:
            return fit
        folder = self._installed()

        def moved(path: str) -> str:
            return str(folder / os.path.basename(path)) if path else ""

        def mapped(samples: SampleSet) -> SampleSet:
            handles = []
            for one in samples.handles:
                segments = tuple(replace(each, path=moved(each.path)) for each in one.segments)
                handles.append(replace(one, segments=segments, order_path=moved(one.order_path)))
            return replace(samples, handles=tuple(handles))

        assert fit.validation is not None
        return replace(fit, training=mapped(fit.training), validation=mapped(fit.validation))

    def _installed(self) -> Path:
        """Return the folder of this node that has all files, after writing those that are missing."""
        assert self.copies is not None
        root = open_root(self.slab, create=True)
        assert root is not None
        for folder in root.directories:
            if all((folder / name).exists() for name in self.names):
                return folder
        return where_there_is_room(root, self._write, 0, sum(self.copies.lengths))

    def _write(self, folder: Path) -> Path:
        """Write the files into ``folder``; another task may do so at the same time."""
        assert self.copies is not None
        for name, data in zip(self.names, self.copies.parts(), strict=True):
            draft = folder / f"{name}.{secrets.token_hex(8)}"
            try:
                write_private(draft, data)
                os.replace(draft, folder / name)
            finally:
                draft.unlink(missing_ok=True)
        return folder


def _paths(handle: SampleHandle) -> list[str]:
    """Return the paths of all files of a partition."""
    rows = [name for segment in handle.segments for name in segment_files(segment, handle.fields)]
    return [*rows, handle.order_path] if handle.order_path else rows


def check_search(trainer: Trainer, path: Any) -> None:
    """Raise :class:`SessionError` for what a search cannot have in a Spark Connect session."""
    for name, value in (("path=", path), ("Trainer(checkpoint=)", trainer.checkpoint)):
        if value is not None:
            raise SessionError(
                f"{name} cannot be had by a search in a Spark Connect session, which keeps its trials "
                "in this process: leave it out, or start a classic session."
            )


@dataclass(kw_only=True)
class ConnectedTrials(FitsHere):
    """Trials as fits of gangs, one after another, or several at once in threads."""

    data: Any
    parallel: int | None  # trials at once; None: as many as have slots

    def __post_init__(self) -> None:
        self._session, self._tag = self.data.sparkSession, f"sparkdl-{secrets.token_hex(8)}"
        trainer, self._threads = for_gang(self.spec.trainer), None
        if self.parallel != 1:
            replicas = trainer.number_of_replicas or 1
            trainer = replace(trainer, replicas=replicas)
            most = max(1, slots_of(self._session) // replicas)
            self.slots = min(most, self.parallel or most)
            self._threads = ThreadPoolExecutor(self.slots)
        self.spec = replace(self.spec, trainer=trainer)

    def _start(self, trial: Proposed, trainer: Trainer, placed: Any) -> RunningTrial:
        if self._threads is None:
            return super()._start(trial, trainer, placed)
        return self._threads.submit(self._outcome, trial, trainer, placed)

    def _fit(self, trainer: Trainer, placed: Any, trial: Proposed) -> TrainedModel:
        self._session.addTag(self._tag)
        try:
            with none_added():
                quiet = {} if self._threads is None else {"progress": "false"}
                return fit(self.data, FitRequest(trainer=trainer), **quiet).trained
        finally:
            self._session.removeTag(self._tag)

    def close(self) -> None:
        if self._threads is not None:
            with contextlib.suppress(PySparkException):
                self._session.interruptTag(self._tag)
            self._threads.shutdown(cancel_futures=True)

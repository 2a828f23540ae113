"""A fit in a session of Spark Connect, as its tasks see it: rank 0 does what else a driver does."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import BarrierTaskContext, cloudpickle
from torch import nn

from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.data.equal_rows import RepeatedRows, SpreadRows, tell_of_shares
from sparkdl.data.fields import SampleHandle, check_handles
from sparkdl.data.preview import Preview
from sparkdl.data.ragged import Rows
from sparkdl.data.sample_set import SampleSet, sample_set
from sparkdl.data.table_parts import WriteBoth
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.gang.rank import frames_of
from sparkdl.engines.registry import EngineInputs
from sparkdl.errors import DataError
from sparkdl.gang.control import ControlAddress, ControlServer
from sparkdl.gang.led import RESULT, LedGang, picklable_attributes
from sparkdl.gang.rank_task import RankContext
from sparkdl.infer.outputs import Output
from sparkdl.infer.saved import StoredState
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.process.determinism import Numerics
from sparkdl.settings import Settings
from sparkdl.slab.pool import clean_here
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.broadcasts import Artifact, received_bytes
from sparkdl.train.carried import CarriedRun
from sparkdl.train.connected_news import ReportedProgress
from sparkdl.train.course import FinishedEngine, Start, run_course, told_model
from sparkdl.train.engine_inputs import engine_inputs
from sparkdl.train.large_result import StoredRows, store_rows
from sparkdl.train.place_samples import check_validation
from sparkdl.train.prepare import PreparedModel, prepare

if TYPE_CHECKING:
    from sparkdl.infer.model import TrainedModel
    from sparkdl.train.trainer import Trainer

MAX_ROWS_BYTES = 64_000_000
"""The largest result that comes back as rows of the query: the server holds all rows of a task at
once."""
STORED = "stored"
"""The kind of the row that says where a larger result is."""


@dataclass(frozen=True)
class FitOrder:
    """The order that rank 0 gets: what it is to train, and how."""

    trainer: Trainer  # without the data of its validation
    start: TrainedModel | None
    kept: StoredState | None
    carried: CarriedRun | None
    one_pass: bool
    any_data: bool
    settings: Settings
    numerics: Numerics = field(default_factory=Numerics.here)  # those of the client


@dataclass(frozen=True)
class FitEnd:
    """The end of a fit. Its weights travel in rows of their own."""

    samples: SampleSet
    output: Output | None
    state: TrainState
    history: History
    kinds: list[str]
    packed: tuple[bytes, ...] | None  # None: not collected
    packed_best: tuple[bytes, ...] | None
    schedule: Schedule | None
    attributes: tuple[bytes, ...] = ()  # each callback's, pickled as far as they pickle
    weights: dict[str, bytes] = field(default_factory=dict)  # empty until the client has its rows


@dataclass(frozen=True)
class LedFit:
    """A fit, as work of a gang that rank 0 leads; see :class:`sparkdl.gang.led.LedWork`."""

    slab: SlabConfig
    write: WriteBoth
    num_features: int
    weighted: bool
    order: bytes | Artifact  # the pickled FitOrder
    resume: str | None
    most: int = MAX_ROWS_BYTES  # bytes of a result that comes back as rows
    again: bool = False  # the gang was submitted before, and lost
    control: ControlAddress | None = None  # where rank 0 takes questions

    def begin(self, batches: Iterable[pa.RecordBatch]) -> list[Any]:
        frames = [pickle.dumps(handle) for handle in self.write(batches)]
        return [tuple(frames)]

    def end(self) -> None:
        clean_here(self.slab)

    def lead(self, gang: LedGang, frames: list[list[Any]]) -> Iterator[tuple[str, bytes]]:
        progress = ReportedProgress(gang.log)
        with contextlib.ExitStack() as block:
            if self.control is not None:
                server = ControlServer(gang.address, self.control, progress.answer)
                block.enter_context(server)
            yield from self._lead(gang, frames, progress)

    def _lead(
        self, gang: LedGang, frames: list[list[Any]], progress: ReportedProgress
    ) -> Iterator[tuple[str, bytes]]:
        parts = [[pickle.loads(frame) for frame in frames_of(records)] for records in frames]
        training = [handles[0] for handles in parts]
        check_handles(training, "column")
        order: FitOrder = pickle.loads(received_bytes(self.order))
        trainer = order.trainer
        order.numerics.use()
        progress.patience = order.settings.client_seconds
        model = prepare(trainer, order.start, check_data=lambda data: None)
        start = self._start(order)
        gang.come_together()
        samples = self._samples(gang, training, 0)
        tell_of_shares(samples.handles)
        validation = None
        if trainer.validation is not None:
            validation = self._validation(gang, [handles[1] for handles in parts], samples)
        threads = BarrierTaskContext.get().cpus()

        def inputs(tried: PreparedModel, scored: ValidationSet | None) -> EngineInputs:
            settings = order.settings
            return engine_inputs(
                trainer, settings, tried, samples, scored, self.slab, threads, None, gang
            )

        def take(done: FinishedEngine) -> tuple[FinishedEngine, dict[str, Any]]:
            weights = {kind: done.engine.weights(kind) for kind in done.kinds}
            if any(type(each).on_result is not Callback.on_result for each in done.callbacks):
                told_model(done, trainer, model, weights.__getitem__)
            return done, weights

        prepared, model = [model], replace(model, module=nn.Module())
        finished = run_course(
            trainer,
            prepared,
            samples,
            validation,
            start,
            inputs,
            take,
            progress.describing,
            interrupts=progress.interrupt,
        )
        done, weights = finished.result
        end = FitEnd(
            replace(samples, handles=(), preview=[], more=[]),
            done.output,
            finished.state,
            done.history,
            done.kinds,
            done.packed,
            finished.packed_best,
            finished.schedule if order.one_pass else None,
            tuple(map(_attributes, trainer.callbacks)),
        )
        rows = {RESULT: cloudpickle.dumps(end)}
        rows.update((kind, flat.numpy().tobytes()) for kind, flat in weights.items())
        yield from self._rows(trainer, rows)

    def _rows(self, trainer: Trainer, rows: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the rows, or where they are if they are too large."""
        if sum(map(len, rows.values())) <= self.most or trainer.checkpoint is None:
            yield from rows.items()
            return
        stored: StoredRows = store_rows(trainer.checkpoint.path, rows)
        yield STORED, pickle.dumps(stored)

    def _start(self, order: FitOrder) -> Start:
        """Return the state in which the run begins, once its checkpoints can be written."""
        trainer, resuming = order.trainer, None
        if self.resume is not None:
            any_data = order.one_pass or order.any_data
            resuming = ResumeCandidates(trainer.checkpoint, self.resume, any_data)
        if trainer.checkpoint is not None:
            store = CheckpointStore(trainer.checkpoint.path)
            store.prepare()
            if resuming is None and order.carried is None and not self.again:
                store.tell_of_another_run(trainer.checkpoint.keep)
        return Start(resuming, order.kept, order.carried, order.one_pass)

    def _validation(
        self, gang: LedGang, handles: list[SampleHandle], samples: SampleSet
    ) -> SampleSet:
        try:
            check_handles(handles, "column")
            found = self._samples(gang, handles, 1)
        except DataError as error:
            raise DataError(f"validation data: {error}") from None
        check_validation(samples, found)
        return found

    def _samples(self, gang: LedGang, handles: list[SampleHandle], part: int) -> SampleSet:
        repeated = RepeatedRows.of(handles)
        if repeated is not None:
            one_of_each = repeated.preview()
            read = gang.call(_ReadPreview(one_of_each, part), "spreading equal rows")
            task = repeated.spread(self.slab, [read[partition] for partition in one_of_each.rows])
            handles = gang.call(_SpreadPart(task, part), "spreading equal rows")
        preview = Preview.of(handles)
        read = gang.call(_ReadPreview(preview, part), "looking at the first samples")
        rows = preview.join([read[partition] for partition in preview.rows])
        return sample_set(None, handles, self.num_features, self.weighted, rows)


def _attributes(callback: Callback) -> bytes:
    """Pickle the attributes of a callback that can be pickled."""
    packed: bytes = cloudpickle.dumps(picklable_attributes(callback))
    return packed


@dataclass(frozen=True)
class _ReadPreview:
    """The command that reads a rank's rows of a preview, of the training (0) or the validation (1)."""

    preview: Preview
    part: int

    def __call__(self, member: RankContext) -> list[Rows] | None:
        if member.rank not in self.preview.rows:
            return None
        handle = pickle.loads(frames_of(member.frames)[self.part])
        return self.preview.read(member.rank, handle)


@dataclass(frozen=True)
class _SpreadPart:
    """The command that spreads equal rows of the training (0) or the validation (1) of a rank."""

    task: SpreadRows
    part: int

    def __call__(self, member: RankContext) -> SampleHandle:
        frames = frames_of(member.frames)
        handle = self.task.changed(member.rank, pickle.loads(frames[self.part]))
        frames[self.part] = pickle.dumps(handle)
        member.frames[:] = [tuple(frames)]
        return handle

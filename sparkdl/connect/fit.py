"""A fit in a session of Spark Connect: the client's part of it, and its course in rank 0 of the gang.

The client checks and builds what needs no data, says where the rows go, submits the gang, submits it
again if a rank was lost, and makes the result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import torch
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.checkpoint import Checkpoint
from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.resume import LATEST, ResumeCandidates
from sparkdl.checkpoint.store import CheckpointStore, piece_name, result_name
from sparkdl.connect.news import (
    ControlAddress,
    ControlClient,
    FollowedFit,
    ReportedProgress,
    answering,
)
from sparkdl.connect.rows import ConnectedRows, PersistedSamples, WriteBoth, for_gang
from sparkdl.data.equal_rows import SPREAD, SpreadRows, tell_of_shares
from sparkdl.data.fields import NO_ROWS, ReadOtherwise, SampleHandle, check_handles
from sparkdl.data.preview import Work
from sparkdl.data.samples import SampleSet, sample_set
from sparkdl.engines.gang.rank import frames_of
from sparkdl.errors import CheckpointError, DataError, ParameterError, StateLostError
from sparkdl.gang.connect import check_slots_of, hosts_of, in_tasks, run_led, slots_of
from sparkdl.gang.led import RESULT, LedGang, LedTask, picklable_attributes
from sparkdl.gang.rank_task import RankContext
from sparkdl.loop.callbacks import Callback, added_callbacks
from sparkdl.loop.interrupt import interruptible, interrupts_held
from sparkdl.loop.progress import Progress, progress_of
from sparkdl.process.determinism import Numerics
from sparkdl.session import SessionFacts
from sparkdl.settings import Settings
from sparkdl.slab.pool import clean_here
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.broadcasts import Artifact, received_bytes, sent_bytes
from sparkdl.spark.failures import end_of_session_explained, reading_explained
from sparkdl.train.course import check_replay, run_course
from sparkdl.train.engine_inputs import Site
from sparkdl.train.fit import built
from sparkdl.train.placed_samples import OnPart, check_validation, read_again
from sparkdl.train.plain_tasks import clean_nodes
from sparkdl.train.preflight import check_mesh, check_sizes
from sparkdl.train.prepare import PreparedModel, prepare, travelling
from sparkdl.train.request import CarriedRun, FitRequest
from sparkdl.train.result import FitEnd
from sparkdl.train.spec import TrainerSpec

MAX_ROWS_BYTES = 64_000_000
"""The largest result that comes back as rows of the query: the server holds all rows of a task at
once."""
STORED = "stored"
"""The kind of the row that says where a larger result is."""
PIECE_BYTES = 4 << 20
"""The bytes of a file of a large result, and so of a task's result."""
AT_ONCE = 64
"""The number of pieces that one query reads."""


@dataclass(frozen=True)
class FitOrder:
    """The order that rank 0 gets: what it is to train, and how."""

    request: FitRequest  # its validation has no data
    settings: Settings
    numerics: Numerics = field(default_factory=Numerics.here)  # those of the client


@dataclass(frozen=True)
class LedEnd:
    """The end of a fit in rank 0. Its weights travel in rows of their own."""

    fit: FitEnd
    attributes: tuple[bytes, ...]  # each callback's, pickled as far as they pickle
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
                block.enter_context(answering(gang.address, self.control, progress.answer))
            yield from self._lead(gang, frames, progress)

    def _lead(
        self, gang: LedGang, frames: list[list[Any]], progress: ReportedProgress
    ) -> Iterator[tuple[str, bytes]]:
        parts = [[pickle.loads(frame) for frame in frames_of(records)] for records in frames]
        training = [handles[0] for handles in parts]
        check_handles(training, "column")
        order: FitOrder = pickle.loads(received_bytes(self.order))
        request, trainer = replace(order.request, resume=self.resume), order.request.trainer
        order.numerics.use()
        progress.patience = order.settings.client_seconds
        model = prepare(trainer, request.start)
        resuming = request.checkpoints(self.again)
        gang.come_together()
        samples = self._samples(gang, training, 0, trainer.sampling is not None)
        tell_of_shares(samples.handles)
        validation = None
        if trainer.validation is not None:
            validation = self._validation(gang, [handles[1] for handles in parts], samples)
        site = Site(
            order.settings,
            self.slab,
            BarrierTaskContext.get().cpus(),
            progress,
            gang=gang,
            interrupt=progress.interrupt,
        )
        with run_course(request, model, samples, validation, resuming, site) as finished:
            weights = {kind: finished.engine.weights(kind) for kind in finished.end.kinds}
            if any(type(each).on_result is not Callback.on_result for each in finished.callbacks):
                finished.carried(weights.__getitem__)
        read = finished.trainer.columns
        adapted = {name: one for name, one in read.items() if trainer.columns.get(name) != one}
        samples = replace(samples, handles=(), preview=[], more=[], columns=adapted)
        attributes = tuple(cloudpickle.dumps(picklable_attributes(c)) for c in trainer.callbacks)
        end = LedEnd(replace(finished.end, samples=samples), attributes)
        rows = {RESULT: cloudpickle.dumps(end)}
        rows.update((kind, flat.numpy().tobytes()) for kind, flat in weights.items())
        yield from self._rows(trainer, rows)

    def _rows(self, trainer: TrainerSpec, rows: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the rows, or where they are if they are too large."""
        if sum(map(len, rows.values())) <= self.most or trainer.checkpoint is None:
            yield from rows.items()
            return
        yield STORED, pickle.dumps(store_rows(trainer.checkpoint.path, rows))

    def _validation(
        self, gang: LedGang, handles: list[SampleHandle], samples: SampleSet
    ) -> SampleSet:
        try:
            check_handles(handles, "column")
            found = self._samples(gang, handles, 1)
        except ReadOtherwise:
            raise
        except DataError as error:
            raise DataError(f"validation data: {error}") from None
        check_validation(samples, found)
        return found

    def _samples(
        self, gang: LedGang, handles: list[SampleHandle], part: int, sampled: bool = False
    ) -> SampleSet:
        def run(doing: str, work: Work, partitions: Sequence[int]) -> list[Any]:
            found = gang.call(OnPart(work, part), doing)
            return [found[partition] for partition in partitions]

        spread = SpreadRows.of(self.slab, handles, run)
        if spread is not None:
            handles = gang.call(_SpreadPart(spread, part), SPREAD)
        columns = self.num_features, self.weighted
        return sample_set(None, handles, run, *columns, sampled=sampled)


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


@dataclass(frozen=True)
class StoredRows:
    """A result too large for the rows of a query: in files, beside the checkpoints of the run.

    Rank 0 writes them, and the client reads them with queries of their own, a task for each piece, so
    that no task's result is large. Others may be able to write to the folder: the digest of each piece
    comes with the rows of the gang's query, which Spark protects, and the client opens no piece that
    has another one.
    """

    uri: str
    digests: tuple[bytes, ...]  # SHA-256 of each file

    def fetch(self, session: Any) -> dict[str, bytes]:
        """Read the rows in a session of Spark Connect, and delete the files."""
        data, pieces = bytearray(), len(self.digests)
        for start in range(0, pieces, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, pieces))
            with reading_explained("fetching the model"):
                parts = in_tasks(session, self._read, numbers)
            for number, part in zip(numbers, parts, strict=True):
                if hashlib.sha256(part).digest() != self.digests[number]:
                    raise CheckpointError(
                        f"{Folder(self.uri)}/{piece_name(number)} is not the part of the result that "
                        "rank 0 has written: it is damaged, or somebody else has changed it. Let only "
                        "this user write to the folder of Checkpoint(path), and go on with "
                        'resume="latest".'
                    )
                data += part
        in_tasks(session, self._delete, range(1))
        rows: dict[str, bytes] = pickle.loads(data)
        return rows

    def _read(self, number: int) -> bytes:
        return Folder(self.uri).read(piece_name(number))

    def _delete(self, number: int) -> None:
        folder = Folder(self.uri)
        with contextlib.suppress(CheckpointError):
            for piece in range(len(self.digests)):
                folder.delete(piece_name(piece))
            folder.delete_empty()


def store_rows(path: str | os.PathLike[str], rows: Mapping[str, bytes]) -> StoredRows:
    """Write rows into a new folder in ``path``, which all executors share."""
    folder = Folder.of(path).folder(result_name())
    folder.make()
    data, digests = pickle.dumps(dict(rows)), []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        piece = data[start : start + PIECE_BYTES]
        folder.write(piece_name(number), piece)
        digests.append(hashlib.sha256(piece).digest())
    return StoredRows(folder.uri, tuple(digests))


logger = logging.getLogger("sparkdl")
MAX_LOSSES = 16
"""The number of times that ranks may be lost without a new checkpoint, if the run writes any."""
LOSSES_FROM_START = 4
"""The same of a run without checkpoints, which begins again each time."""


def run(data: Any, request: FitRequest, facts: SessionFacts) -> CarriedRun:
    """Train in a session of Spark Connect; see :func:`sparkdl.train.fit.run`.

    A replay is only checked, since a gang decides nothing.
    """
    with end_of_session_explained(facts.session):
        progress = progress_of(facts.settings.progress, "", time.monotonic(), request.one_pass)
        with contextlib.closing(progress):
            return _run(data, request, facts, progress)


def _run(data: Any, request: FitRequest, facts: SessionFacts, progress: Progress) -> CarriedRun:
    session, settings = facts.session, facts.settings
    trainer = for_gang(request.trainer)
    check_replay(trainer, request.replay)
    model = built(trainer, request, facts, progress)
    if (checkpoint := trainer.checkpoint) is not None:
        checkpoint = replace(checkpoint, path=_absolute(checkpoint.path))
        trainer = replace(trainer, checkpoint=checkpoint)
    resume = None if request.resume is None else _absolute(request.resume)
    request = replace(request, trainer=trainer, resume=resume)
    newest = NewestCheckpoint.seen(session, request, resume)
    ranks = trainer.number_of_replicas or newest.replicas
    if isinstance(data, PersistedSamples):
        data.check(trainer, model.float_dtype)
        ranks = data.replicas
    ranks = ranks or slots_of(session, trainer.resource_profile)
    check_sizes(trainer, model.layout)
    check_mesh(trainer, model, ranks)
    _check_result(request, model)
    check_slots_of(session, ranks, trainer.resource_profile)
    callbacks = (*trainer.callbacks, *added_callbacks(trainer.callbacks))
    columns = len(trainer.feature_columns), trainer.weight is not None
    for reading in itertools.count(1):
        slab = SlabConfig.new(settings.slab_dir, facts.application)
        if isinstance(data, PersistedSamples):
            rows = data.rows.into(slab)
        else:
            rows = ConnectedRows.of(trainer, data, ranks, model.float_dtype, slab)
        request = replace(request, trainer=replace(trainer, callbacks=callbacks))
        order = sent_bytes(_order(request, model, settings), "fit", session)
        fit = LedFit(slab, rows.write, *columns, order, resume, MAX_ROWS_BYTES)
        progress.doing("starting the gang and reading rows")
        try:
            end = submitted(request, facts, rows, fit, newest, progress)
            break
        except ReadOtherwise as otherwise:
            if isinstance(data, PersistedSamples):
                raise
            trainer = replace(trainer, columns=read_again(trainer.columns, otherwise, reading))
            model.read_by(trainer)

    def weights(kind: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(end.weights.pop(kind)), dtype=model.layout.dtype)

    carried = end.fit.carried(trainer, model, weights)
    for callback, attributes in zip(callbacks, end.attributes, strict=True):
        vars(callback).update(pickle.loads(attributes))
    return carried


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in rank 0, whose working directory is another."""
    text = os.fspath(path)
    return text if text == LATEST else Folder.of(text).uri


def _check_result(request: FitRequest, model: PreparedModel) -> None:
    """Raise ParameterError if the result is too large for rows, and has no other way."""
    trainer = request.trainer
    kinds = 1 + (trainer.ema is not None) + bool(trainer.validation and trainer.validation.best)
    nbytes = model.layout.nbytes * kinds
    if nbytes > MAX_ROWS_BYTES and trainer.checkpoint is None:
        raise ParameterError(
            f"the result has {nbytes / 1e6:,.0f} MB of weights, and a Spark Connect session returns at "
            f"most {MAX_ROWS_BYTES / 1e6:,.0f} MB in rows: give Trainer(checkpoint="
            "sparkdl.Checkpoint(path)) a folder that the executors share, through which it comes."
        )


def _order(request: FitRequest, model: PreparedModel, settings: Settings) -> bytes:
    """Return the pickled order of the fit. Raises ParameterError if a part does not pickle."""
    trainer, nothing = request.trainer, ()
    weights = trainer.weights if request.start is not None else model.recipe.weights
    sent = replace(trainer, resource_profile=None, weights=weights)
    if trainer.validation is not None:
        validation: Any = replace(trainer.validation, data=nothing)  # type: ignore[arg-type]
        sent = replace(sent, validation=validation)
    order = FitOrder(replace(request, trainer=sent, replay=None), settings)
    remedy = (
        "In a Spark Connect session callbacks run in rank 0: let it open files and connections in "
        "on_fit_start, and keep no session."
    )
    parts: list[tuple[str, Any, str]]
    parts = [(f"the callback {type(one).__name__}", one, remedy) for one in sent.callbacks]
    remedy = "In a Spark Connect session rank 0 has it: let it hold no open resource."
    names = ("stop", "schedule", "validation", "checkpoint", "histograms")
    parts += [(f"{name}=", getattr(sent, name), remedy) for name in names]
    parts.append(("the trainer", None, "Define what it holds in a module."))
    return travelling(order, parts)


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint of a run's folder, as the executors see it."""

    uri: str = ""  # "": there is none
    iteration: int = 0
    replicas: int | None = None  # M of the checkpoint to resume from, if any

    @staticmethod
    def seen(session: Any, request: FitRequest, resume: Any) -> NewestCheckpoint:
        """Let an executor look for the checkpoints of a run, and for the one to ``resume`` from."""
        checkpoint = request.trainer.checkpoint
        if checkpoint is None and resume is None:
            return NewestCheckpoint()
        look = functools.partial(_newest_of, checkpoint, resume, request.other_data)
        with reading_explained("looking for checkpoints"):
            (newest,) = in_tasks(session, look, range(1))
        assert isinstance(newest, NewestCheckpoint)
        return newest


def _newest_of(
    checkpoint: Checkpoint | None, resume: Any, any_data: bool, number: int
) -> NewestCheckpoint:
    whole = () if checkpoint is None else CheckpointStore(checkpoint.path).candidates()
    uri, iteration = next(((uri, manifest.iteration) for uri, manifest in whole), ("", 0))
    replicas = None if resume is None else ResumeCandidates(checkpoint, resume, any_data).replicas
    return NewestCheckpoint(uri, iteration, replicas)


def submitted(
    request: FitRequest,
    facts: SessionFacts,
    rows: ConnectedRows,
    first: LedFit,
    before: NewestCheckpoint,
    progress: Progress,
) -> LedEnd:
    """Submit a fit, and again each time that ranks are lost; return its end, with its weights.

    ``before`` is the newest checkpoint before the run. Raise KeyboardInterrupt if the user interrupted
    before the training, or twice, and DataError if there are no rows.
    """
    session, settings, trainer, ranks = facts.session, facts.settings, request.trainer, rows.ranks
    fit, losses, last = first, 0, before
    while True:
        control, training = ControlClient(session, hosts_of(session)), threading.Event()
        task = LedTask(replace(fit, control=control.address), timeout=settings.timeout)
        try:
            with interruptible(ready=training.is_set) as interrupt, contextlib.closing(control):
                follower = FollowedFit(
                    control, trainer, ranks, settings, progress, interrupt, training
                )
                with reading_explained():
                    result = run_led(rows.frame, task, ranks, trainer.resource_profile, follower)
                if not result:  # Spark runs no task for rows of which it knows that there are none
                    raise DataError(NO_ROWS)
                if STORED in result:
                    result = pickle.loads(result[STORED]).fetch(session)
                end: LedEnd = pickle.loads(result.pop(RESULT))
                follower.ended(end.fit.state)
            return replace(end, weights=result)
        except StateLostError as lost:
            if interrupt.asked:
                raise KeyboardInterrupt from lost
            losses += 1
            newest = before
            if trainer.checkpoint is not None:
                newest = NewestCheckpoint.seen(session, request, None)
            if newest.uri != last.uri:
                losses, last = 1, newest
            if losses >= (MAX_LOSSES if trainer.checkpoint else LOSSES_FROM_START):
                raise
            resume, where = first.resume, "the beginning"
            if newest.uri != before.uri:
                resume, where = LATEST, f"the checkpoint after iteration {newest.iteration}"
            elif resume is not None:
                where = "the checkpoint that it began with"
            reason = str(lost).partition("\n")[0].rstrip(".")
            logger.warning("%s. Submitted again, from %s.", reason, where)
            fit = replace(fit, resume=resume, again=True)
        except BaseException:
            with interrupts_held():
                clean_nodes(session, first.slab, ranks)
            raise

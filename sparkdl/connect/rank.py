"""A fit in a session of Spark Connect, as its tasks see it: rank 0 does what else a driver does."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext, cloudpickle

from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.store import piece_name, result_name
from sparkdl.connect.news import ControlAddress, ControlServer, ReportedProgress
from sparkdl.connect.rows import WriteBoth
from sparkdl.data.equal_rows import RepeatedRows, SpreadRows, tell_of_shares
from sparkdl.data.fields import SampleHandle, check_handles
from sparkdl.data.preview import Preview
from sparkdl.data.ragged import Rows
from sparkdl.data.samples import SampleSet, sample_set
from sparkdl.engines.gang.rank import frames_of
from sparkdl.errors import CheckpointError, DataError
from sparkdl.gang.connect import in_tasks
from sparkdl.gang.led import RESULT, LedGang, picklable_attributes
from sparkdl.gang.rank_task import RankContext
from sparkdl.loop.callbacks import Callback
from sparkdl.process.determinism import Numerics
from sparkdl.settings import Settings
from sparkdl.slab.pool import clean_here
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.broadcasts import Artifact, received_bytes
from sparkdl.spark.failures import reading_explained
from sparkdl.train.course import run_course
from sparkdl.train.engine_inputs import Site
from sparkdl.train.placed_samples import check_validation
from sparkdl.train.prepare import prepare
from sparkdl.train.request import FitRequest
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
        samples = replace(samples, handles=(), preview=[], more=[])
        attributes = tuple(map(_attributes, trainer.callbacks))
        end = LedEnd(replace(finished.end, samples=samples), attributes)
        rows = {RESULT: cloudpickle.dumps(end)}
        rows.update((kind, flat.numpy().tobytes()) for kind, flat in weights.items())
        yield from self._rows(trainer, rows)

    def _rows(self, trainer: TrainerSpec, rows: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the rows, or where they are if they are too large."""
        if sum(map(len, rows.values())) <= self.most or trainer.checkpoint is None:
            yield from rows.items()
            return
        stored: StoredRows = store_rows(trainer.checkpoint.path, rows)
        yield STORED, pickle.dumps(stored)

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

    def _samples(
        self, gang: LedGang, handles: list[SampleHandle], part: int, sampled: bool = False
    ) -> SampleSet:
        repeated = RepeatedRows.of(handles)
        if repeated is not None:
            one_of_each = repeated.preview()
            read = gang.call(_ReadPreview(one_of_each, part), "spreading equal rows")
            task = repeated.spread(self.slab, [read[partition] for partition in one_of_each.rows])
            handles = gang.call(_SpreadPart(task, part), "spreading equal rows")
        preview = Preview.of(handles)
        read = gang.call(_ReadPreview(preview, part), "looking at the first samples")
        rows = preview.join([read[partition] for partition in preview.rows])
        weighted = self.weighted
        return sample_set(None, handles, self.num_features, weighted, rows, sampled=sampled)


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


@dataclass(frozen=True)
class StoredRows:
    """A result too large for the rows of a query: in files, beside the checkpoints of the run.

    Rank 0 writes them, and the client reads them with queries of their own, a task for each piece, so
    that no task's result is large. Others may be able to write to the folder: the digest of each piece
    comes with the rows of the gang's query, which Spark protects, and the client opens no piece that
    has another one.
    """

    uri: str
    sizes: Mapping[str, int]  # bytes by kind, in the order in which they are stored
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
        rows, start = {}, 0
        for kind, nbytes in self.sizes.items():
            rows[kind] = bytes(memoryview(data)[start : start + nbytes])
            start += nbytes
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
    data, digests = b"".join(rows.values()), []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        piece = data[start : start + PIECE_BYTES]
        folder.write(piece_name(number), piece)
        digests.append(hashlib.sha256(piece).digest())
    sizes = {kind: len(content) for kind, content in rows.items()}
    return StoredRows(folder.uri, sizes, tuple(digests))

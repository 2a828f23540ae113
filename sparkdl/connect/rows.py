"""The trainer and the rows of a fit in a session of Spark Connect, and rows that several fits share.

A barrier stage reads one DataFrame, with the rows of training and validation. The columns of the two
parts keep their types, so each part has columns of its own, which are null in the rows of the other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, functions

from sparkdl.data.arrow_tasks import WriteDataFrame, content_hash
from sparkdl.data.fields import Field, SampleHandle
from sparkdl.data.partition_writer import PartitionWriter
from sparkdl.data.row_errors import RowError
from sparkdl.data.samples import Source, chosen_columns
from sparkdl.errors import DataError, ParameterError, SessionError
from sparkdl.gang.connect import check_slots_of, slots_of
from sparkdl.session import SessionFacts
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.failures import end_of_session_explained, reading_explained
from sparkdl.train.placed_samples import SharedSamples, check_validation_data, source
from sparkdl.train.prepare import prepare
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")
Spec = TypeVar("Spec", bound=TrainerSpec)
_warned: set[str] = set()
"""The engines of which this process was told that the gang takes their place."""


def for_gang(trainer: Spec) -> Spec:
    """Return the trainer with the engine that a session of Spark Connect has."""
    trainer = (replace(trainer, engine="gang") if trainer.engine == "auto" else trainer).settled()
    if trainer.engine == "local":
        raise SessionError(
            'engine="local" trains in the process of a classic driver, which a Spark Connect session '
            'does not have: use engine="gang", whose ranks are tasks of one barrier stage.'
        )
    if trainer.min_ranks is not None:
        raise SessionError(
            f"min_ranks={trainer.min_ranks} cannot be had in a Spark Connect session, where each rank "
            "is a task: leave it out, or start a classic session."
        )
    if trainer.engine == "gang":
        return trainer
    try:
        with_gang = replace(trainer, engine="gang")
    except ParameterError as error:
        raise SessionError(
            f'a Spark Connect session trains with engine="gang" only, and this trainer cannot: {error} '
            f'For engine="{trainer.engine}", start a classic session.'
        ) from None
    if trainer.engine not in _warned:
        _warned.add(trainer.engine)
        logger.warning(
            'training with engine="gang": the engine "%s" needs RDDs, which a Spark Connect session '
            'does not have. Say engine="gang" to leave this line out.',
            trainer.engine,
        )
    return with_gang


def in_session_of(data: DataFrame, other: Any) -> Any:
    """Return the rows of ``other`` in the session of ``data``: ``foreachBatch`` gives batches of a
    session of their own."""
    if not isinstance(other, DataFrame) or other.sparkSession is data.sparkSession:
        return other
    return type(other)(other._plan, data.sparkSession)  # type: ignore[call-arg, attr-defined]


_HASH, _VALIDATES = "hash", "validates"


def both_parts(training: DataFrame, validation: DataFrame | None, replicas: int) -> DataFrame:
    """Return the rows of both parts in ``replicas`` partitions, each where a classic fit has it."""
    both = training.withColumn(_HASH, content_hash(training))
    if validation is not None:
        other = validation.select(
            *[functions.col(name).alias(_of_validation(name)) for name in validation.columns],
            content_hash(validation).alias(_HASH),
            functions.lit(True).alias(_VALIDATES),
        )
        both = both.withColumn(_VALIDATES, functions.lit(False))
        both = both.unionByName(other, allowMissingColumns=True)
    return both.repartition(replicas, _HASH).drop(_HASH)


def _of_validation(name: str) -> str:
    return f"v{name}"


@dataclass(frozen=True)
class WriteBoth:
    """Writes the rows of a task into slabs, as the samples of both parts."""

    parts: tuple[WriteDataFrame, ...]  # the training, and the validation if there is one

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> list[SampleHandle]:
        """Write the rows of :func:`both_parts`, and return the handle of each part."""
        writers = [
            PartitionWriter(part.config, weighted=part.columns[-1].weight) for part in self.parts
        ]
        failed: dict[int, SampleHandle] = {}  # once a row was wrong
        for batch in batches:
            for number, (part, writer) in enumerate(zip(self.parts, writers, strict=True)):
                rows = batch.select([_of_validation(n) if number else n for n in part.names])
                if len(self.parts) > 1:
                    validates = batch.column(batch.schema.get_field_index(_VALIDATES))
                    rows = rows.filter(pyarrow.compute.equal(validates, bool(number)))
                if number not in failed:
                    try:
                        part.write([rows], writer)
                    except RowError as error:
                        failed[number] = writer.fail(error.problem)
        return [failed.get(n) or writer.finish() for n, writer in enumerate(writers)]


@dataclass(frozen=True)
class ConnectedRows:
    """The rows of a fit, with a partition for each rank."""

    frame: DataFrame  # of training and validation
    write: WriteBoth
    ranks: int

    @staticmethod
    def of(
        trainer: TrainerSpec, data: DataFrame, ranks: int, float_dtype: str, slab: SlabConfig
    ) -> ConnectedRows:
        """Return the rows of ``data``, and those of the validation of ``trainer``."""
        training: Source = source(trainer, data, ranks, float_dtype, slab)
        chosen, columns = chosen_columns(training)
        drawn = len(trainer.feature_columns) + len(trainer.label_columns)
        drawn = drawn if trainer.sampling is not None else -1
        parts = [WriteDataFrame(slab, columns, training.handling)]
        other = None
        if trainer.validation is not None:
            # where a rank reads the validation rows, it does not know the fields of the training yet
            fields: list[Any] = [
                Field(c.name, c.dtype, ()) if c.spec is None else None
                for i, c in enumerate(columns)
                if i != drawn
            ]
            held = in_session_of(data, trainer.validation.data)
            theirs = replace(training, data=held, fields=tuple(fields), sampling=None)
            try:
                other, columns = chosen_columns(theirs)
            except DataError as error:
                raise DataError(f"validation data: {error}") from None
            parts.append(WriteDataFrame(slab, columns, theirs.handling))
        return ConnectedRows(both_parts(chosen, other, ranks), WriteBoth(tuple(parts)), ranks)

    def into(self, slab: SlabConfig) -> ConnectedRows:
        """Return the same rows for other slabs."""
        parts = tuple(replace(part, config=slab) for part in self.write.parts)
        return replace(self, write=WriteBoth(parts))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PersistedSamples(SharedSamples):
    """The samples of a trainer in a session of Spark Connect, for several fits.

    Their rows are persisted where the ranks need them: nothing is read or shuffled again, but each
    fit writes them into slabs of its own. See :class:`sparkdl.PlacedSamples`.
    """

    data: DataFrame
    rows: ConnectedRows

    @staticmethod
    def of(trainer: TrainerSpec, data: DataFrame) -> PersistedSamples:
        """Persist the rows of ``data``, and those of the validation of ``trainer``."""
        facts = SessionFacts.of(data, "PlacedSamples.of")
        session = facts.session
        with end_of_session_explained(session):
            trainer = for_gang(trainer)
            check_validation_data(trainer, facts)
            model = prepare(trainer, None)
            ranks = trainer.number_of_replicas or slots_of(session, trainer.resource_profile)
            check_slots_of(session, ranks, trainer.resource_profile)
            slab = SlabConfig.new(facts.settings.slab_dir, facts.application)
            rows = ConnectedRows.of(trainer, data, ranks, model.float_dtype, slab)
            with reading_explained():
                rows.frame.persist()
                try:
                    rows.frame.count()
                except BaseException:
                    rows.frame.unpersist()
                    raise
        return PersistedSamples(
            data=data, rows=rows, _trainer=trainer, float_dtype=model.float_dtype
        )

    @property
    def replicas(self) -> int:
        """M, the number of replicas that the samples are divided among."""
        return self.rows.ranks

    def _release(self) -> None:
        with contextlib.suppress(PySparkException):  # the session was stopped
            self.rows.frame.unpersist()

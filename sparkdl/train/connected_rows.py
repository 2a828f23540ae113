"""The rows of a fit in a session of Spark Connect, and rows that are persisted for several fits."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from sparkdl.data.arrow_tasks import WriteDataFrame
from sparkdl.data.fields import Field
from sparkdl.data.samples import Source, chosen_columns
from sparkdl.data.table_parts import WriteBoth, both_parts
from sparkdl.errors import DataError
from sparkdl.gang.connect import check_slots_of, slots_of
from sparkdl.session import connected_session_of, settings_of
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.failures import end_of_session_explained, reading_explained
from sparkdl.train.connected_checks import check_connected, for_gang
from sparkdl.train.place_samples import source
from sparkdl.train.prepare import prepare
from sparkdl.train.shared_samples import SharedSamples

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


def in_session_of(data: DataFrame, other: Any) -> Any:
    """Return the rows of ``other`` in the session of ``data``: ``foreachBatch`` gives batches of a
    session of their own."""
    if not isinstance(other, DataFrame) or other.sparkSession is data.sparkSession:
        return other
    return type(other)(other._plan, data.sparkSession)  # type: ignore[call-arg, attr-defined]


@dataclass(frozen=True)
class ConnectedRows:
    """The rows of a fit, with a partition for each rank."""

    frame: DataFrame  # of training and validation
    write: WriteBoth
    ranks: int

    @staticmethod
    def of(
        trainer: Trainer, data: DataFrame, ranks: int, float_dtype: str, slab: SlabConfig
    ) -> ConnectedRows:
        """Return the rows of ``data``, and those of the validation of ``trainer``."""
        training: Source = source(trainer, data, ranks, float_dtype, slab)
        chosen, columns = chosen_columns(training)
        write, other = WriteBoth(WriteDataFrame(slab, columns), None), None
        if trainer.validation is not None:
            # where a rank reads the validation rows, it does not know the fields of the training yet
            fields: list[Any] = [
                Field(c.name, c.dtype, ()) if c.spec is None else None for c in columns
            ]
            held = in_session_of(data, trainer.validation.data)
            theirs = replace(training, data=held, fields=tuple(fields))
            try:
                other, columns = chosen_columns(theirs)
            except DataError as error:
                raise DataError(f"validation data: {error}") from None
            write = replace(write, validation=WriteDataFrame(slab, columns))
        return ConnectedRows(both_parts(chosen, other, ranks), write, ranks)

    def into(self, slab: SlabConfig) -> ConnectedRows:
        """Return the same rows for other slabs."""
        other = self.write.validation
        validation = None if other is None else replace(other, config=slab)
        write = WriteBoth(replace(self.write.training, config=slab), validation)
        return replace(self, write=write)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PersistedSamples(SharedSamples):
    """The samples of a trainer in a session of Spark Connect, for several fits.

    Their rows are persisted where the ranks need them: nothing is read or shuffled again, but each
    fit writes them into slabs of its own. See :class:`sparkdl.PlacedSamples`.
    """

    data: DataFrame
    rows: ConnectedRows

    @staticmethod
    def of(trainer: Trainer, data: DataFrame) -> PersistedSamples:
        """Persist the rows of ``data``, and those of the validation of ``trainer``."""
        session = connected_session_of(data, "PlacedSamples.of")
        with end_of_session_explained(session):
            settings = settings_of(None, session)
            trainer = for_gang(trainer)
            model = prepare(trainer, None, check_connected)
            ranks = trainer.replicas or slots_of(session, trainer.resource_profile)
            check_slots_of(session, ranks, trainer.resource_profile)
            slab = SlabConfig.new(settings.slab_dir, f"connect-{session.session_id}")
            rows = ConnectedRows.of(trainer, data, ranks, model.float_dtype, slab)
            with reading_explained():
                rows.frame.persist()
                try:
                    rows.frame.count()
                except BaseException:
                    rows.frame.unpersist()
                    raise
        return PersistedSamples(
            data=data, rows=rows, _trainer=trainer, _float_dtype=model.float_dtype
        )

    @property
    def replicas(self) -> int:
        """M, the number of replicas that the samples are divided among."""
        return self.rows.ranks

    def _release(self) -> None:
        with contextlib.suppress(PySparkException):  # the session was stopped
            self.rows.frame.unpersist()

"""Training and validation samples that are placed once, for one fit or for several."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import RDD, SparkContext
from pyspark.sql import DataFrame, SparkSession

from sparkdl.data.equal_rows import tell_of_shares
from sparkdl.data.sample_set import SampleSet
from sparkdl.engines.resources import FitResources
from sparkdl.gang.slots import SLOT_SECONDS, default_replicas, task_slots
from sparkdl.session import context_of, is_connected, settings_of
from sparkdl.settings import Settings
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.device import within_gpus
from sparkdl.spark.executors import waiting_for_locality, warming_up
from sparkdl.train.connected_rows import PersistedSamples
from sparkdl.train.place_samples import check_partitions, place, place_validation, source
from sparkdl.train.prepare import prepare
from sparkdl.train.shared_samples import SharedSamples

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PlacedSamples(SharedSamples):
    """The training and validation samples of a trainer, written into slabs once for several fits.

    :meth:`of` makes them, and ``Trainer.fit`` takes them in place of the data. The trainers may
    differ in everything but the way in which they read the data: the columns, the number of
    replicas, the floating dtype of the model, and the validation data. Each result has the bits of a
    fit that reads the data by itself. Fits may run in several threads. Use the object as a context
    manager, or close it::

        with sparkdl.PlacedSamples.of(trainer, df) as samples:
            small = trainer.fit(samples)
            large = dataclasses.replace(trainer, model=make_large_model).fit(samples)

    Attributes:
        data: The training data.
        training: The training samples.
        validation: The validation samples, or None.
        slab: The slabs that hold them.
    """

    data: DataFrame | RDD[Any]
    training: SampleSet
    validation: SampleSet | None
    slab: SlabConfig
    _resources: FitResources

    @classmethod
    def of(cls, trainer: Trainer, data: DataFrame | RDD[Any]) -> PlacedSamples | PersistedSamples:
        """Place the samples of ``data``, and those of the validation of ``trainer``.

        In a session of Spark Connect the rows are persisted instead, see
        :class:`sparkdl.train.connected_rows.PersistedSamples`.

        Args:
            trainer: Says how the data is read, and has the validation data.
            data: The training data, as for ``Trainer.fit``.

        Returns:
            The samples, which stay in place until they are closed.

        Raises:
            UserError: The data, the model or a parameter cannot work.
            TrainingError: Spark fails.
        """
        if isinstance(data, DataFrame) and is_connected(data):
            return PersistedSamples.of(trainer, data)
        context = context_of(data)
        settings = settings_of(context, session_of(data))
        with warming_up(context), waiting_for_locality(context), contextlib.ExitStack() as stack:
            model = prepare(trainer, None)
            replicas = replicas_of(trainer, context, settings, trainer.replicas)
            slab = SlabConfig.new(settings.slab_dir, context.applicationId)
            resources = stack.enter_context(FitResources(context, slab, settings.timeout))
            placed = cls.within(resources, trainer, data, replicas, model.float_dtype)
            stack.pop_all()
            resources.keep()
        return placed

    @classmethod
    def within(
        cls,
        resources: FitResources,
        trainer: Trainer,
        data: DataFrame | RDD[Any],
        replicas: int,
        float_dtype: str,
    ) -> PlacedSamples:
        """Place samples that last as long as ``resources``.

        Args:
            resources: The owner of the slabs and the persisted RDDs.
            trainer: The user's trainer.
            data: The training data.
            replicas: M, the number of replicas.
            float_dtype: The dtype of floating-point values.
        """
        training = source(trainer, data, replicas, float_dtype, resources.slab)
        samples = place(trainer, training, resources)
        tell_of_shares(samples.handles)
        validation = place_validation(trainer, training, samples, resources)
        return cls(
            data=data,
            training=samples,
            validation=validation,
            slab=resources.slab,
            _trainer=trainer,
            _float_dtype=float_dtype,
            _resources=resources,
        )

    @property
    def replicas(self) -> int:
        """M, the number of replicas that the samples are divided among."""
        return len(self.training.handles)

    def check(self, trainer: Trainer, float_dtype: str) -> None:
        """See :meth:`sparkdl.train.shared_samples.SharedSamples.check`.

        Raises:
            DataError: The trainer has a gang, whose barrier stage cannot read the samples.
        """
        super().check(trainer, float_dtype)
        if trainer.engine == "gang":
            for samples in (self.training, self.validation):
                if samples is not None and samples.rdd is not None:
                    check_partitions(samples.rdd)

    def _release(self) -> None:
        with self._resources:
            pass


def data_of(data: Any) -> Any:
    """Return the data that samples were made of, if ``data`` are samples in place; else ``data``."""
    return data.data if isinstance(data, SharedSamples) else data


def session_of(data: DataFrame | RDD[Any]) -> SparkSession | None:
    """Return the session whose settings hold for ``data``."""
    return data.sparkSession if isinstance(data, DataFrame) else SparkSession.getActiveSession()


def replicas_of(
    trainer: Trainer, context: SparkContext, settings: Settings, chosen: int | None
) -> int:
    """Return M: as chosen, or as many as the cluster can run at once.

    The time limit of ``settings`` bounds the wait for an executor.
    """
    replicas = chosen
    if replicas is None:
        seconds = min(SLOT_SECONDS, settings.timeout or SLOT_SECONDS)
        if trainer.engine == "gang":  # all ranks run at once
            replicas = task_slots(context, trainer.resource_profile, seconds)
        else:
            replicas = default_replicas(context, seconds)
    if trainer.resource_profile is None:
        replicas = within_gpus(context, replicas, chosen is not None, trainer.engine)
    return replicas

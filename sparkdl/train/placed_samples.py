"""Training and validation samples in place: written into slabs once, for one fit or for several.

Their rows are counted where that decides how they are drawn, or what a class weighs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.data.columns.base import Specs, masked_of
from sparkdl.data.equal_rows import tell_of_shares
from sparkdl.data.fields import ReadOtherwise, adapted_specs
from sparkdl.data.preview import OnHandles, Work
from sparkdl.data.row_errors import columns_with, varying
from sparkdl.data.samples import SampleSet, Source, materialize, materialize_here
from sparkdl.data.sampling import MOST_VALUES, Tallies, Tally, counts_of
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.gang.rank import frames_of
from sparkdl.engines.resources import FitResources
from sparkdl.errors import DataError, ParameterError, SessionError, shown
from sparkdl.gang.driver import is_one_to_one
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.gang.rank_task import RankContext
from sparkdl.gang.slots import SLOT_SECONDS, default_replicas, task_slots
from sparkdl.loop.progress import progress_of
from sparkdl.metrics.named import resolve, suited
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.loss import is_own_loss
from sparkdl.session import SessionFacts, is_connected
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.device import within_gpus
from sparkdl.spark.executors import place_contiguously, waiting_for_locality, warming_up
from sparkdl.spark.failures import reading_explained
from sparkdl.spark.frames import stage_name
from sparkdl.train.engine_inputs import batch_spec
from sparkdl.train.prepare import prepare
from sparkdl.train.spec import TrainerSpec

if TYPE_CHECKING:
    from typing import Self


logger = logging.getLogger("sparkdl")
PERSISTED = "sparkdl.connect.rows:PersistedSamples"
"""The samples of a session of Spark Connect; their room lies above this one."""

MOST_READINGS = 4
"""The number of times that data are read: each further one follows a column that asks for it."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SharedSamples:
    """The base of samples that serve several fits.

    Attributes:
        data: The training data.
    """

    data: Any
    _trainer: TrainerSpec
    float_dtype: str  # of floating-point values
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __repr__(self) -> str:
        columns = ", ".join([*self._trainer.feature_columns, *self._trainer.label_columns])
        return f"<sparkdl.{type(self).__name__}: the columns {columns}>"

    @property
    def replicas(self) -> int:
        """M, the number of replicas that the samples are divided among."""
        raise NotImplementedError

    def _release(self) -> None:
        """Give back what holds the samples."""
        raise NotImplementedError

    def check(self, trainer: TrainerSpec, float_dtype: str) -> None:
        """Raise ParameterError if a fit of ``trainer``, whose model is of ``float_dtype``, cannot use
        the samples: it reads the data otherwise, or they were given back."""
        if self._closed.is_set():
            raise ParameterError(
                "these samples were given back with close(): place them again with "
                "sparkdl.PlacedSamples.of(trainer, data)."
            )
        differences = list(self._differences(trainer, float_dtype))
        if differences:
            raise ParameterError(
                f"the samples were placed for a trainer that reads the data otherwise: "
                f"{'; '.join(differences)}. Make the trainers alike in this, or place the samples for "
                "this one: sparkdl.PlacedSamples.of(trainer, data)."
            )

    def _differences(self, trainer: TrainerSpec, float_dtype: str) -> Iterator[str]:
        mine = self._trainer
        theirs, ours = reading_of(trainer), reading_of(mine)
        for name in (name for name in ours if theirs[name] != ours[name]):
            one, other = getattr(trainer, name), getattr(mine, name)
            yield f"{name}={shown(one)}, placed with {shown(other)}"
        if trainer.replicas not in (None, self.replicas):
            yield f"replicas={trainer.replicas}, placed with {self.replicas}"
        if (trainer.engine == "local") != (mine.engine == "local"):
            yield f'engine="{trainer.engine}", placed with "{mine.engine}"'
        if float_dtype != self.float_dtype:
            yield f"a model of {float_dtype}, placed with {self.float_dtype}"
        scored, placed = trainer.validation, mine.validation
        if scored is not None and (placed is None or scored.data is not placed.data):
            yield "validation has other data" if placed else "validation was not placed"

    def close(self) -> None:
        """Give the samples' memory and files back. A second call does nothing.

        No fit on the samples may be running.
        """
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


READ = ("features", "label", "weight", "columns", "handle_invalid", "sampling")
"""The fields of a trainer that say how the columns of the data are read."""


def reading_of(trainer: TrainerSpec) -> dict[str, Any]:
    """Return what the fields :data:`READ` mean, by name; trainers that read alike have equal ones."""
    sampling = trainer.sampling
    meaning = {
        "features": (trainer.feature_columns, trainer.keywords),
        "label": trainer.label_columns,
        "columns": dict(trainer.columns),
        "sampling": sampling and (sampling.column, sampling.spec),
    }
    return {name: meaning.get(name, getattr(trainer, name)) for name in READ}


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
    def of(cls, trainer: TrainerSpec, data: DataFrame | RDD[Any]) -> SharedSamples:
        """Place the samples of ``data``, and those of the validation of ``trainer``.

        In a session of Spark Connect the rows are persisted instead, see
        :class:`sparkdl.connect.rows.PersistedSamples`.

        Args:
            trainer: Says how the data is read, and has the validation data.
            data: The training data, as for ``Trainer.fit``.

        Returns:
            The samples, which stay in place until they are closed.

        Raises:
            UserError: The data, the model or a parameter cannot work.
            TrainingError: Spark fails.
        """
        if is_connected(data):
            persisted: SharedSamples = resolve_name(PERSISTED).of(trainer, data)
            return persisted
        facts, trainer = SessionFacts.of(data, "PlacedSamples.of"), trainer.settled()
        context, settings = facts.context, facts.settings
        progress = progress_of(settings.progress, "", time.monotonic())
        with (
            contextlib.closing(progress),
            warming_up(context),
            waiting_for_locality(context),
            contextlib.ExitStack() as stack,
        ):
            check_validation_data(trainer, facts)
            progress.doing("building the model")
            model = prepare(trainer, None)
            progress.doing("starting workers")
            replicas = replicas_of(trainer, facts, trainer.number_of_replicas)
            slab = SlabConfig.new(settings.slab_dir, facts.application)
            resources = stack.enter_context(FitResources(context, slab, settings.timeout))
            progress.doing("reading rows", resources.rows_read)
            placed = cls.within(resources, trainer, data, replicas, model.float_dtype)
            stack.pop_all()
            resources.keep()
        return placed

    @classmethod
    def within(
        cls,
        resources: FitResources,
        trainer: TrainerSpec,
        data: DataFrame | RDD[Any],
        replicas: int,
        float_dtype: str,
    ) -> PlacedSamples:
        """Place samples of floating-point values of ``float_dtype`` that last as long as
        ``resources``."""
        training = source(trainer, data, replicas, float_dtype, resources.slab)
        for reading in itertools.count(1):
            try:
                samples = place(trainer, training, resources)
                validation = place_validation(trainer, training, samples, resources)
                break
            except ReadOtherwise as otherwise:
                training = replace(
                    training, columns=read_again(training.columns, otherwise, reading)
                )
        tell_of_shares(samples.handles)
        return cls(
            data=data,
            training=samples,
            validation=validation,
            slab=resources.slab,
            _trainer=trainer,
            float_dtype=float_dtype,
            _resources=resources,
        )

    @property
    def replicas(self) -> int:
        """M, the number of replicas that the samples are divided among."""
        return len(self.training.handles)

    def check(self, trainer: TrainerSpec, float_dtype: str) -> None:
        """See :meth:`SharedSamples.check`. Raise DataError if a gang's barrier stage cannot read the
        samples."""
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


def read_again(columns: Specs, otherwise: ReadOtherwise, reading: int) -> Specs:
    """Return the specifications by which all rows can be read, and tell of them.

    Raises the error after the last ``reading``: its column type asks for another form each time.
    """
    if reading == MOST_READINGS:
        raise otherwise
    for name, spec in otherwise.specs.items():
        text = "the data is read again, with %s: give that to read it once."
        logger.warning(text, columns_with(name, spec))
    return {**columns, **otherwise.specs}


Spec = TypeVar("Spec", bound=TrainerSpec)


def as_read(trainer: Spec, samples: SampleSet, validation: SampleSet | None = None) -> Spec:
    """Return the trainer with the specifications by which its samples were read."""
    theirs = {} if validation is None else adapted_specs(validation.handles)
    columns = {**trainer.columns, **theirs, **samples.columns}
    if columns == dict(trainer.columns):
        return trainer
    features = trainer.feature_columns
    changed = [n for n in features if columns.get(n) != trainer.columns.get(n)]
    if changed and trainer.augment:
        raise ParameterError(
            f"the samples were placed with {columns_with(changed[0], columns[changed[0]])}, which the "
            "rows asked for, and augment= of this trainer would get rows of that form: place the "
            "samples for this trainer."
        )
    return replace(trainer, columns=columns)


def check_validation_data(trainer: TrainerSpec, facts: SessionFacts) -> None:
    """Raise an error if the validation data cannot be read beside the training data."""
    if trainer.validation is not None:
        try:
            facts.check_beside(trainer.validation.data)
        except (DataError, SessionError) as error:
            raise type(error)(f"validation data: {error}") from None


def replicas_of(trainer: TrainerSpec, facts: SessionFacts, chosen: int | None) -> int:
    """Return M: as chosen, or as many as the cluster can run at once.

    The time limit of the settings bounds the wait for an executor.
    """
    context, timeout = facts.context, facts.settings.timeout
    replicas = chosen
    if replicas is None:
        seconds = min(SLOT_SECONDS, timeout or SLOT_SECONDS)
        if trainer.engine == "gang":  # all ranks run at once
            replicas = task_slots(context, trainer.resource_profile, seconds)
        else:
            replicas = default_replicas(context, seconds)
    if trainer.resource_profile is None:
        replicas = within_gpus(context, replicas, chosen is not None, trainer.engine)
    return replicas


def source(
    trainer: TrainerSpec,
    data: DataFrame | RDD[Any],
    replicas: int,
    float_dtype: str,
    slab: SlabConfig,
) -> Source:
    """Return the description of the training data from which samples are made."""
    return Source(
        data,
        trainer.feature_columns,
        trainer.label_columns,
        replicas,
        float_dtype,
        slab,
        columns=trainer.columns,
        weight=trainer.weight,
        inputs=trainer.keywords,
        handle_invalid=trainer.handle_invalid,
        key=trainer.key,
        sampling=trainer.sampling,
        adapts=tuple(_adapting(trainer)),
    )


def _adapting(trainer: TrainerSpec) -> Iterator[str]:
    """Yield the kinds of columns that values may ask to read otherwise; see ``Source.adapts``.

    Not those whose form ``augment`` or a strategy depends on, and where rows that do not fit are
    skipped, no others than vectors, all of which can be read.
    """
    one_length = any(part.shares_samples for part in trainer.parts.values())
    if not (trainer.augment or trainer.bucketing or one_length):
        yield "vector"
    if trainer.handle_invalid == "error":
        yield "label"
        if not trainer.augment:
            yield "feature"


def place(trainer: TrainerSpec, source: Source, resources: FitResources) -> SampleSet:
    """Write samples into slabs, on the executors or, for the local engine, in this process."""
    with reading_explained():
        if trainer.engine == "local":
            return materialize_here(source)

        def persist(rdd: RDD) -> RDD:
            if trainer.engine == "gang":
                check_partitions(rdd)
            return resources.persist(place_contiguously(rdd))

        return materialize(source, persist)


def check_partitions(rdd: RDD) -> None:
    """Check that the ranks of a gang can get the partitions of the samples."""
    if not is_one_to_one(rdd):
        raise DataError(
            "coalesce(), union() or the like made these partitions of others, and over such Spark runs "
            "no barrier stage, which a gang needs: divide the rows anew with "
            f"repartition({rdd.getNumPartitions()})."
        )


def place_validation(
    trainer: TrainerSpec, training: Source, samples: SampleSet, resources: FitResources
) -> SampleSet | None:
    """Write the validation samples into slabs beside the training samples."""
    validation = trainer.validation
    if validation is None:
        return None
    try:
        theirs = replace(
            training,
            data=validation.data,
            fields=samples.model_fields,
            sampling=None,
            columns=samples.columns,
        )
        placed = place(trainer, theirs, resources)
    except ReadOtherwise:
        raise
    except DataError as error:
        raise DataError(f"validation data: {error}") from None
    check_validation(samples, placed)
    return placed


def check_validation(samples: SampleSet, validation: SampleSet) -> None:
    """Check that the validation samples are like those of the training."""
    inputs, here = samples.num_features, validation.num_features
    labels, ours = len(samples.model_fields) - inputs, len(validation.fields) - here
    if (here, ours) != (inputs, labels):
        raise DataError(
            f"validation data: a sample has {here} inputs and {ours} labels, in the training data "
            f"{inputs} and {labels}."
        )
    for one, other in zip(validation.fields, samples.model_fields, strict=True):
        alike = replace(one, name=other.name)  # fields of an RDD have names of their own
        if np.dtype(one.dtype).kind == np.dtype(other.dtype).kind == "i":  # int64 in a mini-batch
            alike = replace(alike, dtype=other.dtype)
        if alike != other:
            lists = len(one.shape) == len(other.shape) and one.shape[1:] == other.shape[1:]
            remedy = "give both alike."
            if lists and replace(one, shape=other.shape) == other:
                remedy = varying(other.name, remedy)
            text = f'validation data: "{one.name}" is {one}, in the training data {other}: {remedy}'
            specs = adapted_specs([*samples.handles, *validation.handles])
            if other.name in specs:
                raise ReadOtherwise.of(text, other.name, specs[other.name])
            raise DataError(text)


def validation_set(
    trainer: TrainerSpec, samples: SampleSet | None, float_dtype: str
) -> ValidationSet | None:
    """Return the placed validation samples with the trainer's scorer."""
    validation = trainer.validation
    if validation is None or samples is None:
        return None
    loss = copy.deepcopy(trainer.objective)  # the loss may count its calls
    part = trainer.output if validation.output is None else validation.output
    metrics = suited(resolve(validation.metrics), loss)
    loss_part = None if is_own_loss(loss) else trainer.output
    labels, masked = trainer.label_columns, masked_of(trainer.columns)
    scorer = Scorer(loss, metrics, None, part, loss_part, labels, masked)
    how = batch_spec(trainer, samples, float_dtype)
    return ValidationSet(samples, scorer, how, validation.batch_size)


def with_draws(
    trainer: TrainerSpec, samples: SampleSet, gang: StartableGroup | None = None
) -> SampleSet:
    """Return the samples with the draws of an epoch, if the trainer asks for any.

    Where there is no driver, the samples lie with the ranks of ``gang``.
    """
    how, field = trainer.sampling, samples.num_features + samples.num_labels
    if how is None:
        return samples
    return replace(samples, draws=how.draws(field, _tallies(how.tally(field), samples, gang)))


def balanced_weights(samples: SampleSet, gang: StartableGroup | None = None) -> tuple[float, ...]:
    """Return weights with which all classes of the first label together count the same.

    They are rows / (classes * rows of the class), as in scikit-learn; a class without rows counts 1.
    """
    number = samples.num_features
    label = samples.fields[number] if samples.num_labels else None
    if label is None or label.shape or label.ragged or np.dtype(label.dtype).kind not in "iub":
        what = "there is no label" if label is None else f'"{label.name}" is {label}'
        raise DataError(
            f'class_weights="balanced" needs a label of class numbers, and {what}: cast it to int, '
            "or number the classes with pyspark.ml.feature.StringIndexer."
        )
    classes, counts = counts_of(_tallies(Tally(number), samples, gang))
    totals = counts.sum(axis=0)[classes >= 0]  # a negative number is none that a loss looks at
    classes = classes[classes >= 0].astype(np.int64)
    if not len(classes) or len(classes) > MOST_VALUES or classes[-1] > 1 << 20:
        raise DataError(
            f'class_weights="balanced": "{label.name}" has no class numbers that can be counted: they '
            f"begin at 0, and there are at most {MOST_VALUES:,}."
        )
    table = np.ones(int(classes[-1]) + 1)
    table[classes] = totals.sum() / (len(classes) * totals)
    return tuple(table.tolist())


def _tallies(tally: Tally, samples: SampleSet, gang: StartableGroup | None) -> Tallies:
    """Return the tally of each partition, wherever it lies."""
    if samples.rdd is not None:
        with stage_name(samples.rdd.ctx, "count rows to draw or to weigh"):
            return samples.rdd.ctx.runJob(samples.rdd, OnHandles(tally.read))
    if gang is not None:
        return gang.call(OnPart(tally.read), "counting rows to draw or to weigh")
    return [tally.read(partition, handle) for partition, handle in enumerate(samples.handles)]


@dataclass(frozen=True)
class OnPart:
    """The command that does work for a rank's samples: of the training (0) or the validation (1)."""

    work: Work
    part: int = 0

    def __call__(self, member: RankContext) -> Any:
        return self.work(member.rank, pickle.loads(frames_of(member.frames)[self.part]))

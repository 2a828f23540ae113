"""Placement of the training and validation samples in the slabs of a run."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.data.fields import Field
from sparkdl.data.sample_set import SampleSet
from sparkdl.data.samples import Source, materialize, materialize_here
from sparkdl.engines.delivery import ValidationSet
from sparkdl.engines.resources import FitResources
from sparkdl.errors import DataError
from sparkdl.gang.driver import is_one_to_one
from sparkdl.metrics.named import resolve, suited
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.loss import is_own_loss
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.executors import place_contiguously
from sparkdl.spark.failures import reading_explained
from sparkdl.train.engine_inputs import batch_spec

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


def source(
    trainer: Trainer,
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
    )


def place(trainer: Trainer, source: Source, resources: FitResources) -> SampleSet:
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
    trainer: Trainer, training: Source, samples: SampleSet, resources: FitResources
) -> SampleSet | None:
    """Write the validation samples into slabs beside the training samples."""
    validation = trainer.validation
    if validation is None:
        return None
    try:
        mine = replace(training, data=validation.data, fields=samples.fields)
        found = place(trainer, mine, resources)
    except DataError as error:
        raise DataError(f"validation data: {error}") from None
    check_validation(samples, found)
    return found


def check_validation(samples: SampleSet, found: SampleSet) -> None:
    """Check that the validation samples are like those of the training."""
    inputs, here = samples.num_features, found.num_features
    if (here, len(found.fields)) != (inputs, len(samples.fields)):
        raise DataError(
            f"validation data: a sample has {here} inputs and {len(found.fields) - here} labels, in "
            f"the training data {inputs} and {len(samples.fields) - inputs}."
        )
    for one, other in zip(found.fields, samples.fields, strict=True):
        alike = replace(one, name=other.name)  # fields of an RDD have names of their own
        if _whole(one) and _whole(other):
            alike = replace(alike, dtype=other.dtype)
        if alike != other:
            raise DataError(
                f'validation data: "{one.name}" is {one}, in the training data {other}.'
                f"{_remedy(one, other)}"
            )


def validation_set(
    trainer: Trainer, samples: SampleSet | None, float_dtype: str
) -> ValidationSet | None:
    """Return the placed validation samples with the trainer's scorer."""
    validation = trainer.validation
    if validation is None or samples is None:
        return None
    loss = copy.deepcopy(trainer.objective)  # the loss may count its calls
    part = trainer.output if validation.output is None else validation.output
    metrics = suited(resolve(validation.metrics), loss)
    loss_part = None if is_own_loss(loss) else trainer.output
    scorer = Scorer(loss, metrics, part=part, loss_part=loss_part, labels=trainer.label_columns)
    how = batch_spec(trainer, samples, float_dtype)
    return ValidationSet(samples, scorer, how, validation.batch_size)


def _remedy(one: Field, other: Field) -> str:
    """Return the remedy if two kinds of rows differ only in their length."""
    arrays = one.shape and other.shape and not one.ragged and not other.ragged
    if (
        arrays
        and replace(other, shape=one.shape, name=one.name) == one
        and one.shape[1:] == other.shape[1:]
    ):
        return (
            " If rows vary in length, declare the column as a sequence, for both: "
            f'Trainer(columns={{"{other.name}": sparkdl.Sequence()}}).'
        )
    return ""


def _whole(field: Field) -> bool:
    """Return whether the field holds integers, which become int64 in a mini-batch."""
    return np.dtype(field.dtype).kind == "i"

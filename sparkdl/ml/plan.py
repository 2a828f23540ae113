"""The plan of a fit: the trainer that an estimator's Params stand for, and the rows that it reads."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, NumericType, StructType
from torch import nn

from sparkdl.data.columns.base import masked_of, names_read
from sparkdl.data.fields import NO_ROWS, Field
from sparkdl.data.schema import quoted
from sparkdl.errors import DataError, ModelError, ParameterError, kind_of
from sparkdl.infer.outputs import Output
from sparkdl.loop.triggers import max_epoch
from sparkdl.loop.validation import Validation
from sparkdl.metrics.classes import Judging
from sparkdl.ml.params import FIELD_OF_PARAM, TrainingParams
from sparkdl.model.loss import unwrapped
from sparkdl.model.recipe import optimizer_class
from sparkdl.train.placed_samples import reading_of
from sparkdl.train.prepare import prepare
from sparkdl.train.trainer import Trainer


def column(name: str) -> Column:
    """Return the column of this name, whatever characters it has."""
    return functions.col(quoted(name))


def are_valid(schema: StructType, names: Sequence[str]) -> Column:
    """Return a condition: no column (that is there) holds null, NaN or an infinite number."""
    there = [name for name in names if name in schema.names]
    conditions = [_is_valid(column(name), schema[name].dataType) for name in there]
    return functools.reduce(lambda one, other: one & other, conditions, functions.lit(True))


def _is_valid(value: Column, kind: DataType) -> Column:
    there = value.isNotNull()
    if isinstance(kind, (FloatType, DoubleType)):
        return there & ~functions.isnan(value) & (functions.abs(value) != float("inf"))
    if isinstance(kind, VectorUDT):
        value, kind = vector_to_array(value), ArrayType(DoubleType())
    if isinstance(kind, ArrayType):
        inner = kind.elementType
        every = functions.forall(value, lambda one: _is_valid(one, inner))
        return there & functions.coalesce(every, functions.lit(False))
    return there


def zeros(name: str, kind: DataType, field: Field) -> Column:
    """Return a valid value for a row whose own is not: zeros of the shape that the model takes."""
    lists = field.rules if field.item_shape == field.shape else []
    shape = [*(1 for _ in lists), *field.item_shape]
    inner = kind
    while isinstance(inner, ArrayType):
        inner = inner.elementType
    if isinstance(kind, VectorUDT):
        return array_to_vector(functions.array_repeat(functions.lit(0.0), shape[0]))
    if not isinstance(inner, NumericType):
        raise ParameterError(
            f'handleInvalid="keep" goes with numbers, arrays and vectors, and "{name}" is of type '
            f'{kind.simpleString()}: use "skip" or "error".'
        )
    value = functions.lit(0)
    for length in reversed(shape):
        value = functions.array_repeat(value, length)
    return value.cast(kind)


def as_classes(data: DataFrame, name: str, weights: bool) -> DataFrame:
    """Return ``data`` with a label column of numbers as the loss of a classifier takes it.

    StringIndexer makes class numbers of type double, and torch's losses of classes take integers;
    with ``weights`` the loss takes floats, as BCEWithLogitsLoss does.
    """
    kind = data.schema[name].dataType if name in data.schema.names else None
    if not isinstance(kind, NumericType) and (kind is None or kind.typeName() != "boolean"):
        return data  # the fit says what is wrong with it
    label = column(name)
    if weights:
        return data.withColumn(name, label.cast("double"))
    if kind.typeName() in ("float", "double") or kind.typeName().startswith("decimal"):
        text = functions.concat(
            functions.lit(f'label column "{name}" holds '),
            label.cast("string"),
            functions.lit(
                ", and class numbers are whole, from 0 on: make them with StringIndexer, or use "
                "TorchRegressor for numbers."
            ),
        )
        wrong = label.isNotNull() & (label % 1 != 0)  # floor would overflow at infinity
        whole = functions.when(wrong, mistake(text).cast("bigint"))
        return data.withColumn(name, whole.otherwise(label.cast("bigint")))
    return data.withColumn(name, label.cast("bigint"))


def mistake(text: Column) -> Column:
    """Return a column that fails the job with a :class:`sparkdl.DataError` of this text."""
    return functions.raise_error(
        functions.concat(functions.lit("sparkdl.errors.DataError: "), text)
    )


def class_metadata(name: str, labels: Sequence[str], count: int) -> dict[str, Any]:
    """Return the metadata of a column of class numbers, whose names IndexToString takes."""
    values = {"vals": list(labels)} if labels else {"num_vals": count}
    return {"ml_attr": {"type": "nominal", "name": name, **values}}


def class_count(output: Output | None) -> int:
    """Return the number of classes of a classifier with this output."""
    if output is None or len(output.shape) > 1:
        found = "not a single tensor" if output is None else f"of shape {['rows', *output.shape]}"
        raise ModelError(
            f"the output of the model is {found}: a classifier's has one number for each class, or one "
            "for two classes. Say with trainerArgs output= which part it is, or use TorchEstimator."
        )
    return 2 if output.shape in ((), (1,)) else output.shape[0]


def part_of_scores(scores: Column, first: int, count: int) -> Column:
    """Return values of a result of ``ClassScores`` as a vector; ``first`` counts from 0."""
    return array_to_vector(functions.slice(scores, first + 1, count))


def nothing_like(kind: DataType, width: int) -> Column:
    """Return NaN as a prediction of this type."""
    nan = functions.lit(float("nan"))
    if kind.typeName() == "double":
        return nan
    if isinstance(kind, ArrayType):
        return functions.lit(None).cast(kind)
    return array_to_vector(functions.array_repeat(nan, width))


NUMBERS, CLASSES = "numbers", "classes"
"""The kinds of labels: as they are (numbers are made floating-point), or class numbers."""


@dataclass(frozen=True, eq=False)
class FitPlan:
    """The trainer of a fit, without its validation data, and how the rows are chosen."""

    trainer: Trainer
    validation: Validation | Mapping[str, Any] | None  # or its arguments without the data
    indicator: str | None  # the column that says which rows to validate with
    filters: bool  # rows with invalid values are left out
    labels: str | None  # NUMBERS or CLASSES; None leaves them alone

    @staticmethod
    def of(estimator: TrainingParams, metrics: tuple[str, ...], labels: str | None) -> FitPlan:
        """Make the plan of an estimator; ``metrics`` judge if it names none."""
        kind = type(estimator).__name__
        fields = estimator.getTrainerArgs()
        validation = fields.pop("validation", None)
        if fields.get("step") is not None:
            fields.setdefault("loss", None)  # in place of the default loss
        for param, name in FIELD_OF_PARAM.items():
            chosen = estimator.isSet(param) or name not in fields
            if chosen and estimator.isDefined(param):
                fields[name] = estimator.getOrDefault(param)
        fields["weight"] = fields.get("weight") or None  # pyspark.ml says "" for none
        for needed, example in (("model", "model=make_model"), ("loss", "loss=nn.L1Loss()")):
            if needed not in fields:
                raise ParameterError(f"{kind} has no {needed}: give {kind}({example}, ...).")
        fields["optimizer"] = _optimizer(estimator, fields["optimizer"])
        if estimator.isSet("maxEpochs") or "stop" not in fields:
            limit = max_epoch(estimator.getMaxEpochs())
            fields["stop"] = limit | fields["stop"] if "stop" in fields else limit
        indicated = estimator.isSet("validationIndicatorCol")
        indicator = estimator.getValidationIndicatorCol() or None if indicated else None
        if not isinstance(validation, (Validation, Mapping, type(None))):
            raise ParameterError(
                f"trainerArgs: validation is {kind_of(validation)}: give a sparkdl.Validation, or, "
                "with validationIndicatorCol, a dict of its arguments."
            )
        if indicator is not None and isinstance(validation, Validation):
            raise ParameterError(
                f'validationIndicatorCol="{indicator}" and validation= in trainerArgs both name rows '
                "to validate with: leave one of them out, or give validation= as a dict without data."
            )
        if indicator is None and isinstance(validation, Mapping):
            raise ParameterError(
                "trainerArgs: validation= has no data: set validationIndicatorCol, or give a "
                "sparkdl.Validation(data, ...)."
            )
        if indicator is not None:
            assert not isinstance(validation, Validation)
            validation = {"metrics": metrics, **(validation or {})}
        filters = estimator.getOrDefault("handleInvalid") != "error"
        return FitPlan(Trainer(**fields), validation, indicator, filters, labels)

    def same_reading(self, other: FitPlan) -> bool:
        """Return whether both fits can use the samples that are placed for one of them."""
        same_model = self.trainer.model is other.trainer.model
        return self._reading == other._reading and (
            same_model or self.float_dtype == other.float_dtype
        )

    @property
    def _reading(self) -> tuple[Any, ...]:
        """All that decides how the data is read, except for the model's floating dtype."""
        trainer = self.trainer
        return (
            *(reading_of(trainer), trainer.replicas, trainer.engine == "local"),
            *(self.indicator, self.filters, self.labels, self._takes_floats, self._own_data),
        )

    @functools.cached_property
    def float_dtype(self) -> str:
        """The floating dtype of the model, which is built for it."""
        return prepare(self.trainer, None).float_dtype

    @property
    def _own_data(self) -> int | None:
        """The identity of the validation data that was given."""
        given = self.validation
        return id(given.data) if isinstance(given, Validation) else None

    @property
    def _takes_floats(self) -> bool:
        """The loss of a classifier takes floating-point labels: it has one output for two classes."""
        if self.trainer.loss is None:  # a step computes it
            return False
        function, _ = unwrapped(self.trainer.loss)
        logits = isinstance(function, nn.BCEWithLogitsLoss)
        logits = logits or function is nn.functional.binary_cross_entropy_with_logits
        return logits or Judging.of(self.trainer.loss).threshold != 0.0

    def rows(self, data: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        """Return the rows to train on and those to validate with, their columns as a fit needs."""
        if not isinstance(data, DataFrame):
            return data, None  # the fit says what is wrong
        training, validation = self._chosen(data), None
        if self.indicator is not None:
            held_out = self._indicator(data)
            validation = self._prepared(training.where(held_out))
            training = training.where(~held_out)
        elif isinstance(self.validation, Validation) and isinstance(
            self.validation.data, DataFrame
        ):
            validation = self._prepared(self._chosen(self.validation.data))
        return self._prepared(training), validation

    def trainer_with(self, validation_rows: DataFrame | None) -> Trainer:
        """Return the trainer with its validation, on what :meth:`rows` returned for it."""
        given = self.validation
        if isinstance(given, Validation):
            data = given.data if validation_rows is None else validation_rows
            return replace(self.trainer, validation=replace(given, data=data))
        if validation_rows is None:
            return self.trainer
        try:
            validation = Validation(validation_rows, **(given or {}))
        except TypeError as error:
            raise ParameterError(
                f"trainerArgs: validation={dict(given or {})!r}: {error}."
            ) from None
        return replace(self.trainer, validation=validation)

    @contextlib.contextmanager
    def explaining_no_rows(self) -> Iterator[None]:
        """Name the column that chose the rows where none is left to train on or validate with."""
        try:
            yield
        except DataError as error:
            if self.indicator is None or not str(error).endswith(NO_ROWS):
                raise
            raise DataError(
                f'{error} validationIndicatorCol="{self.indicator}" must be false in some rows, to '
                "train on, and true in others."
            ) from None

    def label_names(self, data: DataFrame) -> tuple[str, ...]:
        """Return the names of the classes, if the label column has some."""
        labels = self.trainer.label_columns
        if len(labels) != 1 or labels[0] not in data.columns:
            return ()
        attributes = data.schema[labels[0]].metadata.get("ml_attr", {})
        return tuple(str(value) for value in attributes.get("vals", ()))

    def _indicator(self, data: DataFrame) -> Column:
        name = self.indicator
        assert name is not None
        kind = data.schema[name].dataType.simpleString() if name in data.schema.names else None
        if kind != "boolean":
            found = "is missing" if kind is None else f"is of type {kind}"
            raise ParameterError(
                f'validationIndicatorCol="{name}" {found}: give a boolean column, true for the rows '
                "to validate with."
            )
        text = f'column "{name}", which says which rows to validate with, is null in a row: set it'
        remedy = ', or give handleInvalid="skip".'
        return functions.coalesce(
            column(name), mistake(functions.lit(text + remedy)).cast("boolean")
        )

    def _chosen(self, data: DataFrame) -> DataFrame:
        if not self.filters:
            return data
        trainer = self.trainer
        features_and_labels = (*trainer.feature_columns, *trainer.label_columns)
        names = names_read(features_and_labels, trainer.columns)
        drawn = None if trainer.sampling is None else trainer.sampling.column
        names += [name for name in (trainer.weight, self.indicator, drawn) if name is not None]
        missing = masked_of(trainer.columns)
        return data.where(are_valid(data.schema, [name for name in names if name not in missing]))

    def _prepared(self, data: DataFrame) -> DataFrame:
        """Convert the label."""
        labels = self.trainer.label_columns
        if self.labels is None or len(labels) != 1:
            return data
        return as_classes(data, labels[0], self.labels == NUMBERS or self._takes_floats)


def _optimizer(estimator: TrainingParams, optimizer: Any) -> Any:
    """Return the optimizer with the learning rate that is set. Raises ParameterError."""
    if not estimator.isSet("learningRate"):
        return optimizer
    rate = estimator.getLearningRate()
    if optimizer_class(optimizer) is None:
        raise ParameterError(
            f"learningRate={rate} goes with a torch.optim class or a partial of one, and optimizer is "
            f"{kind_of(optimizer)}: set the learning rate in it."
        )
    return functools.partial(optimizer, lr=rate)

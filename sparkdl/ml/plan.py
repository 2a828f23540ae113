"""The plan of a fit: the trainer that an estimator's Params stand for, and the rows that it reads."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from torch import nn

from sparkdl.data.columns.base import masked_of, names_read
from sparkdl.data.fields import NO_ROWS
from sparkdl.errors import DataError, ParameterError, kind_of
from sparkdl.loop.triggers import max_epoch
from sparkdl.loop.validation import Validation
from sparkdl.metrics.classes import Judging
from sparkdl.ml.params import FIELD_OF_PARAM, TrainingParams
from sparkdl.ml.rows import are_valid, as_classes, column, label_names, mistake
from sparkdl.model.loss import unwrapped
from sparkdl.model.recipe import optimizer_class
from sparkdl.train.prepare import prepare
from sparkdl.train.trainer import Trainer

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
        ours, theirs = self.trainer, other.trainer
        alike = all(
            getattr(ours, name) == getattr(theirs, name)
            for name in (
                "feature_columns",
                "keywords",
                "label_columns",
                "weight",
                "sampling",
                "replicas",
            )
        )
        if not alike or dict(ours.columns) != dict(theirs.columns):
            return False
        if (ours.engine == "local") != (theirs.engine == "local"):
            return False
        how = (self.indicator, self.filters, self.labels, self._takes_floats, self._own_data)
        if how != (
            other.indicator, other.filters, other.labels, other._takes_floats, other._own_data
        ):  # fmt: skip
            return False
        return ours.model is theirs.model or self.float_dtype == other.float_dtype

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
        return label_names(data.schema, labels[0]) if len(labels) == 1 else ()

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
        return sql.coalesce(column(name), mistake(sql.lit(text + remedy)).cast("boolean"))

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

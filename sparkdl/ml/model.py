"""The model that a TorchEstimator fits: a transformer around a trained module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import Column, DataFrame, functions
from torch import nn

from sparkdl.data.arrow_tasks import check_new_columns
from sparkdl.data.columns.base import names_read
from sparkdl.errors import ParameterError
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import as_numbers
from sparkdl.loop.history import History
from sparkdl.ml.params import FitParams
from sparkdl.ml.persistence import ModelReader, ModelWriter
from sparkdl.ml.plan import are_valid, column, nothing_like, zeros


@dataclass(frozen=True)
class TorchTrainingSummary:
    """The curves of a training. It is saved with the model.

    Attributes:
        history: The whole history: every iteration, validation and timing.
    """

    history: History

    @property
    def objectiveHistory(self) -> list[float]:
        """The loss of each iteration."""
        return self.history.losses

    @property
    def epochLosses(self) -> list[float]:
        """The mean loss of each epoch."""
        return [float(epoch["loss"]) for epoch in self.history.epochs()]

    @property
    def validationMetrics(self) -> dict[str, list[float]]:
        """The value of each metric at each validation, by the name of the metric."""
        found: dict[str, list[float]] = {}
        for validation in self.history.validations:
            for name, value in validation["metrics"].items():
                found.setdefault(name, []).append(value)
        return found

    @property
    def totalIterations(self) -> int:
        """The number of iterations."""
        return len(self.history)

    def __repr__(self) -> str:
        return f"<TorchTrainingSummary: {self.history.summary()}>"

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return self.history._repr_html_()


class TorchModel(Model, FitParams, MLReadable["TorchModel"], MLWritable):
    """A trained module as a stage of a ``PipelineModel``.

    The prediction is a double if the module's output is one number for a row, and a vector if it is
    several; an output of more dimensions stays nested arrays.
    """

    def __init__(self, trained: TrainedModel | None = None, labels: Sequence[str] = ()) -> None:
        """Create a model; ``TorchEstimator.fit`` and ``load`` do so.

        Args:
            trained: The trained model.
            labels: The names of the classes, if it is a classifier whose label column had some.
        """
        super().__init__()
        self._trained, self._labels = trained, tuple(labels)

    @property
    def trained(self) -> TrainedModel:
        """The :class:`sparkdl.TrainedModel`, with ``save``, ``evaluate`` and ``module``."""
        if self._trained is None:
            raise ParameterError(
                f"this {type(self).__name__} was not trained: get one from fit(df) of an estimator, or "
                f"from {type(self).__name__}.load(path)."
            )
        return self._trained

    @property
    def module(self) -> nn.Module:
        """The trained module, a plain ``torch.nn.Module``."""
        return self.trained.module

    @property
    def summary(self) -> TorchTrainingSummary:
        """The curves of the training; a loaded model has them too."""
        return TorchTrainingSummary(self.trained.history)

    @property
    def hasSummary(self) -> bool:
        """Return True: a trained model always has a summary."""
        return True

    @property
    def numFeatures(self) -> int:
        """The number of values of the features of a row, over all feature columns."""
        fields = self.trained.fields[: self.trained.num_features]
        return sum(int(torch.Size(field.item_shape).numel()) for field in fields)

    def write(self) -> MLWriter:
        """Return the writer, which puts metadata and weights into a folder of any file system."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader."""
        return ModelReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        trained, names = self._renamed(), self._outputs()
        check_new_columns(dataset, names, " for the output", f"{type(self).__name__}: ")
        scores, valid = f"{self.uid}_output", f"{self.uid}_valid"
        how = self.getOrDefault(self.handleInvalid)
        rows = dataset
        if how == "skip":
            rows = rows.where(are_valid(dataset.schema, self._read()))
        if how == "keep":
            rows = self._with_zeros(rows, trained, valid)
        rows = trained.transform(rows, prediction_col=scores, postprocess=self._postprocess())
        columns = self._columns(rows, scores)
        if how == "keep":
            kinds = rows.select(columns).schema
            width = self._width()
            columns = [
                functions.when(column(valid), value)
                .otherwise(nothing_like(kind.dataType, width))
                .alias(kind.name)
                for kind, value in zip(kinds, columns, strict=True)
            ]
            rows = self._with_own(rows, trained, valid)
        beside = [scores, valid, *(f"{valid}_{name}" for name in trained.features)]
        rows = rows.select("*", *columns).drop(*beside)
        for name, metadata in self._metadata().items():
            rows = rows.withMetadata(name, metadata)
        return rows

    # What a subclass has of its own.

    def _outputs(self) -> list[str]:
        """Return the names of the output columns; an empty name leaves a column out."""
        return [name for name in [self.getPredictionCol()] if name]

    def _postprocess(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return what is applied to each batch of outputs."""
        return None

    def _columns(self, rows: DataFrame, scores: str) -> list[Column]:
        """Return the output columns, in the order of :meth:`_outputs`."""
        output = self.trained.output
        one = output is not None and output.shape == (1,)
        kind = rows.schema[scores].dataType
        return [as_numbers(column(scores), kind, one).alias(name) for name in self._outputs()]

    def _width(self) -> int:
        """Return the number of values of the output vectors."""
        output = self.trained.output
        return output.shape[0] if output is not None and output.shape else 1

    def _metadata(self) -> dict[str, dict[str, Any]]:
        """Return the metadata of output columns by name."""
        return {}

    # handleInvalid="keep": rows with invalid values pass the module as zeros.

    def _with_zeros(self, rows: DataFrame, trained: TrainedModel, valid: str) -> DataFrame:
        """Put zeros in place of invalid values; the original columns are kept beside."""
        rows = rows.withColumn(valid, are_valid(rows.schema, self._read()))
        for name, field in zip(trained.features, trained.fields, strict=False):
            if name in rows.columns:  # else transform says that it is missing
                value = column(name)
                filler = zeros(name, rows.schema[name].dataType, field)
                rows = rows.withColumn(f"{valid}_{name}", value)
                rows = rows.withColumn(name, functions.when(column(valid), value).otherwise(filler))
        return rows

    def _with_own(self, rows: DataFrame, trained: TrainedModel, valid: str) -> DataFrame:
        """Put the original columns back."""
        for name in trained.features:
            rows = rows.withColumn(name, column(f"{valid}_{name}"))
        return rows

    def _read(self) -> list[str]:
        """Return the columns that the model reads."""
        trained = self._renamed()
        return names_read(trained.features, trained.columns)

    def _renamed(self) -> TrainedModel:
        """Return the trained model, reading ``featuresCol`` if that was changed."""
        trained = self.trained
        name = self.getFeaturesCol()
        if not self.isSet(self.featuresCol) or trained.features == (name,):
            return trained
        if len(trained.features) != 1:
            return trained  # several columns, which trainerArgs named
        renamed = copy.copy(trained)
        renamed.features = (name,)
        (old,) = trained.features
        renamed.columns = {name if n == old else n: one for n, one in trained.columns.items()}
        renamed.fields = (dataclasses.replace(trained.fields[0], name=name), *trained.fields[1:])
        return renamed

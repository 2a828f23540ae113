"""The classifier and its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pyspark import keyword_only
from pyspark.sql import Column, DataFrame
from torch import nn

from sparkdl.errors import ParameterError, known_arguments
from sparkdl.infer.outputs import ClassScores
from sparkdl.ml.estimator import TorchEstimator
from sparkdl.ml.model import TorchModel
from sparkdl.ml.params import ClassParams, arguments_of
from sparkdl.ml.plan import CLASSES, class_count, class_metadata, column, part_of_scores
from sparkdl.train.trainer import Trainer


class TorchClassificationModel(TorchModel, ClassParams):
    """A trained classifier as a stage of a ``PipelineModel``.

    The module's output is ``rawPrediction``, its softmax ``probability``, and the most probable class
    ``prediction``, a double. Of a module with one output, which is a logit (or, after BCELoss, a
    probability) of class 1, they are those of the classes 0 and 1. An empty column name leaves that
    column out.
    """

    @property
    def labels(self) -> list[str]:
        """The names of the classes, from the metadata of the label column; empty if it had none."""
        return list(self._labels)

    @property
    def numClasses(self) -> int:
        """The number of classes."""
        return class_count(self.trained.output)

    def _outputs(self) -> list[str]:
        names = (self.getRawPredictionCol(), self.getProbabilityCol(), self.getPredictionCol())
        return [name for name in names if name]

    def _postprocess(self) -> Callable[[torch.Tensor], torch.Tensor]:
        count = self.numClasses
        thresholds = tuple(self.getThresholds()) if self.isSet(self.thresholds) else ()
        if thresholds and (len(thresholds) != count or min(thresholds) <= 0):
            raise ParameterError(
                f"thresholds={list(thresholds)}: give one number above 0 for each of {count} classes."
            )
        return ClassScores(self.trained.judging.threshold == 0.5, thresholds)

    def _columns(self, rows: DataFrame, scores: str) -> list[Column]:
        count, values = self.numClasses, column(scores)
        parts = {
            self.getRawPredictionCol(): part_of_scores(values, 0, count),
            self.getProbabilityCol(): part_of_scores(values, count, count),
            self.getPredictionCol(): values[2 * count],
        }
        return [part.alias(name) for name, part in parts.items() if name]

    def _width(self) -> int:
        return self.numClasses

    def _metadata(self) -> dict[str, dict[str, Any]]:
        name = self.getPredictionCol()
        return {name: class_metadata(name, self._labels, self.numClasses)} if name else {}


@known_arguments
class TorchClassifier(TorchEstimator, ClassParams):
    """Trains a PyTorch module that classifies; ``fit`` returns a :class:`TorchClassificationModel`.

    The module returns one number for each class, and the loss is cross entropy unless another one is
    set. With BCEWithLogitsLoss or BCELoss it returns one number for two classes. The label is a class
    number of any numeric type, as StringIndexer makes it; its names of the classes return with the
    predictions, for IndexToString. Rows of ``validationIndicatorCol`` are scored by accuracy, unless
    ``validation=`` in ``trainerArgs`` names other metrics.

    The arguments are those of :class:`sparkdl.ml.TorchEstimator`, and:

    Args:
        probabilityCol: The column for the vector of probabilities.
        rawPredictionCol: The column for the vector of the module's outputs.
        thresholds: The class with the largest probability / threshold is predicted.
    """

    _loss = nn.CrossEntropyLoss
    _metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    _labels: ClassVar[str | None] = CLASSES
    _model_class: ClassVar[type[TorchModel]] = TorchClassificationModel

    @keyword_only
    def __init__(
        self,
        *,
        model: Any = None,
        loss: Any = None,
        optimizer: Any = None,
        learningRate: float | None = None,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        thresholds: list[float] | None = None,
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        handleInvalid: str = "error",
        batchSize: int = 256,
        maxEpochs: int = 10,
        seed: int = 0,
        engine: str = "shuffle",
        replicas: int | None = None,
        trainerArgs: dict[str, Any] | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        """Create a classifier."""
        given = self._input_kwargs
        super().__init__()
        self._set_all(given)

    @arguments_of(__init__)
    def setParams(self, **arguments: Any) -> TorchClassifier:
        """Set Params; the arguments are those of the constructor."""
        return self._set_all(arguments)  # type: ignore[no-any-return]

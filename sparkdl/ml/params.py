"""The Params of estimators and models, with their getters and setters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasBatchSize,
    HasFeaturesCol,
    HasHandleInvalid,
    HasLabelCol,
    HasLearningRate,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasThresholds,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from sparkdl.errors import ParameterError, in_quotes, kind_of, nearest
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.train.spec import TEN_EPOCHS
from sparkdl.train.trainer import Trainer

Self = TypeVar("Self", bound=Params)
TRAINER_FIELDS = tuple(one.name for one in dataclasses.fields(Trainer) if one.init)
FIELD_OF_PARAM = {
    "model": "model",
    "loss": "loss",
    "optimizer": "optimizer",
    "featuresCol": "features",
    "labelCol": "label",
    "weightCol": "weight",
    "batchSize": "batch_size",
    "seed": "seed",
    "engine": "engine",
    "replicas": "replicas",
}
"""The field of ``Trainer`` that each Param stands for."""


def _one_of(name: str, *choices: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            hint = nearest(str(value), choices)
            raise ParameterError(
                f"{name}={in_quotes(value)}: use one of {', '.join(choices)}.{hint}"
            )
        return str(value)

    return convert


def trainer_args(value: Any) -> dict[str, Any]:
    """Return ``value`` as arguments of ``Trainer``, by name."""
    if not isinstance(value, Mapping):
        raise ParameterError(
            f'trainerArgs is {kind_of(value)}: give a dict of Trainer\'s arguments, as {{"ema": 0.99}}.'
        )
    for name in value:
        if name not in TRAINER_FIELDS:
            raise ParameterError(
                f'trainerArgs: Trainer has no argument "{name}".{nearest(str(name), TRAINER_FIELDS)}'
            )
    return dict(value)


class ModelParams(HasFeaturesCol, HasLabelCol, HasPredictionCol, HasHandleInvalid):
    """The Params that estimators and models share."""

    handleInvalid: Param[str] = Param(
        Params._dummy(),
        "handleInvalid",
        'How to treat rows with null, NaN or infinite values in the columns that are read: "error" '
        '(raise an error), "skip" (leave the rows out) or "keep" (predict NaN; a fit leaves them out).',
        typeConverter=_one_of("handleInvalid", "error", "skip", "keep"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(handleInvalid="error")

    def setFeaturesCol(self: Self, value: str) -> Self:
        """Set ``featuresCol``, the column with the features."""
        return self._set(featuresCol=value)

    def setLabelCol(self: Self, value: str) -> Self:
        """Set ``labelCol``, the column with the label."""
        return self._set(labelCol=value)

    def setPredictionCol(self: Self, value: str) -> Self:
        """Set ``predictionCol``, the column for the predictions."""
        return self._set(predictionCol=value)

    def setHandleInvalid(self: Self, value: str) -> Self:
        """Set ``handleInvalid``: "error", "skip" or "keep"."""
        return self._set(handleInvalid=value)


class ClassParams(HasRawPredictionCol, HasProbabilityCol, HasThresholds):
    """The Params of classifiers and their models."""

    def setRawPredictionCol(self: Self, value: str) -> Self:
        """Set ``rawPredictionCol``, the column for the outputs of the module."""
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self: Self, value: str) -> Self:
        """Set ``probabilityCol``, the column for the probabilities."""
        return self._set(probabilityCol=value)

    def setThresholds(self: Self, value: list[float]) -> Self:
        """Set ``thresholds``: the class with the largest probability / threshold is predicted."""
        return self._set(thresholds=value)


class FitParams(
    ModelParams,
    HasWeightCol,
    HasValidationIndicatorCol,
    HasBatchSize,
    HasLearningRate,
    HasSeed,
):
    """The plain Params of a training, which a model keeps: it tells with what it was trained."""

    maxEpochs: Param[int] = Param(
        Params._dummy(),
        "maxEpochs",
        "The most epochs to train for.",
        typeConverter=TypeConverters.toInt,
    )
    engine: Param[str] = Param(
        Params._dummy(), "engine", 'The engine: "shuffle", "gang" or "local".'
    )
    replicas: Param[int] = Param(
        Params._dummy(),
        "replicas",
        "The number of replicas; if not set, as many as tasks run at once.",
        typeConverter=TypeConverters.toInt,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batchSize=256, maxEpochs=TEN_EPOCHS.epochs, seed=0, engine="shuffle")

    def getMaxEpochs(self) -> int:
        """Return ``maxEpochs``."""
        return self.getOrDefault(self.maxEpochs)

    def getEngine(self) -> str:
        """Return ``engine``."""
        return self.getOrDefault(self.engine)

    def getReplicas(self) -> int:
        """Return ``replicas``."""
        return self.getOrDefault(self.replicas)


class TrainingParams(FitParams):
    """The Params of estimators."""

    model: Param[Any] = Param(
        Params._dummy(),
        "model",
        "A function or class that builds the torch.nn.Module, or a module.",
    )
    loss: Param[Any] = Param(Params._dummy(), "loss", "The loss: loss(output, label) -> mean.")
    optimizer: Param[Any] = Param(
        Params._dummy(), "optimizer", "A torch.optim class, or a partial of one."
    )
    trainerArgs: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "trainerArgs",
        "Further arguments of sparkdl.Trainer, by name.",
        typeConverter=trainer_args,
    )
    _loss: ClassVar[type | None] = None
    """The class of the loss if none is set, or None."""

    def __init__(self) -> None:
        super().__init__()
        own = {} if self._loss is None else {"loss": self._loss()}
        self._setDefault(optimizer=torch.optim.Adam, **own)

    def setModel(self: Self, value: Any) -> Self:
        """Set ``model``, a function or class that builds the module, or a module."""
        return self._set(model=value)

    def setLoss(self: Self, value: Any) -> Self:
        """Set ``loss``, a function of (output, label) that returns the mean."""
        return self._set(loss=value)

    def setOptimizer(self: Self, value: Any) -> Self:
        """Set ``optimizer``, a ``torch.optim`` class or a partial of one."""
        return self._set(optimizer=value)

    def setWeightCol(self: Self, value: str) -> Self:
        """Set ``weightCol``, the column with the weight of each row."""
        return self._set(weightCol=value)

    def setValidationIndicatorCol(self: Self, value: str) -> Self:
        """Set ``validationIndicatorCol``, a boolean column: true for rows to validate with."""
        return self._set(validationIndicatorCol=value)

    def setBatchSize(self: Self, value: int) -> Self:
        """Set ``batchSize``, the global batch size."""
        return self._set(batchSize=value)

    def setMaxEpochs(self: Self, value: int) -> Self:
        """Set ``maxEpochs``, the most epochs to train for."""
        return self._set(maxEpochs=value)

    def setLearningRate(self: Self, value: float) -> Self:
        """Set ``learningRate``, the ``lr`` of the optimizer."""
        return self._set(learningRate=value)

    def setSeed(self: Self, value: int) -> Self:
        """Set ``seed`` of the weights, the order of rows, and every draw."""
        return self._set(seed=value)

    def setEngine(self: Self, value: str) -> Self:
        """Set ``engine``: "shuffle", "gang" or "local"."""
        return self._set(engine=value)

    def setReplicas(self: Self, value: int) -> Self:
        """Set ``replicas``, the number of replicas."""
        return self._set(replicas=value)

    def setTrainerArgs(self: Self, **args: Any) -> Self:
        """Add arguments of ``Trainer`` by name to those that were set before.

        Where an argument and a Param mean the same, the Param counts if it is set. A ``stop`` ends
        the training before ``maxEpochs`` epochs if these are set too. ``validation`` may be a
        :class:`sparkdl.Validation`, or, with ``validationIndicatorCol``, a dict of its other
        arguments: ``{"metrics": ["auc"], "best": "auc"}``.
        """
        before = self.getOrDefault("trainerArgs") if self.isSet("trainerArgs") else {}
        return self._set(trainerArgs={**before, **trainer_args(args)})

    def setTrainer(self: Self, trainer: Trainer) -> Self:
        """Take the arguments of a trainer: Params where there are some, else ``trainerArgs``.

        Only arguments that differ from their defaults are taken.
        """
        if not isinstance(trainer, Trainer):
            raise ParameterError(f"trainer is {kind_of(trainer)}: give a sparkdl.Trainer.")
        params = {field: param for param, field in FIELD_OF_PARAM.items()}
        args: dict[str, Any] = {}
        for one in dataclasses.fields(Trainer):
            value = getattr(trainer, one.name)
            if not one.init or _is_default(one, value):
                continue
            if one.name in params and not (params[one.name].endswith("Col") and _several(value)):
                self._set(**{params[one.name]: value})
            elif one.name == "stop" and type(value) is MaxEpoch:
                self._set(maxEpochs=value.epochs)
            else:
                args[one.name] = value
        return self.setTrainerArgs(**args)  # type: ignore[attr-defined, no-any-return]

    def getModel(self) -> Any:
        """Return ``model``."""
        return self.getOrDefault(self.model)

    def getLoss(self) -> Any:
        """Return ``loss``."""
        return self.getOrDefault(self.loss)

    def getOptimizer(self) -> Any:
        """Return ``optimizer``."""
        return self.getOrDefault(self.optimizer)

    def getTrainerArgs(self) -> dict[str, Any]:
        """Return a copy of ``trainerArgs``."""
        return dict(self.getOrDefault("trainerArgs")) if self.isSet("trainerArgs") else {}


def _several(columns: Any) -> bool:
    """Return whether an argument of ``Trainer`` names other than one column."""
    return not isinstance(columns, str)


def _is_default(one: dataclasses.Field[Any], value: Any) -> bool:
    if one.default_factory is not dataclasses.MISSING:
        return bool(value == one.default_factory())
    return type(value) is type(one.default) and bool(value == one.default)

"""The Params of estimators and models, with their getters and setters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

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

from sparkdl.errors import ParameterError, in_quotes, kind_of, nearest, unknown_argument
from sparkdl.loop.triggers import MaxEpoch
from sparkdl.train.spec import TEN_EPOCHS
from sparkdl.train.trainer import Trainer

Self = TypeVar("Self", bound=Params)
Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
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
            told = unknown_argument("Trainer", str(name), value[name], TRAINER_FIELDS)
            raise ParameterError(f"trainerArgs: {told}")
    return dict(value)


def setter(name: str, kind: type[Value]) -> Callable[[Self, Value], Self]:
    """Return the method that sets a Param, whose values editors take for ``kind``."""

    def set_param(self: Self, value: Value) -> Self:
        return self._set(**{name: value})

    return _named(set_param, f"set{name[0].upper()}{name[1:]}", f"Set ``{name}``, see its Param.")


def getter(name: str, kind: type[Value]) -> Callable[[Any], Value]:
    """Return the method that returns the value of a Param."""

    def get_param(self: Any) -> Value:
        return self.getOrDefault(name)  # type: ignore[no-any-return]

    return _named(get_param, f"get{name[0].upper()}{name[1:]}", f"Return ``{name}``.")


def arguments_of(
    init: Callable[Concatenate[Any, Arguments], None],
) -> Callable[[Callable[..., Value]], Callable[Concatenate[Any, Arguments], Value]]:
    """Return a decorator that gives a method the keyword arguments of a constructor."""

    def decorate(method: Callable[..., Value]) -> Callable[Concatenate[Any, Arguments], Value]:
        def checked(self: Any, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            known = tuple(inspect.signature(init).parameters)[1:]
            for name in (name for name in kwargs if name not in known):
                told = unknown_argument(method.__name__, name, kwargs[name], known)
                raise ParameterError(told)
            inspect.signature(init).bind(self, *args, **kwargs)
            return method(self, **kwargs)

        checked.__wrapped__ = init  # type: ignore[attr-defined]
        return _named(checked, method.__name__, method.__doc__ or "")  # type: ignore[no-any-return]

    return decorate


def _named(method: Any, name: str, text: str) -> Any:
    method.__name__ = method.__qualname__ = name
    method.__doc__ = text
    return method


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

    setFeaturesCol = setter("featuresCol", str)
    setLabelCol = setter("labelCol", str)
    setPredictionCol = setter("predictionCol", str)
    setHandleInvalid = setter("handleInvalid", str)


class ClassParams(HasRawPredictionCol, HasProbabilityCol, HasThresholds):
    """The Params of classifiers and their models."""

    setRawPredictionCol = setter("rawPredictionCol", str)
    setProbabilityCol = setter("probabilityCol", str)
    setThresholds = setter("thresholds", list)


class FitParams(
    ModelParams, HasWeightCol, HasValidationIndicatorCol, HasBatchSize, HasLearningRate, HasSeed
):
    """The plain Params of a training, which a model keeps: it tells with what it was trained."""

    maxEpochs: Param[int] = Param(
        Params._dummy(),
        "maxEpochs",
        "The most epochs to train for.",
        typeConverter=TypeConverters.toInt,
    )
    engine: Param[str] = Param(
        Params._dummy(), "engine", 'The engine: "shuffle", "gang", "local" or "auto".'
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

    getMaxEpochs = getter("maxEpochs", int)
    getEngine = getter("engine", str)
    getReplicas = getter("replicas", int)


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

    setModel = setter("model", object)
    setLoss = setter("loss", object)
    setOptimizer = setter("optimizer", object)
    setWeightCol = setter("weightCol", str)
    setValidationIndicatorCol = setter("validationIndicatorCol", str)
    setBatchSize = setter("batchSize", int)
    setMaxEpochs = setter("maxEpochs", int)
    setLearningRate = setter("learningRate", float)
    setSeed = setter("seed", int)
    setEngine = setter("engine", str)
    setReplicas = setter("replicas", int)

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
            several = params.get(one.name, "").endswith("Col") and not isinstance(value, str)
            if one.name in params and not several:
                self._set(**{params[one.name]: value})
            elif one.name == "stop" and type(value) is MaxEpoch:
                self._set(maxEpochs=value.epochs)
            else:
                args[one.name] = value
        return self.setTrainerArgs(**args)  # type: ignore[attr-defined, no-any-return]

    getModel: ClassVar[Callable[[Any], Any]] = getter("model", object)
    getLoss: ClassVar[Callable[[Any], Any]] = getter("loss", object)
    getOptimizer: ClassVar[Callable[[Any], Any]] = getter("optimizer", object)

    def getTrainerArgs(self) -> dict[str, Any]:
        """Return a copy of ``trainerArgs``."""
        return dict(self.getOrDefault("trainerArgs")) if self.isSet("trainerArgs") else {}


def _is_default(one: dataclasses.Field[Any], value: Any) -> bool:
    if one.default_factory is not dataclasses.MISSING:
        return bool(value == one.default_factory())
    return type(value) is type(one.default) and bool(value == one.default)

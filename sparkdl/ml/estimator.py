"""The estimator that trains any PyTorch module as a stage of a pipeline, and its fits of a grid."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparkdl.errors import known_arguments
from sparkdl.infer.model import TrainedModel
from sparkdl.ml.model import TorchModel
from sparkdl.ml.params import TrainingParams, arguments_of, trainer_args
from sparkdl.ml.persistence import EstimatorReader, EstimatorWriter
from sparkdl.ml.plan import FitPlan
from sparkdl.train.placed_samples import PlacedSamples, SharedSamples
from sparkdl.train.trainer import Trainer


@known_arguments
class TorchEstimator(Estimator[Any], TrainingParams, MLReadable["TorchEstimator"], MLWritable):
    """Trains a PyTorch module on a DataFrame; ``fit`` returns a :class:`TorchModel`.

    Every argument is a Param of the same name, with a getter and a setter, and may be in a grid.
    ``trainerArgs`` holds any other argument of :class:`sparkdl.Trainer`, and ``trainer=`` takes the
    arguments of a whole trainer.

    Args:
        model: A function or class that builds the module, or a module.
        loss: The loss: ``loss(output, label)`` returns the mean.
        optimizer: A ``torch.optim`` class or a partial of one; Adam by default.
        learningRate: The ``lr`` of the optimizer.
        featuresCol: The column with the features: a vector, array or number.
        labelCol: The column with the label.
        predictionCol: The column for the predictions.
        weightCol: The column with the weight of each row.
        validationIndicatorCol: A boolean column, true for the rows to validate with.
        handleInvalid: "error", "skip" or "keep", for rows with null, NaN or infinite values.
        batchSize: The global batch size.
        maxEpochs: The most epochs to train for.
        seed: The seed of weights, order and every draw.
        engine: "shuffle", "gang", "local", or "auto": a plan takes the faster of the first two.
        replicas: The number of replicas.
        trainerArgs: Further arguments of ``Trainer``, by name.
        trainer: A trainer whose arguments are taken; those given here besides count more.
    """

    _metrics: ClassVar[tuple[str, ...]] = ()
    _labels: ClassVar[str | None] = None
    _model_class: ClassVar[type[TorchModel]] = TorchModel
    _input_kwargs: dict[str, Any]

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
        """Create an estimator."""
        super().__init__()
        self._set_all(self._input_kwargs)

    @arguments_of(__init__)
    def setParams(self, **arguments: Any) -> TorchEstimator:
        """Set Params; the arguments are those of the constructor."""
        return self._set_all(arguments)  # type: ignore[no-any-return]

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Any]
    ) -> Iterator[tuple[int, TorchModel]]:
        """Fit a model for each param map, on samples that are placed once.

        Param maps that change how the data is read (columns, ``replicas``, ``handleInvalid``, ...)
        have samples of their own.

        Args:
            dataset: The training data.
            paramMaps: The param maps.

        Returns:
            An iterator of (index of the param map, model), which several threads may use at once.
        """
        return GridFits([self.copy(params) for params in paramMaps], dataset)

    def write(self) -> MLWriter:
        """Return the writer, which puts the Params into a folder of any file system."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader."""
        return EstimatorReader(cls)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        plan = self._plan()
        training, validation = plan.rows(dataset)
        with plan.explaining_no_rows():
            trained = plan.trainer_with(validation).fit(training)
        return self._fitted(trained, plan.label_names(dataset))

    def _plan(self) -> FitPlan:
        """Return the plan of a fit. Raises :class:`sparkdl.ParameterError`."""
        return FitPlan.of(self, self._metrics, self._labels)

    def _fitted(self, trained: TrainedModel, labels: Sequence[str]) -> TorchModel:
        """Return the model of a fit: the best weights, if they were kept, and the Params."""
        best = trained if trained.best is None else trained.best
        model = self._model_class(best, labels)
        self._copyValues(model._resetUid(self.uid))
        return model

    def _set_all(self, given: dict[str, Any]) -> Any:
        given = dict(given)
        trainer = given.pop("trainer", None)
        if trainer is not None:
            self.setTrainer(trainer)
        args = given.pop("trainerArgs", None)
        if args is not None:
            self.setTrainerArgs(**trainer_args(args))
        return self._set(**given)


class _Placed(NamedTuple):
    """Samples in place, for all points of a grid that read the data alike."""

    plan: FitPlan
    validation: DataFrame | None
    samples: SharedSamples


class GridFits(Iterator[tuple[int, TorchModel]]):
    """Fits one point of a grid at each ``next``, which several threads may call at once.

    The samples are given back when the last fit has ended, or when the iterator is dropped before.
    """

    def __init__(self, points: Sequence[TorchEstimator], dataset: DataFrame) -> None:
        """Create the iterator. Nothing is read until the first ``next``."""
        self._points, self._dataset = points, dataset
        self._lock, self._placing = threading.Lock(), threading.Lock()
        self._next = self._running = 0
        self._plans = [point._plan() for point in points]
        self._placed: list[_Placed] = []
        self._dropped = weakref.finalize(self, _close_later, self._placed)
        self._dropped.atexit = False

    def __next__(self) -> tuple[int, TorchModel]:
        with self._lock:
            index = self._next
            if index >= len(self._points):
                raise StopIteration
            self._next += 1
            self._running += 1
        try:
            point, plan = self._points[index], self._plans[index]
            with plan.explaining_no_rows():
                placed = self._samples(plan)
                trained = plan.trainer_with(placed.validation).fit(placed.samples)
            return index, point._fitted(trained, plan.label_names(self._dataset))
        finally:
            with self._lock:
                self._running -= 1
                ended = not self._running and self._next >= len(self._points)
            if ended:
                self._dropped.detach()
                _close(self._placed)

    def _samples(self, plan: FitPlan) -> _Placed:
        """Return the samples of a plan; other threads wait until they are in place."""
        with self._placing:
            for placed in self._placed:
                if placed.plan.same_reading(plan):
                    return placed
            training, validation = plan.rows(self._dataset)
            samples = PlacedSamples.of(plan.trainer_with(validation), training)
            self._placed.append(_Placed(plan, validation, samples))
            return self._placed[-1]


def _close(placed: Sequence[_Placed]) -> None:
    for one in placed:
        one.samples.close()


def _close_later(placed: Sequence[_Placed]) -> None:
    """Close in a thread: the garbage collector may be at work in the middle of a call to Spark."""
    threading.Thread(target=_close, args=(placed,), name="sparkdl-give-back").start()

"""The regressor and its model."""

from __future__ import annotations

from typing import ClassVar

from sparkdl.errors import known_arguments
from sparkdl.ml.estimator import TorchEstimator
from sparkdl.ml.model import TorchModel
from sparkdl.ml.plan import NUMBERS
from sparkdl.model.squared_error import SquaredError


class TorchRegressionModel(TorchModel):
    """A trained regressor as a stage of a ``PipelineModel``.

    The prediction is a double; with an array as label, a vector.
    """


@known_arguments
class TorchRegressor(TorchEstimator):
    """Trains a PyTorch module that predicts numbers; ``fit`` returns a :class:`TorchRegressionModel`.

    The loss is the squared error unless another one is set; the module may return (rows,) or
    (rows, 1). The label is a number of any type. Rows of ``validationIndicatorCol`` are scored by the
    absolute error, unless ``validation=`` in ``trainerArgs`` names other metrics. The arguments are
    those of :class:`TorchEstimator`.
    """

    _loss = SquaredError
    _metrics: ClassVar[tuple[str, ...]] = ("mae",)
    _labels: ClassVar[str | None] = NUMBERS
    _model_class: ClassVar[type[TorchModel]] = TorchRegressionModel

"""Estimators and models of pyspark.ml: stages of a ``Pipeline`` that train PyTorch modules.

Names and habits are those of pyspark.ml: Params, camelCase, ``fit``, ``transform``, ``write``. The
training itself is that of :class:`sparkdl.Trainer`, and each of its arguments can be given.
"""

from sparkdl.ml.classifier import TorchClassificationModel, TorchClassifier
from sparkdl.ml.estimator import TorchEstimator
from sparkdl.ml.model import TorchModel, TorchTrainingSummary
from sparkdl.ml.persistence import loading
from sparkdl.ml.regressor import TorchRegressionModel, TorchRegressor

__all__ = [
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "TorchTrainingSummary",
    "loading",
]

"""Deep learning that is native to Spark: a DataFrame in, a trained PyTorch model out."""

from sparkdl.data import Sample
from sparkdl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DataError,
    ModelError,
    ParameterError,
    SessionError,
    SparkdlError,
    StateLostError,
    TrainingError,
    TrustError,
    UserError,
)
from sparkdl.infer.metrics import MeanMetric, Metric
from sparkdl.session import session
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.settings import Checkpoint
from sparkdl.train.history import History
from sparkdl.train.persistence import load
from sparkdl.train.state import TrainState
from sparkdl.train.trained import TrainedModel
from sparkdl.train.trainer import Trainer
from sparkdl.train.triggers import (
    Trigger,
    every,
    every_epoch,
    every_seconds,
    max_epoch,
    max_iteration,
    max_score,
    max_time,
    min_loss,
    plateau,
    several_iterations,
)

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "DataError",
    "History",
    "MeanMetric",
    "Metric",
    "ModelError",
    "ParameterError",
    "Sample",
    "SessionError",
    "SparkdlError",
    "StateLostError",
    "TrainState",
    "TrainedModel",
    "Trainer",
    "TrainingError",
    "Trigger",
    "TrustError",
    "UserError",
    "every",
    "every_epoch",
    "every_seconds",
    "load",
    "max_epoch",
    "max_iteration",
    "max_score",
    "max_time",
    "min_loss",
    "plateau",
    "session",
    "several_iterations",
]

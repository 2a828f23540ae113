"""Deep learning that is native to Spark: a DataFrame in, a trained PyTorch model out."""

from sparkdl import gang, optim
from sparkdl.data import Sample
from sparkdl.data.columns import Convert, Image, Sequence
from sparkdl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DataError,
    ModelError,
    ParameterError,
    SessionError,
    SparkdlError,
    StalledError,
    StateLostError,
    TrainingError,
    TrustError,
    UserError,
)
from sparkdl.infer.metrics import MeanMetric, Metric
from sparkdl.replica.model_loss import ModelLoss, PerReplica
from sparkdl.session import session
from sparkdl.sync.compression import GradBucket, PowerSGD, TopK
from sparkdl.train.callbacks import Callback, StopTraining
from sparkdl.train.checkpoint import Checkpoint
from sparkdl.train.history import History
from sparkdl.train.parallel.strategy import DDP, FSDP, Pipeline, Tensor
from sparkdl.train.persistence import load
from sparkdl.train.state import TrainState, Validated
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
from sparkdl.train.validation import Validation

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "FSDP",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Convert",
    "DamagedCheckpoint",
    "DataError",
    "GradBucket",
    "History",
    "Image",
    "MeanMetric",
    "Metric",
    "ModelError",
    "ModelLoss",
    "ParameterError",
    "PerReplica",
    "Pipeline",
    "PowerSGD",
    "Sample",
    "Sequence",
    "SessionError",
    "SparkdlError",
    "StalledError",
    "StateLostError",
    "StopTraining",
    "Tensor",
    "TopK",
    "TrainState",
    "TrainedModel",
    "Trainer",
    "TrainingError",
    "Trigger",
    "TrustError",
    "UserError",
    "Validated",
    "Validation",
    "every",
    "every_epoch",
    "every_seconds",
    "gang",
    "load",
    "max_epoch",
    "max_iteration",
    "max_score",
    "max_time",
    "min_loss",
    "optim",
    "plateau",
    "session",
    "several_iterations",
]

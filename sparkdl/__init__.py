"""Deep learning that is native to Spark: a DataFrame in, a trained PyTorch model out."""

import importlib
from typing import TYPE_CHECKING, Any

from sparkdl.session import session
from sparkdl.settings import __version__ as __version__

if TYPE_CHECKING:
    from sparkdl import collectives, gang, optim, tune
    from sparkdl.checkpoint import Checkpoint
    from sparkdl.consistency.asynchronous import Asynchronous
    from sparkdl.consistency.diloco import DiLoCo
    from sparkdl.consistency.gossip import Gossip
    from sparkdl.consistency.synchronous import StaleSynchronous, Synchronous
    from sparkdl.data import Sample
    from sparkdl.data.batches import Batched
    from sparkdl.data.columns.convert import Convert
    from sparkdl.data.columns.image import Image
    from sparkdl.data.columns.masked import Masked
    from sparkdl.data.columns.sequence import Sequence
    from sparkdl.data.columns.sparse import Sparse
    from sparkdl.data.columns.text import Text
    from sparkdl.data.sampling import Balanced, Weighted
    from sparkdl.diagnosis import diagnose
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
    from sparkdl.infer.generate import generate
    from sparkdl.infer.generation_engines import GenerationEngine, VllmEngine
    from sparkdl.infer.model import TrainedModel, load
    from sparkdl.infer.predict import predict, register_function
    from sparkdl.infer.texts import classify, embed, rerank
    from sparkdl.loop.callbacks import Callback, StopTraining
    from sparkdl.loop.history import History
    from sparkdl.loop.state import TrainState, Validated
    from sparkdl.loop.triggers import (
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
    from sparkdl.loop.validation import Validation
    from sparkdl.metrics.named import MeanMetric, Metric
    from sparkdl.metrics.scorer import MetricOf
    from sparkdl.model.loss import MaskedLoss, ModelLoss, PerReplica
    from sparkdl.model.windows import Windows
    from sparkdl.parallel.ddp import DDP
    from sparkdl.parallel.fsdp import FSDP
    from sparkdl.parallel.pipeline import Pipeline
    from sparkdl.parallel.tensor import Tensor
    from sparkdl.planner.plan import Plan
    from sparkdl.planner.probe import Cluster
    from sparkdl.replica.compute import all_rows
    from sparkdl.reports import compare
    from sparkdl.slices.section import GradBucket, PowerSGD, TopK
    from sparkdl.train.fit import plan
    from sparkdl.train.group_models import GroupModels, load_groups
    from sparkdl.train.groups import fit_groups
    from sparkdl.train.placed_samples import PlacedSamples
    from sparkdl.train.trainer import Trainer

__all__ = [
    "DDP",
    "FSDP",
    "Asynchronous",
    "Balanced",
    "Batched",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "Convert",
    "DamagedCheckpoint",
    "DataError",
    "DiLoCo",
    "GenerationEngine",
    "Gossip",
    "GradBucket",
    "GroupModels",
    "History",
    "Image",
    "Masked",
    "MaskedLoss",
    "MeanMetric",
    "Metric",
    "MetricOf",
    "ModelError",
    "ModelLoss",
    "ParameterError",
    "PerReplica",
    "Pipeline",
    "PlacedSamples",
    "Plan",
    "PowerSGD",
    "Sample",
    "Sequence",
    "SessionError",
    "SparkdlError",
    "Sparse",
    "StaleSynchronous",
    "StalledError",
    "StateLostError",
    "StopTraining",
    "Synchronous",
    "Tensor",
    "Text",
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
    "VllmEngine",
    "Weighted",
    "Windows",
    "all_rows",
    "classify",
    "collectives",
    "compare",
    "diagnose",
    "embed",
    "every",
    "every_epoch",
    "every_seconds",
    "fit_groups",
    "gang",
    "generate",
    "load",
    "load_groups",
    "max_epoch",
    "max_iteration",
    "max_score",
    "max_time",
    "min_loss",
    "optim",
    "plan",
    "plateau",
    "predict",
    "register_function",
    "rerank",
    "session",
    "several_iterations",
    "tune",
]

_NAMES = {
    "sparkdl.checkpoint": "Checkpoint",
    "sparkdl.consistency.asynchronous": "Asynchronous",
    "sparkdl.consistency.diloco": "DiLoCo",
    "sparkdl.consistency.gossip": "Gossip",
    "sparkdl.consistency.synchronous": "StaleSynchronous Synchronous",
    "sparkdl.data": "Sample",
    "sparkdl.data.batches": "Batched",
    "sparkdl.data.columns.convert": "Convert",
    "sparkdl.data.columns.image": "Image",
    "sparkdl.data.columns.masked": "Masked",
    "sparkdl.data.columns.sequence": "Sequence",
    "sparkdl.data.columns.sparse": "Sparse",
    "sparkdl.data.columns.text": "Text",
    "sparkdl.data.sampling": "Balanced Weighted",
    "sparkdl.diagnosis": "diagnose",
    "sparkdl.errors": "CheckpointError DamagedCheckpoint DataError ModelError ParameterError "
    "SessionError SparkdlError StalledError StateLostError TrainingError "
    "TrustError UserError",
    "sparkdl.infer.model": "TrainedModel load",
    "sparkdl.infer.generate": "generate",
    "sparkdl.infer.generation_engines": "GenerationEngine VllmEngine",
    "sparkdl.infer.predict": "predict register_function",
    "sparkdl.infer.texts": "classify embed rerank",
    "sparkdl.loop.callbacks": "Callback StopTraining",
    "sparkdl.loop.history": "History",
    "sparkdl.loop.state": "TrainState Validated",
    "sparkdl.loop.triggers": "Trigger every every_epoch every_seconds max_epoch max_iteration "
    "max_score max_time min_loss plateau several_iterations",
    "sparkdl.loop.validation": "Validation",
    "sparkdl.metrics.named": "MeanMetric Metric",
    "sparkdl.metrics.scorer": "MetricOf",
    "sparkdl.model.loss": "MaskedLoss ModelLoss PerReplica",
    "sparkdl.model.windows": "Windows",
    "sparkdl.parallel.ddp": "DDP",
    "sparkdl.parallel.fsdp": "FSDP",
    "sparkdl.parallel.pipeline": "Pipeline",
    "sparkdl.parallel.tensor": "Tensor",
    "sparkdl.planner.probe": "Cluster",
    "sparkdl.planner.plan": "Plan",
    "sparkdl.replica.compute": "all_rows",
    "sparkdl.reports": "compare",
    "sparkdl.slices.section": "GradBucket PowerSGD TopK",
    "sparkdl.train.fit": "plan",
    "sparkdl.train.group_models": "GroupModels load_groups",
    "sparkdl.train.groups": "fit_groups",
    "sparkdl.train.placed_samples": "PlacedSamples",
    "sparkdl.train.trainer": "Trainer",
}
"""The public names by module; each is imported when it is used for the first time."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("collectives", "gang", "ml", "mlflow", "optim", "summaries", "tune")


def __getattr__(name: str) -> Any:
    """Import a public name when it is used for the first time."""
    if name in _MODULES:
        return importlib.import_module(f"sparkdl.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names, also those that were not used yet."""
    return sorted({*globals(), *__all__, *_MODULES})

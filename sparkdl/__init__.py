"""Deep learning that is native to Spark: a DataFrame in, a trained PyTorch model out."""

import importlib
from typing import TYPE_CHECKING, Any

from sparkdl.session import session as session
from sparkdl.settings import __version__ as __version__

if TYPE_CHECKING:  # the names of _NAMES
    from sparkdl import collectives as collectives
    from sparkdl import gang as gang
    from sparkdl import optim as optim
    from sparkdl import tune as tune
    from sparkdl.checkpoint import Checkpoint as Checkpoint
    from sparkdl.consistency.asynchronous import Asynchronous as Asynchronous
    from sparkdl.consistency.diloco import DiLoCo as DiLoCo
    from sparkdl.consistency.gossip import Gossip as Gossip
    from sparkdl.consistency.synchronous import StaleSynchronous as StaleSynchronous
    from sparkdl.consistency.synchronous import Synchronous as Synchronous
    from sparkdl.data import Sample as Sample
    from sparkdl.data.batches import Batched as Batched
    from sparkdl.data.columns.convert import Convert as Convert
    from sparkdl.data.columns.image import Image as Image
    from sparkdl.data.columns.masked import Masked as Masked
    from sparkdl.data.columns.sequence import Sequence as Sequence
    from sparkdl.data.columns.sparse import Sparse as Sparse
    from sparkdl.data.columns.text import Text as Text
    from sparkdl.data.sampling import Balanced as Balanced
    from sparkdl.data.sampling import Weighted as Weighted
    from sparkdl.diagnosis import diagnose as diagnose
    from sparkdl.errors import CheckpointError as CheckpointError
    from sparkdl.errors import DamagedCheckpoint as DamagedCheckpoint
    from sparkdl.errors import DataError as DataError
    from sparkdl.errors import ModelError as ModelError
    from sparkdl.errors import ParameterError as ParameterError
    from sparkdl.errors import SessionError as SessionError
    from sparkdl.errors import SparkdlError as SparkdlError
    from sparkdl.errors import StalledError as StalledError
    from sparkdl.errors import StateLostError as StateLostError
    from sparkdl.errors import TrainingError as TrainingError
    from sparkdl.errors import TrustError as TrustError
    from sparkdl.errors import UserError as UserError
    from sparkdl.infer.generate import generate as generate
    from sparkdl.infer.generation_engines import GenerationEngine as GenerationEngine
    from sparkdl.infer.generation_engines import VllmEngine as VllmEngine
    from sparkdl.infer.model import TrainedModel as TrainedModel
    from sparkdl.infer.model import load as load
    from sparkdl.infer.predict import predict as predict
    from sparkdl.infer.predict import register_function as register_function
    from sparkdl.infer.texts import classify as classify
    from sparkdl.infer.texts import embed as embed
    from sparkdl.infer.texts import rerank as rerank
    from sparkdl.loop.callbacks import Callback as Callback
    from sparkdl.loop.callbacks import StopTraining as StopTraining
    from sparkdl.loop.history import History as History
    from sparkdl.loop.state import TrainState as TrainState
    from sparkdl.loop.state import Validated as Validated
    from sparkdl.loop.triggers import Trigger as Trigger
    from sparkdl.loop.triggers import every as every
    from sparkdl.loop.triggers import every_epoch as every_epoch
    from sparkdl.loop.triggers import every_seconds as every_seconds
    from sparkdl.loop.triggers import max_epoch as max_epoch
    from sparkdl.loop.triggers import max_iteration as max_iteration
    from sparkdl.loop.triggers import max_score as max_score
    from sparkdl.loop.triggers import max_time as max_time
    from sparkdl.loop.triggers import min_loss as min_loss
    from sparkdl.loop.triggers import plateau as plateau
    from sparkdl.loop.triggers import several_iterations as several_iterations
    from sparkdl.loop.validation import Validation as Validation
    from sparkdl.metrics.named import MeanMetric as MeanMetric
    from sparkdl.metrics.named import Metric as Metric
    from sparkdl.metrics.scorer import MetricOf as MetricOf
    from sparkdl.model.loss import MaskedLoss as MaskedLoss
    from sparkdl.model.loss import ModelLoss as ModelLoss
    from sparkdl.model.loss import PerReplica as PerReplica
    from sparkdl.model.windows import Windows as Windows
    from sparkdl.parallel.ddp import DDP as DDP
    from sparkdl.parallel.fsdp import FSDP as FSDP
    from sparkdl.parallel.pipeline import Pipeline as Pipeline
    from sparkdl.parallel.tensor import Tensor as Tensor
    from sparkdl.planner.plan import Plan as Plan
    from sparkdl.planner.probe import Cluster as Cluster
    from sparkdl.replica.compute import all_rows as all_rows
    from sparkdl.reports import compare as compare
    from sparkdl.slices.section import GradBucket as GradBucket
    from sparkdl.slices.section import PowerSGD as PowerSGD
    from sparkdl.slices.section import TopK as TopK
    from sparkdl.train.fit import plan as plan
    from sparkdl.train.group_models import GroupModels as GroupModels
    from sparkdl.train.group_models import load_groups as load_groups
    from sparkdl.train.groups import fit_groups as fit_groups
    from sparkdl.train.placed_samples import PlacedSamples as PlacedSamples
    from sparkdl.train.trainer import Trainer as Trainer

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
__all__ = sorted([*_MODULE_OF, "collectives", "gang", "optim", "session", "tune"])


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

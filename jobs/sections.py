"""What a training job can be told, section by section: the keys of its YAML file."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass, field
from typing import Any

from jobs.components import Component

Single = str | int | float | bool | datetime.date | datetime.datetime | None
"""What Spark takes as text: no list and no mapping."""


@dataclass(frozen=True, kw_only=True)
class SparkSection:
    """The session."""

    master: str | None = None
    """Used where ``spark-submit`` gives none; null: all cores of this machine."""
    settings: dict[str, Single] = field(default_factory=dict)
    """Any Spark settings, also those of sparkdl."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where the samples are, and what becomes of their columns."""

    train: str
    """Path of the training data."""
    test: str | None = None
    """Path of held-out data, to evaluate on after training."""
    format: str = "parquet"
    """Any format that ``spark.read`` knows."""
    options: dict[str, Single] = field(default_factory=dict)
    """Options of ``spark.read``."""
    prepare: str | None = None
    """A known data set to write to ``train`` and ``test`` where these do not exist."""
    features: str | list[str] | dict[str, str] = "features"
    """Input column, a list of them, or the column of each keyword of the model."""
    label: str | list[str] | None = "label"
    """Label column, a list of them, or null."""
    weight: str | None = None
    """Column with the weight of each sample."""
    class_weights: list[float] | dict[int, float] | None = None
    """How much a sample of each class counts."""
    columns: dict[str, Component] = field(default_factory=dict)
    """How a column becomes a tensor: sparkdl:Image, sparkdl:Sequence or sparkdl:Convert."""
    augment: Component | None = None
    """``function(*features, rng)``, called for a sample each time it is trained on."""
    bucketing: int | None = None
    """Bring samples of like length together, within so many."""


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """How long, in what batches, by how many."""

    epochs: int = 10
    """Passes over the training data."""
    max_iterations: int | None = None
    """Stop after so many iterations, if that comes first."""
    max_seconds: float | None = None
    """Likewise, after so many seconds of training."""
    min_loss: float | None = None
    """Likewise, once the loss of a batch is no higher."""
    batch_size: int = 256
    """The global batch: samples of all replicas together."""
    replicas: int | None = None
    """Copies of the model; null: the cluster's task slots."""
    min_ranks: int | None = None
    """Of a gang: how few task slots will do where executors are lost for good; null: one a replica."""
    slices: int | None = None
    """Parts of the parameter vector; null: as many as replicas."""
    engine: str = "shuffle"
    """shuffle, gang (all replicas at once), or local for debugging."""
    strategy: str | Component = "ddp"
    """Of a gang: ddp, zero1, fsdp, tensor or pipeline; or sparkdl:FSDP, say, with its arguments."""
    mesh: dict[str, int] | None = None
    """Of a gang: ranks along data, pipe, shard and tensor, by name; null: all along the strategy's."""
    sync_batchnorm: bool = False
    """Of a gang: batch norm over the samples of all replicas."""
    precision: str = "fp32"
    """What forward and backward compute in: fp32, bf16 or fp16."""
    schedule_per: str = "iteration"
    """How often the schedule steps: iteration or epoch."""
    schedule_metric: str | None = None
    """The metric of the validation that ReduceLROnPlateau follows."""
    seed: int = 0
    """Of the weights, the shuffling and dropout."""


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Validation while training."""

    data: str | None = None
    """Path of the validation data, of the training data's format."""
    share: float | None = None
    """Instead of that: so much of the training data, chosen by the content of its rows."""
    metrics: list[str | Component] = field(default_factory=list)
    """Beside the loss."""
    every_epochs: int | None = None
    """How often; with no ``every_`` key: each epoch."""
    every_iterations: int | None = None
    """Likewise, in iterations."""
    best: str | None = None
    """The metric whose best model is kept too."""
    batch_size: int = 1024
    """Rows a forward pass of one replica."""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection:
    """When to stop because of the validation."""

    metric: str = "loss"
    """Of the validation."""
    patience: int | None = None
    """Stop after so many validations in a row without a better value."""
    min_delta: float = 0.0
    """By how much a value must be better to count."""
    target: float | None = None
    """Stop as soon as the metric is as good as this."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints, to go on from with ``--resume``."""

    path: str | None = None
    """A folder that all nodes share; null: checkpoints in the run folder."""
    every_epochs: int | None = None
    """How often; with no ``every_`` key: each epoch."""
    every_iterations: int | None = None
    """Likewise, in iterations."""
    every_seconds: float | None = None
    """Likewise, in seconds of training."""
    keep: int | None = 3
    """How many, the newest; null: all."""


@dataclass(frozen=True, kw_only=True)
class GradientsSection:
    """What happens to gradients before the optimizer has them."""

    clip_norm: float | None = None
    """Scale them so that their norm over all parameters is at most this."""
    clip_value: float | None = None
    """Bring each element into [-clip_value, clip_value]."""
    accumulate: int = 1
    """Micro-batches that a replica's mini-batch goes through in."""
    local_steps: int = 1
    """Optimizer steps of each replica before the replicas are averaged."""
    consistency: Component | None = None
    """How replicas agree: sparkdl:Synchronous (null), sparkdl:StaleSynchronous or sparkdl:DiLoCo."""
    l1: float | dict[str, float] = 0.0
    """Strength of the L1 penalty, or a mapping of parameter patterns to it."""
    l2: float | dict[str, float] = 0.0
    """Likewise, L2."""
    on_nan: str = "raise"
    """What is done about a NaN: raise, or skip the update."""
    wire: str = "fp32"
    """What gradients travel in: fp32, bf16 or fp16."""
    compression: Component | None = None
    """What makes them smaller before: sparkdl:TopK, sparkdl:PowerSGD, or a function of your own."""


@dataclass(frozen=True, kw_only=True)
class CareSection:
    """How the model is treated."""

    weights: str | None = None
    """Weights to start from: a safetensors file, a run folder or a saved model."""
    strict_weights: bool = True
    """Whether those must have every name of the model and no other."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that are not trained: names or patterns."""
    unfreeze: list[str] = field(default_factory=list)
    """Exceptions from ``freeze``."""
    activation_checkpointing: list[str] = field(default_factory=list)
    """Submodules whose activations are computed again in backward."""
    compile: bool | dict[str, Any] = False
    """``torch.compile``; a mapping holds its options."""
    ema: float | None = None
    """Decay of a moving average of the weights, which is saved too."""
    output: str | int | None = None
    """The part of what the model returns that is its output: a name or a number; null: all."""


@dataclass(frozen=True, kw_only=True)
class SummariesSection:
    """What is shown of a run beside its history and curves."""

    csv: bool = False
    """``history.csv``, which grows while training goes on."""
    tensorboard: bool = False
    """Events in the folder ``tensorboard``."""
    mlflow: bool = False
    """An MLflow run of the run folder's name."""
    histograms: int | None = None
    """Histograms of weights and gradients at each so many iterations, for TensorBoard."""


@dataclass(frozen=True, kw_only=True)
class TuneSection:
    """The values that ``jobs/tune.py`` varies."""

    space: dict[str, list[Any] | Component] = field(default_factory=dict)
    """By the name of an argument of the trainer or of a component: a list of values, or
    sparkdl.tune:uniform, :loguniform or :integers with low and high."""
    metric: str = "loss"
    """The metric of the validation that is to be good."""
    trials: int | None = None
    """How many; null: all of a grid, else 16."""
    algorithm: str | Component = "random"
    """random, grid, optuna, or sparkdl.tune:Optuna with its arguments."""
    parallel: int | None = None
    """How many at once, a task each; null: all task slots; 1: one after another, distributed."""
    seed: int = 0
    """The seed of the values."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a training job is told."""

    name: str = "run"
    """The run folder is ``<runs>/<name>-<time>``."""
    runs: str = "runs"
    """Where run folders go."""
    data: DataSection
    model: Component
    loss: Component
    optimizer: Component | dict[str, Component]
    """One for all parameters, or several by the name of a submodule."""
    schedule: Component | None = None
    """Learning-rate schedule; an argument ``iterations`` stands for their number."""
    training: TrainingSection = TrainingSection()
    validation: ValidationSection | None = None
    early_stopping: EarlyStoppingSection | None = None
    checkpoint: CheckpointSection | None = None
    gradients: GradientsSection = GradientsSection()
    care: CareSection = CareSection()
    metrics: list[str | Component] = field(default_factory=list)
    """Computed on the test data, beside the loss."""
    summaries: SummariesSection = SummariesSection()
    tune: TuneSection | None = None
    """For ``jobs/tune.py``; other jobs ignore it."""
    callbacks: list[Component] = field(default_factory=list)
    """Of your own: classes that extend sparkdl.Callback."""
    spark: SparkSection = SparkSection()

    def content(self) -> dict[str, Any]:
        """As plain values, defaults included: what :func:`jobs.config.parse` reads."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return value.content()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value

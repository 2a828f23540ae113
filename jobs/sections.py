"""The configuration of a training job, section by section: the keys of its YAML file."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass, field
from typing import Any

from jobs.components import Component

Single = str | int | float | bool | datetime.date | datetime.datetime | None
"""A value that Spark takes as text: no list and no mapping."""


@dataclass(frozen=True, kw_only=True)
class SparkSection:
    """The Spark session."""

    master: str | None = None
    """The master if ``spark-submit`` gives none; null: all cores of this machine."""
    settings: dict[str, Single] = field(default_factory=dict)
    """Settings of Spark, and of sparkdl."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The samples, and the conversion of their columns."""

    train: str
    """The path of the training data."""
    test: str | None = None
    """The path of held-out data that the model is evaluated on after training."""
    format: str = "parquet"
    """The format; any that ``spark.read`` knows."""
    options: dict[str, Single] = field(default_factory=dict)
    """Options of ``spark.read``."""
    prepare: str | None = None
    """A known data set, which is written to ``train`` and ``test`` if these do not exist."""
    features: str | list[str] | dict[str, str] = "features"
    """The input column, a list of columns, or a mapping from the model's keywords to columns."""
    label: str | list[str] | None = "label"
    """The label column, a list of columns, or null."""
    weight: str | None = None
    """The column with the weight of each sample."""
    class_weights: list[float] | dict[int, float] | None = None
    """The weight of the samples of each class."""
    columns: dict[str, Component] = field(default_factory=dict)
    """The conversion of columns to tensors: sparkdl:Image, sparkdl:Sequence, sparkdl:Convert or
    sparkdl:Text."""
    augment: Component | None = None
    """A function ``function(*features, rng)`` that is called each time a sample is trained on."""
    bucketing: int | None = None
    """The number of samples among which those of similar length are brought together."""


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """The length of training, its batches and its replicas."""

    epochs: int = 10
    """The number of passes over the training data."""
    max_iterations: int | None = None
    """Stop after this many iterations, if that comes first."""
    max_seconds: float | None = None
    """Stop after this many seconds of training, if that comes first."""
    min_loss: float | None = None
    """Stop when the loss of a batch is at most this, if that comes first."""
    batch_size: int = 256
    """The global batch: the number of samples of all replicas together."""
    replicas: int | None = None
    """The number of replicas of the model; null: as many as the cluster has task slots."""
    min_ranks: int | None = None
    """For a gang: the smallest number of task slots that training goes on with if executors are lost
    for good; null: one for each replica."""
    slices: int | None = None
    """The number of slices of the parameter vector; null: as many as replicas."""
    engine: str = "shuffle"
    """The engine: shuffle, gang (all replicas at once), or local for debugging."""
    strategy: str | Component = "ddp"
    """For a gang: the name of a strategy, such as ddp or fsdp, or its class with arguments, such as
    sparkdl:FSDP."""
    mesh: dict[str, int] | None = None
    """For a gang: the number of ranks along each axis (data, pipe, shard, tensor); null: all ranks
    along the axis of the strategy."""
    sync_batchnorm: bool = False
    """For a gang: compute batch norm over the samples of all replicas."""
    precision: str = "fp32"
    """The precision of forward and backward: fp32, bf16 or fp16."""
    schedule_per: str = "iteration"
    """The period of the schedule: iteration or epoch."""
    schedule_metric: str | None = None
    """The validation metric that ReduceLROnPlateau follows."""
    seed: int = 0
    """The seed of the initial weights, the shuffling and dropout."""


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Validation during training."""

    data: str | None = None
    """The path of the validation data, in the format of the training data."""
    share: float | None = None
    """A share of the training data to validate on instead, chosen by the content of its rows."""
    metrics: list[str | Component] = field(default_factory=list)
    """The metrics; the loss is always computed."""
    every_epochs: int | None = None
    """The interval in epochs; 1 if no ``every_`` key is given."""
    every_iterations: int | None = None
    """The interval in iterations."""
    best: str | None = None
    """The metric by which the best model is kept too."""
    batch_size: int = 1024
    """The number of rows in a forward pass of one replica."""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection:
    """An early end of training, decided by the validation."""

    metric: str = "loss"
    """The validation metric that decides."""
    patience: int | None = None
    """Stop after this many validations in a row without a better value."""
    min_delta: float = 0.0
    """The least difference by which a better value counts."""
    target: float | None = None
    """Stop as soon as the metric is as good as this."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints, from which ``--resume`` goes on."""

    path: str | None = None
    """A folder that all nodes share; null: checkpoints in the run folder."""
    every_epochs: int | None = None
    """The interval in epochs; 1 if no ``every_`` key is given."""
    every_iterations: int | None = None
    """The interval in iterations."""
    every_seconds: float | None = None
    """The interval in seconds of training."""
    keep: int | None = 3
    """The number of newest checkpoints that are kept; null: all."""


@dataclass(frozen=True, kw_only=True)
class GradientsSection:
    """The treatment of gradients before the optimizer's step."""

    clip_norm: float | None = None
    """Scale gradients so that their norm over all parameters is at most this."""
    clip_value: float | None = None
    """Clip each element to [-clip_value, clip_value]."""
    accumulate: int = 1
    """The number of micro-batches into which a replica divides its mini-batch."""
    local_steps: int = 1
    """The number of optimizer steps of each replica between averages of the replicas."""
    consistency: Component | None = None
    """The consistency of replicas: sparkdl:Synchronous (null), sparkdl:StaleSynchronous,
    sparkdl:Asynchronous, sparkdl:DiLoCo or sparkdl:Gossip."""
    l1: float | dict[str, float] = 0.0
    """The strength of the L1 penalty, or a mapping from patterns of parameter names to strengths."""
    l2: float | dict[str, float] = 0.0
    """The strength of the L2 penalty, in the same form as ``l1``."""
    on_nan: str = "raise"
    """The reaction to a gradient that is not finite: raise, or skip the update."""
    wire: str = "fp32"
    """The precision in which gradients travel: fp32, bf16 or fp16."""
    compression: Component | None = None
    """The compression of gradients: sparkdl:TopK, sparkdl:PowerSGD, or a function of your own."""


@dataclass(frozen=True, kw_only=True)
class CareSection:
    """The model's initial weights, its frozen parameters, and how it is run."""

    weights: str | None = None
    """The initial weights: a safetensors file, a run folder or a saved model."""
    strict_weights: bool = True
    """Require that ``weights`` have every name of the model and no other."""
    freeze: list[str] = field(default_factory=list)
    """The parameters that are not trained: names or patterns."""
    unfreeze: list[str] = field(default_factory=list)
    """Exceptions from ``freeze``."""
    buffers: dict[str, str | Component] = field(default_factory=dict)
    """How replicas agree on buffers, by pattern of their names: first, mean, min, max, sum, or a
    function under ``use``."""
    activation_checkpointing: list[str] = field(default_factory=list)
    """The submodules whose activations are computed again in backward."""
    compile: bool | dict[str, Any] = False
    """Compile the model with ``torch.compile``; a mapping holds its options."""
    ema: float | None = None
    """The decay of a moving average of the weights, which is saved too."""
    output: str | int | None = None
    """The field of the model's result that is its output: a name or a number; null: all of it."""


@dataclass(frozen=True, kw_only=True)
class SummariesSection:
    """The records of a run beside its history and curves."""

    csv: bool = False
    """Write ``history.csv`` while training goes on."""
    tensorboard: bool = False
    """Write events to the folder ``tensorboard``."""
    mlflow: bool = False
    """Log an MLflow run with the run folder's name."""
    histograms: int | None = None
    """The number of iterations between histograms of weights and gradients, for TensorBoard."""


@dataclass(frozen=True, kw_only=True)
class TuneSection:
    """The values that ``jobs/tune.py`` varies."""

    space: dict[str, list[Any] | Component] = field(default_factory=dict)
    """The values of each argument of the trainer or of a component, by its name: a list, or
    sparkdl.tune:uniform, :loguniform or :integers with low and high."""
    metric: str = "loss"
    """The validation metric by which trials are compared."""
    trials: int | None = None
    """The number of trials; null: all of a grid, else 16."""
    algorithm: str | Component = "random"
    """The algorithm: random, grid, optuna, or sparkdl.tune:Optuna with its arguments."""
    parallel: int | None = None
    """The number of trials at a time, a task each; null: all task slots; 1: one distributed trial
    after another."""
    seed: int = 0
    """The seed of the search."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a training job."""

    name: str = "run"
    """The run folder is ``<runs>/<name>-<time>``."""
    runs: str = "runs"
    """The folder of the run folders."""
    data: DataSection
    model: Component
    loss: Component | None = None
    """The function of output and label to minimize; null with a ``step``."""
    step: Component | None = None
    """A function of module and batch that returns the loss, or named losses, instead of ``loss``."""
    optimizer: Component | dict[str, Component]
    """One optimizer for all parameters, or several by the name of a submodule."""
    schedule: Component | None = None
    """The learning-rate schedule; an argument ``iterations`` stands for the number of iterations."""
    training: TrainingSection = TrainingSection()
    validation: ValidationSection | None = None
    early_stopping: EarlyStoppingSection | None = None
    checkpoint: CheckpointSection | None = None
    gradients: GradientsSection = GradientsSection()
    care: CareSection = CareSection()
    metrics: list[str | Component] = field(default_factory=list)
    """The metrics on the test data; the loss is always computed."""
    summaries: SummariesSection = SummariesSection()
    tune: TuneSection | None = None
    """The search of ``jobs/tune.py``; other jobs ignore it."""
    callbacks: list[Component] = field(default_factory=list)
    """Callbacks: classes of your own that extend sparkdl.Callback."""
    spark: SparkSection = SparkSection()

    def content(self) -> dict[str, Any]:
        """Return plain values, with all defaults, that :func:`jobs.config.parse` reads."""
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

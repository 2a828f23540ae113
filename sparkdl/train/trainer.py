"""The trainer: what to train, and how."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pyspark.core.rdd import RDD
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.checkpoint import Checkpoint
from sparkdl.data.columns.base import Sequence as VaryingLength
from sparkdl.data.columns.base import Spec
from sparkdl.errors import ParameterError, raise_all
from sparkdl.infer.trained_model import TrainedModel
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.triggers import MaxEpoch, Trigger
from sparkdl.loop.validation import Validation
from sparkdl.model.options import TrainingOptions
from sparkdl.model.signature import Signature
from sparkdl.parallel.base import Strategy
from sparkdl.parallel.plan import parts_of
from sparkdl.plain import make_plain, plain_list
from sparkdl.slices.compression import GradBucket
from sparkdl.train.checks import NAMES, VALUES, problems_of, problems_of_start

if TYPE_CHECKING:
    from sparkdl.train.carried import CarriedRun

TEN_EPOCHS = MaxEpoch(10)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What to train and how; :meth:`fit` trains. Mistakes raise :class:`sparkdl.ParameterError`.

    With ``replicas`` and ``slices`` given, the result is a function of these values and of the data:
    the same on any number of executors, bit for bit on CPUs. None takes them from the cluster.
    """

    # What is trained.
    model: Callable[[], nn.Module] | nn.Module
    """A callable that builds the module (called with seeded random numbers), or a module, which is
    copied and not changed."""
    loss: Callable[..., Any]
    """``loss(output, target)`` -> mean over the rows, or ``(sum, count)`` where the mean is over
    something else; with ``weight`` or ``class_weights`` one that is none of torch's gives these for
    each row. ``loss(output)`` without a label; with several labels ``target`` is a tuple.
    :class:`sparkdl.ModelLoss`: the model's own; :class:`sparkdl.PerReplica`: of each replica's rows."""
    optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    """A ``torch.optim`` class or a partial of one, given the trainable parameters; any callable of
    the module that returns an optimizer (for parameter groups) or a list of them; or several, by
    the name of a submodule: ``{"encoder": partial(SGD, lr=0.1), "": Adam}``."""
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    """A partial of a ``torch.optim.lr_scheduler`` class."""
    schedule_per: str = "iteration"
    """How often it is stepped: "iteration" or "epoch". ReduceLROnPlateau: at each validation."""
    schedule_metric: str | None = None
    """What ReduceLROnPlateau follows, a metric of the validation; None: the loss, where it is the
    only one."""

    output: str | int | Callable[[Any], Any] | None = None
    """Which part of what the model returns is its output, for the loss, metrics and predictions: a
    field of a mapping, a named tuple, a dataclass or a ``ModelOutput`` by name, a member of a tuple by
    number, a function of the whole (one that can be imported, for the model to be saved). None: the
    whole, which a loss may take apart."""

    # The data.
    features: str | Sequence[str] | Mapping[str, str] = "features"
    """Feature column, or a list of columns: each is an input of its own, ``model(a, b)``. A mapping
    gives them by keyword: ``{"input_ids": "ids", "attention_mask": "mask"}``."""
    label: str | Sequence[str] | None = "label"
    """Label column, a list of columns, or None."""
    weight: str | None = None
    """Column with the weight of each sample, >= 0: the loss is then the weighted mean."""
    columns: Mapping[str, Spec] = field(default_factory=dict)
    """How a column becomes a tensor, where its type does not say: :class:`sparkdl.Image`,
    :class:`sparkdl.Sequence`, :class:`sparkdl.Convert`."""
    augment: Callable[..., Any] | None = None
    """``augment(*features, rng)`` -> features: what happens to one sample (NumPy arrays) each time
    it is trained on; with features by keyword ``augment(**features, rng=rng)``. ``rng`` is a
    ``numpy.random.Generator`` seeded by sample and epoch, as are the generators of torch, numpy and
    random where it draws from them."""
    bucketing: int | None = None
    """Bring samples of like length together: rows of a window that is sorted by length."""
    class_weights: Sequence[float] | Mapping[int, float] | None = None
    """The weight of each class, by number: samples count that much; an array, a tensor and a Series are
    taken too. In a mapping (a Series is one, by its index) name the last class; one below it that is
    missing counts 1."""

    # An iteration.
    batch_size: int = 256
    """The global batch: samples of all replicas together. The last batch of an epoch may be short."""
    replicas: int | None = None
    """M; None: the checkpoint's; else as many as tasks run at once on the executors that are there, by
    cores and GPUs, or fewer where ``spark.default.parallelism`` says so (a gang takes no notice)."""
    min_ranks: int | None = None
    """Of a gang: with how few task slots it goes on where executors are lost for good, or too few come.
    It still has M ranks, and the same bits: several then share a slot, each a process of its own. That
    takes the memory of as many models on one executor, and longer. None: M slots, or an error."""
    slices: int | None = None
    """N: into how many parts parameters and optimizer state are cut, each updated by one task; None: as
    many as replicas (1 where the optimizer needs all together). Not with a gang."""
    engine: str = "shuffle"
    """"shuffle" (Spark jobs, which lose nothing), "gang" (all replicas at once, torch.distributed
    between them: for fast networks and short steps) or "local" (this process, for debugging)."""
    strategy: str | Strategy | Sequence[str | Strategy] = "ddp"
    """How a gang shares the work: "ddp" (every rank updates all weights), "zero1" (each rank updates
    its part, and keeps the optimizer's state of that part only), "fsdp" (each rank also keeps its part
    of the weights and gradients only), "tensor" (each rank computes its part of each layer) or
    "pipeline" (each rank has some of the layers); :class:`sparkdl.DDP`, :class:`sparkdl.FSDP`,
    :class:`sparkdl.Tensor` and :class:`sparkdl.Pipeline` say more. A list is of several
    of the last four together. To other engines this, ``mesh`` and ``resource_profile`` are nothing."""
    mesh: Mapping[str, int] | None = None
    """How many ranks of a gang there are along each way of sharing the work, outermost first: "data"
    (copies of the model), "pipe" (stages), "shard" (of "fsdp"), "tensor"; the product is ``replicas``.
    With ``{"data": 2, "pipe": 2}`` ranks 0 and 1 are a pipeline and ranks 2 and 3 another. What is
    not named is 1, "data" what is left. None: all ranks along the strategy's own."""
    accumulate: int = 1
    """Micro-batches that a replica's mini-batch goes through in, one after another: less memory."""
    local_steps: int = 1
    """Optimizer steps that each replica takes by itself before the replicas are averaged (local
    SGD). An iteration is then ``local_steps`` batches of ``batch_size``."""
    clip_value: float | None = None
    """Bring every element of the gradient into [-clip_value, clip_value]."""
    clip_norm: float | None = None
    """Scale the gradient so that its norm over all parameters is at most this."""
    l1: float | Mapping[str, float] = 0.0
    """Add ``l1 * sum |w|`` to what is minimised; by pattern of parameter names: ``{"*.weight": 1e-5}``.
    Not for sparse tables; not in the reported loss."""
    l2: float | Mapping[str, float] = 0.0
    """Add ``l2 / 2 * sum w**2``, likewise."""
    resource_profile: ResourceProfile | None = None
    """Of a gang: what each of its tasks is given, where that is not what others get: cores (torch's
    threads), GPUs. A ``pyspark.resource.ResourceProfile`` with requests of tasks only; on a cluster."""
    sync_batchnorm: bool = False
    """Of a gang: batch norm over the samples of all replicas, instead of each replica's own."""
    on_nan: str = "raise"
    """A loss or gradient that is inf or NaN: "raise", naming iteration and replica, or "skip" the
    update."""
    precision: str = "fp32"
    """What forward and backward compute in, by autocast: "fp32", "bf16", or "fp16" (with loss
    scaling). Weights stay in the model's dtype."""
    wire: str = "fp32"
    """What gradients travel in, rounded to nearest: "fp32" (the model's dtype), "bf16" or "fp16".
    They are summed in the model's dtype, but where a gang lets torch sum them: there in this."""
    compression: Callable[[GradBucket], Mapping[str, torch.Tensor]] | None = None
    """What makes gradients smaller before they travel: :class:`sparkdl.TopK`,
    :class:`sparkdl.PowerSGD`, or a function of a :class:`sparkdl.GradBucket` that returns tensors by
    name, see :mod:`sparkdl.slices.compression`. Slices are then cut between tensors."""

    # The model.
    weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = None
    """Weights to start from: a state_dict, or a safetensors file."""
    strict_weights: bool = True
    """Whether those must have every name of the model and no other."""
    freeze: Sequence[str] = ()
    """Parameters that are not trained: names of submodules or parameters, or patterns of them."""
    unfreeze: Sequence[str] = ()
    """Exceptions from ``freeze``."""
    activation_checkpointing: Sequence[str] = ()
    """Submodules whose activations are computed again in backward: names or patterns."""
    compile: bool | Mapping[str, Any] = False
    """``torch.compile`` the model on the executors; a mapping holds its options."""
    ema: float | None = None
    """Keep a moving average of the weights with this decay, such as 0.999: ``trained.ema``."""

    # The run.
    stop: Trigger = TEN_EPOCHS
    """When to stop; triggers combine with ``&``, ``|`` and ``~``."""
    validation: Validation | None = None
    """What to validate on while training."""
    checkpoint: Checkpoint | None = None
    """Where and when to write checkpoints."""
    histograms: Trigger | None = None
    """When the state shall hold histograms of weights and gradients, for TensorBoard say."""
    callbacks: Sequence[Callback] = ()
    """Called in order around the loop."""
    keep_optimizer_state: bool = False
    """Bring the optimizer's state back too, so that ``fit(data, start=trained)`` goes on with it."""
    seed: int = 0
    """Of the initial weights, the shuffling and every random draw inside the model."""

    _carried: list[CarriedRun] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        make_plain(self, *VALUES)
        for name in NAMES:
            object.__setattr__(self, name, plain_list(getattr(self, name)))
        raise_all(ParameterError, list(problems_of(self)))

    @property
    def feature_columns(self) -> tuple[str, ...]:
        if isinstance(self.features, Mapping):
            return tuple(self.features.values())
        return (self.features,) if isinstance(self.features, str) else tuple(self.features)

    @property
    def keywords(self) -> tuple[str, ...]:
        """Of the features, where the model takes them so."""
        return tuple(self.features) if isinstance(self.features, Mapping) else ()

    @property
    def signature(self) -> Signature:
        """How the model is called, with the lengths of sequences where they are wanted."""
        inputs = []
        for keyword, column in zip(self.keywords, self.feature_columns, strict=False):
            spec = self.columns.get(column)
            lengths = isinstance(spec, VaryingLength) and spec.lengths
            inputs += [keyword, f"{keyword}_lengths"] if lengths else [keyword]
        return Signature(tuple(inputs), self.output)

    @property
    def label_columns(self) -> tuple[str, ...]:
        if self.label is None:
            return ()
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def parts(self) -> dict[str, Any]:
        """The strategies of a gang, by their dimensions of the mesh."""
        return parts_of(self.strategy, self.mesh) if self.engine == "gang" else {}

    @property
    def policy(self) -> TrainingOptions:
        """What the tasks of an iteration need to know of this."""
        return TrainingOptions(
            accumulate=self.accumulate,
            local_steps=self.local_steps,
            precision=self.precision,
            wire=self.wire,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            l1=self.l1,
            l2=self.l2,
            on_nan=self.on_nan,
            ema=self.ema,
            sync_batchnorm=self.sync_batchnorm,
            class_weights=_table(self.class_weights),
            activation_checkpointing=tuple(self.activation_checkpointing),
            compile=self.compile,
        )

    def fit(
        self,
        data: DataFrame | RDD[Any],
        *,
        resume: str | os.PathLike[str] | None = None,
        start: TrainedModel | None = None,
        optimizer_state: bool | None = None,
        any_data: bool = False,
    ) -> TrainedModel:
        """Train on ``data``: a DataFrame, or an RDD of ``(features, label)``, of ``Sample``, or of
        records with the names of the columns (``Row``, named tuples, mappings).

        ``resume``: go on from a checkpoint, "latest" (of ``checkpoint``'s path; from the beginning
        where there is none) or a path; the bits are those of a run without a break. ``any_data``: the
        checkpoint may be of other rows, or of another batch size, seed or number of replicas: its state
        goes on with these. Where they are divided into batches otherwise, the epoch that was under way
        begins anew. ``start``: begin with an earlier result's weights; with its ``optimizer_state`` too
        where it was kept (None), always (True: an error where it was not), or never (False).

        The user's interrupt (Ctrl-C, a notebook's stop button; in the main thread) ends the training
        after the iteration under way, and the model comes as it stands: ``history.stopped`` says so. A
        second one raises KeyboardInterrupt at once.

        Raises :class:`sparkdl.UserError` before anything trains where the data, the model or a
        parameter cannot work, :class:`sparkdl.TrainingError` where an iteration fails for good, and
        :class:`sparkdl.CheckpointError` where a checkpoint cannot be written or read.
        """
        from sparkdl.train.fit import fit

        raise_all(ParameterError, list(problems_of_start(resume, start, optimizer_state)))
        return fit(self, data, resume, start, optimizer_state, any_data)

    def partial_fit(
        self, data: DataFrame | RDD[Any], *, resume: str | os.PathLike[str] | None = None
    ) -> TrainedModel:
        """One pass over ``data``, going on from the last ``partial_fit`` of this trainer.

        Weights, optimizer state, schedule, counters and history go on; ``stop`` plays no part. For
        ``foreachBatch`` of Structured Streaming. ``resume``: in the first call, a checkpoint of
        earlier ones ("latest" or a path). An empty batch changes nothing. A call costs the same however
        many came before it; a checkpoint holds the history of the last 10,000 iterations.
        """
        from sparkdl.train.fit import partial_fit

        raise_all(ParameterError, list(problems_of_start(resume)))
        return partial_fit(self, data, resume)


def _table(weights: Sequence[float] | Mapping[int, float] | None) -> tuple[float, ...] | None:
    if isinstance(weights, Mapping):
        return tuple(float(weights.get(i, 1.0)) for i in range(int(max(weights)) + 1))
    return None if weights is None else tuple(float(w) for w in weights)

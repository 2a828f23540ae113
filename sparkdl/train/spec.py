"""The description of a training: the model, the data columns, and how to train."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Self

import torch
from pyspark.resource import ResourceProfile
from torch import nn

from sparkdl.care import rules
from sparkdl.checkpoint import Checkpoint
from sparkdl.codec.describe import describe, describe_trainer, titled, two_columns
from sparkdl.consistency.base import Consistency
from sparkdl.consistency.synchronous import Synchronous
from sparkdl.data.columns.base import ColumnSpec
from sparkdl.data.sampling import Sampling
from sparkdl.errors import ParameterError, raise_all
from sparkdl.infer.new_forward import input_names, sparse_inputs
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.triggers import MaxEpoch, Trigger
from sparkdl.loop.validation import Validation
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.loss import PerReplica, StepLoss, inner
from sparkdl.model.recipe import Signature
from sparkdl.parallel.base import ParallelStrategy
from sparkdl.parallel.plan import parts_of
from sparkdl.slices.section import GradBucket

TEN_EPOCHS = MaxEpoch(10)


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The fields of a :class:`sparkdl.Trainer`, and what follows from them without data.

    Raises:
        ParameterError: A field has a value that cannot work, or fields do not go together.
    """

    # What is trained.
    model: Callable[[], nn.Module] | nn.Module = field(metadata=rules.MODEL)
    """A function or class that builds the module, or a module.

    A function is called without arguments and with seeded random numbers. A module is copied and not
    changed."""
    loss: Callable[..., Any] | None = field(default=None, metadata=rules.LOSS)
    """The loss ``loss(output, target)``, or ``loss(output)`` without a label; several labels arrive
    as a tuple.

    It returns the mean over the rows, or ``(sum, count)`` if the mean is over something else, such
    as tokens. With ``weight`` or ``class_weights``, a loss that is not one of torch's returns these
    for each row. :class:`sparkdl.ModelLoss` stands for the loss that the model itself computes, and
    :class:`sparkdl.PerReplica` for one that each replica computes over its own rows."""
    step: Callable[..., Any] | None = field(default=None, metadata=rules.STEP)
    """A function ``step(module, batch)`` that returns the loss, or named losses, in place of ``loss``.

    The batch is a dictionary of tensors: inputs by keyword, or by column where the model takes them by
    position, and labels by column. Each loss is a mean over the rows or ``(sum, count)``. Of a mapping
    of losses, the one called "loss" is minimized, else their sum; all others are in ``state.losses``
    and the history. :class:`sparkdl.PerReplica` around the function lets rows depend on each other."""
    optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]] = field(
        metadata=rules.OPTIMIZER
    )
    """A ``torch.optim`` class or a ``partial`` of one, which gets the trainable parameters.

    A function of the module works, too, if it returns an optimizer (for parameter groups) or a list
    of them. A mapping gives each submodule its own, by name: ``{"encoder": partial(SGD, lr=0.1), "":
    Adam}``."""
    schedule: Callable[[torch.optim.Optimizer], Any] | None = field(
        default=None, metadata=rules.SCHEDULE
    )
    """A ``partial`` of a ``torch.optim.lr_scheduler`` class, or a function of the optimizer that
    returns a scheduler."""
    schedule_per: str = field(default="iteration", metadata=rules.SCHEDULE_PER)
    """Step the schedule after each "iteration" or each "epoch". ReduceLROnPlateau steps at each
    validation."""
    schedule_metric: str | None = field(default=None, metadata=rules.SCHEDULE_METRIC)
    """The validation metric that ReduceLROnPlateau follows. None is the loss, if it is the only
    metric."""

    output: str | int | Callable[[Any], Any] | None = field(default=None, metadata=rules.OUTPUT)
    """The part of the model's result that is its output, for the loss, metrics and predictions.

    A string names a field of a mapping, a named tuple, a dataclass or a ``ModelOutput``. A number
    selects a member of a tuple. A function gets the whole result; it must be importable for the
    model to be saved. None is the whole result, which a loss may take apart."""

    # The data.
    features: str | Sequence[str] | Mapping[str, str] = field(
        default="features", metadata=rules.COLUMNS
    )
    """The feature column, or a list of columns that are passed by position: ``model(a, b)``. A
    mapping passes them by keyword: ``{"input_ids": "ids", "attention_mask": "mask"}``."""
    label: str | Sequence[str] | None = field(default="label", metadata=rules.COLUMNS)
    """The label column, a list of columns, or None."""
    weight: str | None = field(default=None, metadata=rules.WEIGHT)
    """The column with the weight of each sample, at least 0. The loss is then the weighted mean."""
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    """The conversion of columns to tensors, by column name, if the column's type does not determine
    it: :class:`sparkdl.Image`, :class:`sparkdl.Sequence`, :class:`sparkdl.Text`,
    :class:`sparkdl.Sparse`, :class:`sparkdl.Masked` or :class:`sparkdl.Convert`."""
    handle_invalid: str = field(default="error", metadata=rules.HANDLE_INVALID)
    """The way to handle rows that cannot be read (a damaged image, a null, NaN): "error" ends the fit,
    "skip" leaves them out, "keep" trains on zeros in place of such a feature. The log and
    ``history.invalid`` tell how many there were, and the first ten."""
    key: str | None = field(default=None, metadata=rules.WEIGHT)
    """The column that names a row in what ``handle_invalid`` tells. None is the column "path", if there
    is one, as in Spark's binary files; else the row's number."""
    augment: Callable[..., Any] | None = field(default=None, metadata=rules.AUGMENT)
    """A function that changes one sample (NumPy arrays) each time the sample is trained on:
    ``augment(*features, rng)`` returns the features. With features by keyword it is called as
    ``augment(**features, rng=rng)``. ``rng`` is a ``numpy.random.Generator`` that is seeded by
    sample and epoch. The generators of torch, NumPy and ``random`` are seeded likewise.
    :class:`sparkdl.Batched` makes it a function of all rows of a batch."""
    bucketing: int | None = field(default=None, metadata=rules.COUNT)
    """Sort windows of this many rows by length, so that a batch holds samples of similar length."""
    sampling: Sampling | None = field(default=None, metadata=rules.SAMPLING)
    """The way in which the rows of an epoch are drawn: :class:`sparkdl.Balanced` or
    :class:`sparkdl.Weighted`. None: an epoch has each row once."""
    class_weights: Sequence[float] | Mapping[int, float] | str | None = field(
        default=None, metadata=rules.CLASS_WEIGHTS
    )
    """The weight of each class: a list, array or tensor, or a mapping or Series from class number to
    weight. "balanced" counts the rows of the data: all classes together count the same.

    Each sample counts as much as its class. A mapping must name the last class; a lower class that
    it does not name counts 1."""

    # An iteration.
    batch_size: int = field(default=256, metadata=rules.COUNT)
    """The global batch size: samples of all replicas together in one step. The last batch of an
    epoch may be smaller."""
    replicas: int | str | None = field(default=None, metadata=rules.REPLICAS)
    """M, the number of replicas. None is the number in the checkpoint, if the run resumes from one;
    else as many as tasks run at once on the present executors, by cores and GPUs, or fewer if
    ``spark.default.parallelism`` is less (a gang ignores that setting). "auto" is what a plan finds
    fastest, see ``engine``."""
    min_ranks: int | None = field(default=None, metadata=rules.COUNT)
    """For a gang: the fewest task slots to continue with if executors are lost for good, or too few
    exist.

    The gang still has M ranks and gives the same bits. Several ranks then share a slot, each in a
    process of its own, so one executor needs the memory of that many models, and an iteration takes
    longer. None requires M slots; with fewer, the fit raises an error."""
    slices: int | None = field(default=None, metadata=rules.COUNT)
    """N, the number of slices of the parameters and the optimizer state, each updated by one task.
    None is as many as replicas, or 1 if the optimizer needs all parameters together. Not for a gang."""
    engine: str = field(default="shuffle", metadata=rules.ENGINE)
    """The engine: "shuffle" (Spark jobs that can be retried, so nothing is lost), "gang" (all
    replicas run at once and exchange data by torch.distributed; for fast networks and short steps)
    or "local" (in this process, for debugging). "auto" measures for some seconds and takes the faster
    of the first two, see :func:`sparkdl.plan`; ``history.plan`` has the choice, and a resumed run
    keeps it."""
    strategy: str | ParallelStrategy | Sequence[str | ParallelStrategy] = "ddp"
    """For a gang: how the ranks share the work; other engines ignore it.

    - "ddp": every rank updates all weights.
    - "zero1": each rank updates its part of the weights, and has the optimizer state of that part only.
    - "fsdp": each rank also has its part of the weights and gradients only.
    - "tensor": each rank computes its part of each layer.
    - "pipeline": each rank computes some of the layers.
    - "auto": what a plan finds fastest, see ``engine``.

    :class:`sparkdl.DDP`, :class:`sparkdl.FSDP`, :class:`sparkdl.Tensor` and
    :class:`sparkdl.Pipeline` have options. A list combines several of the last four."""
    mesh: Mapping[str, int] | None = field(default=None, metadata=rules.MESH)
    """For a gang: the number of ranks along each dimension, outermost first; other engines ignore
    it.

    The dimensions are "data" (copies of the model), "pipe" (pipeline stages), "shard" (for "fsdp")
    and "tensor"; their product is ``replicas``. With ``{"data": 2, "pipe": 2}``, ranks 0 and 1 are
    one pipeline and ranks 2 and 3 another. A dimension that is not named is 1, except that "data" is
    whatever remains. None puts all ranks along the strategy's own dimension."""
    accumulate: int = field(default=1, metadata=rules.COUNT)
    """The number of micro-batches that each replica's mini-batch is divided into. They are computed
    one after another, which saves memory."""
    local_steps: int = field(default=1, metadata=rules.COUNT)
    """The number of optimizer steps that each replica takes by itself before the replicas are
    averaged (local SGD). An iteration then uses ``local_steps`` batches of ``batch_size``. Not for a
    gang."""
    consistency: Consistency | None = field(default=None, metadata=rules.CONSISTENCY)
    """How replicas agree: :class:`sparkdl.Synchronous` (None), :class:`sparkdl.StaleSynchronous`,
    :class:`sparkdl.Asynchronous`, :class:`sparkdl.DiLoCo` or :class:`sparkdl.Gossip`."""
    clip_value: float | None = field(default=None, metadata=rules.POSITIVE)
    """Limit every element of the gradient to [-clip_value, clip_value]."""
    clip_norm: float | None = field(default=None, metadata=rules.POSITIVE)
    """Scale the gradient so that its norm over all parameters is at most this."""
    l1: float | Mapping[str, float] = field(default=0.0, metadata=rules.PENALTY)
    """Add ``l1 * sum |w|`` to the objective. A mapping sets it by pattern of parameter names:
    ``{"*.weight": 1e-5}``. Sparse tables are not penalized, and the reported loss excludes the
    penalty."""
    l2: float | Mapping[str, float] = field(default=0.0, metadata=rules.PENALTY)
    """Add ``l2 / 2 * sum w**2`` to the objective, in the same way as ``l1``."""
    resource_profile: ResourceProfile | None = field(default=None, metadata=rules.RESOURCE_PROFILE)
    """For a gang: the cores (torch's threads) and GPUs of each of its tasks, if they differ from
    those of other tasks. A ``pyspark.resource.ResourceProfile`` with task requests only; it needs a
    cluster. Other engines ignore it."""
    sync_batchnorm: bool = field(default=False, metadata=rules.FLAG)
    """For a gang: compute batch norm over the samples of all replicas instead of each replica's own."""
    on_nan: str = field(default="raise", metadata=rules.ON_NAN)
    """The reaction to a loss or gradient that is inf or NaN: "raise" an error that names iteration
    and replica, or "skip" the update."""
    precision: str = field(default="fp32", metadata=rules.PRECISION)
    """The type that the forward and backward passes compute in, by autocast: "fp32", "bf16" or
    "fp16" (with loss scaling). The weights stay in the model's dtype."""
    wire: str = field(default="fp32", metadata=rules.PRECISION)
    """The type that gradients are sent in, rounded to nearest: "fp32" (the model's dtype), "bf16" or
    "fp16". They are summed in the model's dtype, except where torch sums them in a gang: there in
    this type."""
    compression: Callable[[GradBucket], Mapping[str, torch.Tensor]] | None = field(
        default=None, metadata=rules.COMPRESSION
    )
    """A function that makes gradients smaller before they are sent: :class:`sparkdl.TopK`,
    :class:`sparkdl.PowerSGD`, or a function of a :class:`sparkdl.GradBucket` that returns tensors by
    name; see :mod:`sparkdl.slices.section`. Slices are then cut between tensors."""

    # The model.
    weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | None = field(
        default=None, metadata=rules.WEIGHTS
    )
    """The weights to start from: a state_dict, or the path of a safetensors file."""
    strict_weights: bool = field(default=True, metadata=rules.FLAG)
    """True requires ``weights`` to have every name of the model and no other."""
    freeze: Sequence[str] = field(default=(), metadata=rules.PATTERNS)
    """Parameters that are not trained: names of submodules or parameters, or patterns of names."""
    unfreeze: Sequence[str] = field(default=(), metadata=rules.PATTERNS)
    """Exceptions from ``freeze``."""
    buffers: Mapping[str, str | Callable[[torch.Tensor], torch.Tensor]] = field(
        default_factory=dict, metadata=rules.BUFFERS
    )
    """How replicas agree on buffers that a forward changes, by pattern of their names:
    ``{"*.codes": "first"}``. The first pattern that matches counts.

    - "first": the value of the first replica that had rows; the default, as in torch's DDP.
    - "mean": the mean, weighted by rows; the default for running statistics of torch's norms.
    - "min", "max": of each element; with stale gradients also of the value that there is by then.
    - "sum": the value before, and all that replicas have added to it.
    - A function gets the values of the replicas that had rows as one tensor, in their order along the
      first dimension, and returns one of them. With one such replica it is not called.

    A module can say so itself: ``sparkdl_buffers = {"codes": "first"}`` in its class."""
    activation_checkpointing: Sequence[str] = field(default=(), metadata=rules.PATTERNS)
    """Submodules whose activations are computed again in the backward pass, which saves memory:
    names or patterns."""
    compile: bool | Mapping[str, Any] = field(default=False, metadata=rules.COMPILE)
    """Compile the model with ``torch.compile`` on the executors; a mapping holds its options."""
    ema: float | None = field(default=None, metadata=rules.DECAY)
    """The decay of a moving average of the weights, such as 0.999; the result has it as
    ``trained.ema``."""

    # The run.
    stop: Trigger = field(default=TEN_EPOCHS, metadata=rules.STOP)
    """The trigger that ends the training; triggers combine with ``&``, ``|`` and ``~``."""
    validation: Validation | None = field(default=None, metadata=rules.VALIDATION)
    """The data and metrics to validate with during the training."""
    checkpoint: Checkpoint | None = field(default=None, metadata=rules.CHECKPOINT)
    """The place of checkpoints and the trigger that writes them."""
    histograms: Trigger | None = field(default=None, metadata=rules.HISTOGRAMS)
    """The trigger that adds histograms of weights and gradients to the state, for TensorBoard for
    example."""
    callbacks: Sequence[Callback] = field(default=(), metadata=rules.CALLBACKS)
    """Callbacks of the training loop, called in this order."""
    keep_optimizer_state: bool = field(default=False, metadata=rules.FLAG)
    """Return the optimizer state, too, so that ``fit(data, start=trained)`` continues with it."""
    seed: int = field(default=0, metadata=rules.SEED)
    """The seed of the initial weights, the shuffling, and every random draw inside the model."""

    def __post_init__(self) -> None:
        rules.make_fields_plain(self)
        raise_all(ParameterError, list(rules.problems_of(self)))

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults."""
        told = ", ".join(f"{name}={text}" for name, text in self.changed().items())
        return f"Trainer({told})"

    def _repr_html_(self) -> str:
        """Return the view in a notebook: the fields that differ from their defaults."""
        return titled("sparkdl.Trainer", two_columns(self.changed()))

    def changed(self) -> dict[str, str]:
        """Return the fields that differ from their defaults as text, secrets hidden."""
        told = describe_trainer(self)
        defaults = {f.name: _default(f) for f in fields(self) if f.init}
        return {
            name: text
            for name, text in told.items()
            if defaults[name] is MISSING or text != describe(defaults[name])
        }

    def settled(self) -> Self:
        """Return the trainer with a default in place of each "auto": the first form that can work."""
        if not rules.decided_later(self):
            return self
        forms = list(rules.settled_forms(self))
        return next((form for form in forms if not list(rules.problems_of(form))), forms[0])

    @property
    def number_of_replicas(self) -> int | None:
        """The number of replicas, where one is given."""
        return None if isinstance(self.replicas, str) else self.replicas

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """The names of the feature columns, as a tuple."""
        if isinstance(self.features, Mapping):
            return tuple(self.features.values())
        return (self.features,) if isinstance(self.features, str) else tuple(self.features)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keywords by which the model takes its features; empty if it takes them by position."""
        return tuple(self.features) if isinstance(self.features, Mapping) else ()

    @property
    def signature(self) -> Signature:
        """The way to call the model, with lengths and masks of sequences that have them."""
        names = self.input_names if self.keywords else ()
        return Signature(names, self.output, sparse_inputs(self.feature_columns, self.columns))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the model's inputs: keywords or columns, with lengths and masks."""
        return input_names(
            self.keywords or self.feature_columns, self.feature_columns, self.columns
        )

    @property
    def objective(self) -> Any:
        """The loss, or the step as a loss."""
        if self.step is None:
            return self.loss
        step = StepLoss(inner(self.step), self.input_names, self.label_columns)
        return PerReplica(step) if isinstance(self.step, PerReplica) else step

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The names of the label columns, as a tuple."""
        if self.label is None:
            return ()
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def parts(self) -> dict[str, ParallelStrategy]:
        """The strategies of a gang by their dimension of the mesh; empty for other engines."""
        return parts_of(self.strategy, self.mesh) if self.engine == "gang" else {}

    @property
    def consistency_model(self) -> Consistency:
        """The consistency model, also if none is given."""
        return Synchronous() if self.consistency is None else self.consistency

    @property
    def options(self) -> TrainingOptions:
        """The options that the tasks of an iteration need."""
        model = self.consistency_model
        return TrainingOptions(
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            local_steps=self.local_steps * model.inner_steps,
            outer=model.outer_optimizer is not None,
            topology=model.topology,
            behind=model.keep > 1,
            buffers=dict(self.buffers),
            class_weights=_table(self.class_weights),
            activation_checkpointing=tuple(self.activation_checkpointing),
        )


_AS_THEY_ARE = (
    *("accumulate", "precision", "wire", "clip_norm", "clip_value", "l1", "l2", "on_nan", "ema"),
    *("sync_batchnorm", "compile"),
)
"""The fields of a trainer that its tasks need as they are."""


def _default(one: Field[Any]) -> Any:
    """Return the default of a dataclass field; ``MISSING`` if it has none."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def _table(weights: Sequence[float] | Mapping[int, float] | str | None) -> tuple[float, ...] | None:
    """Return the weight of every class, in the order of the class numbers; None: it is not known."""
    if isinstance(weights, str):
        return None
    if isinstance(weights, Mapping):
        return tuple(float(weights.get(i, 1.0)) for i in range(int(max(weights)) + 1))
    return None if weights is None else tuple(float(w) for w in weights)

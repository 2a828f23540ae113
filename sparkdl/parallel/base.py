"""The strategies of a gang, with their options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch

from sparkdl.errors import ModelError, nearest
from sparkdl.model.flat import Layout
from sparkdl.model.options import PRECISIONS
from sparkdl.plain import make_plain
from sparkdl.slices.optimizer import OptimizerSpec

STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "pipeline")
SCHEDULES = ("1f1b", "gpipe")
WAYS = ("column", "row")


@dataclass(frozen=True, kw_only=True)
class DDP:
    """Data parallelism: every rank has the whole model.

    Torch's ``DistributedDataParallel`` sums the gradients, bucket by bucket while backward still
    runs (Li et al., 2020).

    Attributes:
        bucket_cap_mb: The size of a bucket, in MiB. Smaller buckets are sent earlier, larger ones
            more efficiently. If a model has up to 4 MiB of gradients, or ``bucket_cap_mb`` if that
            is less, they are summed at once after backward, without ``DistributedDataParallel``,
            unless ``static_graph`` is set.
        static_graph: Promises that every pass uses the same parameters in the same way, so that
            torch looks for unused ones only once. It cannot be combined with ``accumulate``.
        find_unused_parameters: Allows passes to use different parameters, as with layers that are
            dropped at random. It is set automatically if a trial pass leaves some unused. It costs
            a walk through the graph in each pass.
        shard_optimizer: Makes each rank update its part of the weights and hold the optimizer state
            of that part only (ZeRO, stage 1: Rajbhandari et al., 2020). This is the strategy
            "zero1". With a strategy that splits the model, the copies of the model share the update
            in this way.
    """

    word: ClassVar[str] = "ddp"
    dimension: ClassVar[str] = "data"
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    find_unused_parameters: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        make_plain(self)


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """Fully sharded data parallelism: ranks have shards of weights, gradients and optimizer state.

    Torch's ``fully_shard`` does it (ZeRO, stages 2 and 3: Rajbhandari et al., 2020; Zhao et al., 2023).

    With ``Trainer(mesh={"data": 2, "shard": 4})`` ranks 0 to 3 have one sharded model and ranks 4
    to 7 another. Weights are gathered among four ranks, for example on one node, and only sums of
    gradients go further (hybrid sharding).

    Attributes:
        units: Submodules, by name or pattern, each of which is gathered before it computes and
            freed afterwards. The default is the blocks of the model's ``Sequential`` and
            ``ModuleList`` that have 100,000 parameters or more and share none of them with other
            parts. What is in no unit is gathered for the whole pass.
        reshard_after_forward: Whether to gather each unit again in backward (stage 3), or to keep
            it from forward to backward (stage 2), which is faster and needs more memory. In a
            pipeline units are always kept.
        param_dtype: The dtype in which weights are gathered and used: "fp32" (the model's dtype),
            "bf16" or "fp16". The shards keep their dtype.
        cpu_offload: Keeps weights, gradients and optimizer state in the memory of the executor,
            which also updates them. A GPU has only the unit that it computes with, and activations
            (ZeRO-Offload: Ren et al., 2021). This is slower, and meant for models whose shards do
            not fit the GPUs.
    """

    word: ClassVar[str] = "fsdp"
    dimension: ClassVar[str] = "shard"
    units: Sequence[str] = ()
    reshard_after_forward: bool = True
    param_dtype: str = "fp32"
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        make_plain(self)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Tensor parallelism: layers are split, and each rank computes its part of every one of them.

    Torch's ``parallelize_module`` does it (Shoeybi et al., 2019). All ranks see all samples of a
    mini-batch. Each rank has the weights, gradients and optimizer state of its parts of the layers
    that are split, and of all other layers.

    Attributes:
        plan: How submodules, by name or pattern, are split: "column" (the outputs of an
            ``nn.Linear`` or an ``nn.Embedding``), "row" (the inputs of an ``nn.Linear``, or the
            rows of an ``nn.Embedding``; the outputs are summed), or a style of
            :mod:`torch.distributed.tensor.parallel`. A layer that is split by column is followed by
            one that is split by row, with only element-wise operations between them. The default is
            the pairs of ``nn.Linear`` for which this is known: in a ``Sequential``, with an
            activation between them, and in torch's transformer layers.
    """

    word: ClassVar[str] = "tensor"
    dimension: ClassVar[str] = "tensor"
    plan: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline parallelism: the model is split into stages, and micro-batches flow through them.

    Torch's pipelining does it (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., 2019). A rank has
    only the weights, gradients and optimizer state of its stages, and the ranks work at the same
    time. An ``nn.Sequential`` is split between its members. Another model is split between the
    modules that its forward calls, which is traced with torch.fx.

    With ``Trainer(mesh={"data": 2, "pipe": 2})`` ranks 0 and 1 are one pipeline and ranks 2 and 3
    another, each of which takes half of every mini-batch (hybrid parallelism).

    Attributes:
        split: The names of the modules with which the second and later stages begin. By default the
            stages have equal work.
        micro_batches: The number of micro-batches in a mini-batch. With S stages a rank is idle for
            (S - 1) / (micro_batches + S - 1) of the time.
        schedule: "1f1b", in which a stage runs backward as soon as it can and holds the activations
            of at most S micro-batches, or "gpipe", which first runs all forward and then all
            backward passes.
        stages_per_rank: The number of stages on each rank. With 2, two ranks have stages 0 and 2,
            and 1 and 3, respectively: ranks are idle for less time, but there are more messages
            (interleaved: Narayanan et al., 2021).
    """

    word: ClassVar[str] = "pipeline"
    dimension: ClassVar[str] = "pipe"
    split: Sequence[str] = ()
    micro_batches: int = 4
    schedule: str = "1f1b"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        make_plain(self)


Strategy: TypeAlias = DDP | FSDP | Tensor | Pipeline


def strategy_of(word: str) -> Strategy:
    """Return the strategy that a word stands for."""
    known: dict[str, Strategy] = {"fsdp": FSDP(), "tensor": Tensor(), "pipeline": Pipeline()}
    return known.get(word, DDP(shard_optimizer=word == "zero1"))


def problems_of_strategy(strategy: Any) -> Iterator[str]:
    """Yield the problems of a strategy, or of the word for one."""
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        name = strategy.__name__
        yield f"strategy is the class {name}: give an instance, sparkdl.{name}()."
    elif isinstance(strategy, DDP):
        yield from (f"strategy=DDP({problem}" for problem in _of_ddp(strategy))
    elif isinstance(strategy, FSDP):
        yield from (f"strategy=FSDP({problem}" for problem in _of_fsdp(strategy))
    elif isinstance(strategy, Tensor):
        yield from (f"strategy=Tensor({problem}" for problem in _of_tensor(strategy))
    elif isinstance(strategy, Pipeline):
        yield from (f"strategy=Pipeline({problem}" for problem in _of_pipeline(strategy))
    elif not isinstance(strategy, str) or strategy not in STRATEGIES:
        yield (
            f'strategy="{strategy}": use one of {", ".join(STRATEGIES)}, sparkdl.DDP(...), '
            "sparkdl.FSDP(...), sparkdl.Tensor(...) or sparkdl.Pipeline(...)."
            f"{nearest(str(strategy), STRATEGIES)}"
        )


def _of_ddp(strategy: DDP) -> Iterator[str]:
    size = strategy.bucket_cap_mb
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < math.inf:
        yield f"bucket_cap_mb={size!r}): give a number of megabytes above 0."
    yield from _flags(strategy, "static_graph", "find_unused_parameters", "shard_optimizer")
    if strategy.static_graph is True and strategy.find_unused_parameters is True:
        yield "static_graph=True, find_unused_parameters=True): passes are alike, or they are not."


def _of_fsdp(strategy: FSDP) -> Iterator[str]:
    units = strategy.units
    if not isinstance(units, (list, tuple)) or not all(isinstance(n, str) for n in units):
        yield f'units={units!r}): give a list of names or patterns, such as ["layers.*"].'
    yield from _flags(strategy, "reshard_after_forward", "cpu_offload")
    if strategy.param_dtype not in PRECISIONS:
        yield f'param_dtype="{strategy.param_dtype}"): use one of {", ".join(PRECISIONS)}.'


def _of_tensor(strategy: Tensor) -> Iterator[str]:
    plan = strategy.plan
    if not isinstance(plan, Mapping) or not all(isinstance(name, str) for name in plan):
        yield f'plan={plan!r}): give ways by name or pattern, such as {{"0": "column", "2": "row"}}.'
        return
    for name, way in plan.items():
        torch_style = any(kind.__name__ == "ParallelStyle" for kind in type(way).__mro__)
        if not torch_style and way not in WAYS:
            yield (
                f'plan={{"{name}": {way!r}}}): use "column", "row", or a style of '
                f"torch.distributed.tensor.parallel.{nearest(str(way), WAYS)}"
            )


def _of_pipeline(strategy: Pipeline) -> Iterator[str]:
    split = strategy.split
    if not isinstance(split, (list, tuple)) or not all(isinstance(n, str) for n in split):
        yield f'split={split!r}): give a list of names of modules, such as ["3", "6"].'
    yield from _counts(strategy, "micro_batches", "stages_per_rank")
    if strategy.schedule not in SCHEDULES:
        yield f'schedule="{strategy.schedule}"): use one of {", ".join(SCHEDULES)}.'


def _flags(strategy: Strategy, *names: str) -> Iterator[str]:
    for name in names:
        if not isinstance(getattr(strategy, name), bool):
            yield f"{name}={getattr(strategy, name)!r}): give True or False."


def _counts(strategy: Pipeline, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(strategy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name}={value!r}): give a whole number of at least 1."


def check_elementwise(word: str, optimizer: OptimizerSpec) -> None:
    """Check that an optimizer treats every element by itself.

    ``word`` is the word for the strategy, also in the checks below.

    Raises:
        sparkdl.ModelError: If the optimizer needs whole tensors.
    """
    if not (optimizer.elementwise and optimizer.separate):
        raise ModelError(
            f'strategy="{word}" cuts tensors, and optimizer {optimizer.name} needs whole ones: use '
            'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.'
        )


def check_dense(word: str, layout: Layout, instead: str = "zero1") -> None:
    """Check that no embedding is sparse.

    Args:
        word: The word for the strategy.
        layout: The layout of the model.
        instead: The strategy that the error message suggests.

    Raises:
        sparkdl.ModelError: If one is.
    """
    for segment in layout.segments:
        if segment.sparse:
            raise ModelError(
                f'strategy="{word}" does not go with the embedding '
                f'"{segment.name.rpartition(".")[0]}", which has sparse=True: use '
                f'strategy="{instead}", or sparse=False.'
            )


def check_rows(word: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that every parameter has rows.

    Raises:
        sparkdl.ModelError: If one is a scalar.
    """
    for name, parameter in parameters:
        if not parameter.ndim:
            raise ModelError(
                f'strategy="{word}" cuts parameters by rows, and "{name}" is a single number: give it '
                "the shape [1], or make it a buffer."
            )

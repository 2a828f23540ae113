"""How a gang shares the work, where that takes more than a word."""

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
    """Every rank has the whole model; torch's ``DistributedDataParallel`` sums the gradients, bucket by
    bucket while backward goes on (Li et al., 2020).

    ``bucket_cap_mb``: the size of a bucket, in MiB; smaller ones leave earlier, larger ones travel
    better. Of a model with up to 4 MiB of gradients, or ``bucket_cap_mb`` where that is less, all are
    summed at once after backward, without ``DistributedDataParallel``; not with ``static_graph``.
    ``static_graph``: every pass uses the same parameters in the same way, so that torch looks
    once; not with ``accumulate``. ``find_unused_parameters``: passes differ in which parameters they
    use, as with layers that are dropped at random; by itself that is so where one trial pass leaves
    some unused. It costs a walk through the graph each time. ``shard_optimizer``: each rank updates
    its part of the weights and keeps the optimizer's state of that part only (ZeRO, stage 1:
    Rajbhandari et al., 2020), which is the strategy "zero1". Beside another strategy copies of what
    that cuts share the update so.
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
    """Shard weights, gradients and optimizer state over the ranks of a gang, as torch's
    ``fully_shard`` does (ZeRO, stages 2 and 3: Rajbhandari et al., 2020; Zhao et al., 2023).

    ``units``: submodules, by name or pattern, each of which is gathered whole before it computes and
    let go of afterwards; by default the blocks of the model's ``Sequential`` and ``ModuleList`` with
    100,000 parameters and more that share none of them with other parts. What is in no unit is
    gathered for the whole pass.
    ``reshard_after_forward``: gather each unit again in backward (stage 3), or keep it from forward to
    backward (False, stage 2: faster, more memory; so it always is in a pipeline). ``param_dtype``: what
    weights are gathered and computed with in, "fp32" (the model's dtype), "bf16" or "fp16"; the shards
    stay as they are. ``cpu_offload``: weights, gradients and optimizer state are in the memory of the
    executor, which updates them too; a GPU has the unit that it computes with, and activations (ZeRO-
    Offload: Ren et al., 2021). For models whose shards do not fit the GPUs; slower.
    With ``Trainer(mesh={"data": 2, "shard": 4})`` ranks 0 to 3 have one cut model and ranks 4 to 7
    another: weights are gathered among four, on one node say, and sums of gradients alone go further
    (hybrid sharding).
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
    """Cut layers over the ranks, so that each computes its part of every one, with torch's
    ``parallelize_module`` (Shoeybi et al., 2019). All ranks see all samples of a mini-batch; each has
    the weights, gradients and optimizer state of its parts of the layers that are cut, and the whole
    of the others.

    ``plan``: how submodules, by name or pattern, are cut: "column" (an ``nn.Linear``'s outputs, or an
    ``nn.Embedding``'s), "row" (an ``nn.Linear``'s inputs, or an ``nn.Embedding``'s rows; what comes out
    is summed), or a style of :mod:`torch.distributed.tensor.parallel`. A layer cut by column is
    followed by one cut by row, with nothing between them but what treats every element by itself. By
    default the pairs of ``nn.Linear`` of which that can be seen: in a ``Sequential``, with an
    activation between them, and in torch's transformer layers.
    """

    word: ClassVar[str] = "tensor"
    dimension: ClassVar[str] = "tensor"
    plan: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Cut the model into stages, and let micro-batches flow through them, with torch's pipelining
    (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., 2019). A rank has the weights, gradients and
    optimizer state of its stages alone, and works while others do. An ``nn.Sequential`` is cut
    between its members, another model between the modules that its forward calls, which is followed
    with torch.fx.

    ``split``: the modules, by name, with which the second and later stages begin; by default the stages
    have equal work. ``micro_batches``: how many a mini-batch is cut into; with S stages a rank idles
    (S - 1) of (micro_batches + S - 1) of the time. ``schedule``: "1f1b", in which a stage goes backward
    as soon as it can and keeps the activations of S micro-batches at most, or "gpipe", first all
    forward, then all backward. ``stages_per_rank``: with 2, ranks 0 and 1 have stages 0 and 2, and 1
    and 3: less idling, more messages (interleaved: Narayanan et al., 2021). With
    ``Trainer(mesh={"data": 2, "pipe": 2})`` ranks 0 and 1 are one pipeline and ranks 2 and 3 another,
    each of which takes half of every mini-batch: hybrid parallelism.
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
    """What a word stands for."""
    known: dict[str, Strategy] = {"fsdp": FSDP(), "tensor": Tensor(), "pipeline": Pipeline()}
    return known.get(word, DDP(shard_optimizer=word == "zero1"))


def problems_of_strategy(strategy: Any) -> Iterator[str]:
    """What is wrong with one, or with the word for one."""
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
    """Raise :class:`sparkdl.ModelError` for an optimizer that looks at whole tensors. ``word``: the
    strategy's; so for what follows."""
    if not (optimizer.elementwise and optimizer.separate):
        raise ModelError(
            f'strategy="{word}" cuts tensors, and optimizer {optimizer.name} needs whole ones: use '
            'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.'
        )


def check_dense(word: str, layout: Layout, instead: str = "zero1") -> None:
    """Raise :class:`sparkdl.ModelError` for a sparse table. ``instead``: a strategy for such models."""
    for segment in layout.segments:
        if segment.sparse:
            raise ModelError(
                f'strategy="{word}" does not go with the embedding '
                f'"{segment.name.rpartition(".")[0]}", which has sparse=True: use '
                f'strategy="{instead}", or sparse=False.'
            )


def check_rows(word: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise :class:`sparkdl.ModelError` for a parameter without rows."""
    for name, parameter in parameters:
        if not parameter.ndim:
            raise ModelError(
                f'strategy="{word}" cuts parameters by rows, and "{name}" is a single number: give it '
                "the shape [1], or make it a buffer."
            )

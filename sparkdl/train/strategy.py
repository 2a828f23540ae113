"""How a gang shares the work, where that takes more than a word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from sparkdl.errors import ParameterError, nearest
from sparkdl.replica.policy import PRECISIONS

STRATEGIES = ("ddp", "zero1", "fsdp", "pipeline")
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class DDP:
    """Every rank has the whole model; torch's ``DistributedDataParallel`` sums the gradients, bucket by
    bucket while backward goes on (Li et al., 2020).

    ``bucket_cap_mb``: the size of a bucket, in MiB; smaller ones leave earlier, larger ones travel
    better. ``static_graph``: every pass uses the same parameters in the same way, so that torch looks
    once. ``shard_optimizer``: each rank updates its part of the weights and keeps the optimizer's
    state of that part only (ZeRO, stage 1: Rajbhandari et al., 2020), which is the strategy "zero1".
    """

    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    shard_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class FSDP:
    """Shard weights, gradients and optimizer state over the ranks of a gang, as torch's
    ``fully_shard`` does (ZeRO, stages 2 and 3: Rajbhandari et al., 2020; Zhao et al., 2023).

    ``units``: submodules, by name or pattern, each of which is gathered whole before it computes and
    let go of afterwards; by default the blocks of the model's ``Sequential`` and ``ModuleList`` with
    100,000 parameters and more that share none of them with other parts. What is in no unit is
    gathered for the whole pass.
    ``reshard_after_forward``: gather each unit again in backward (stage 3), or keep it from forward to
    backward (False, stage 2: faster, more memory). ``param_dtype``: what weights are gathered and
    computed with in, "fp32" (the model's dtype), "bf16" or "fp16"; the shards stay as they are.
    ``copies``: of the cut model. With 2, and 8 ranks, ranks 0 to 3 have one and ranks 4 to 7 the other:
    weights are gathered among four, on one node say, and sums of gradients alone go further (hybrid
    sharding).
    """

    word: ClassVar[str] = "fsdp"
    units: Sequence[str] = ()
    reshard_after_forward: bool = True
    param_dtype: str = "fp32"
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Cut the model, an ``nn.Sequential``, into stages, and let micro-batches flow through them, with
    torch's pipelining (GPipe: Huang et al., 2019; 1F1B: Narayanan et al., 2019). A rank has the
    weights, gradients and optimizer state of its stages alone, and works while others do.

    ``split``: the modules, by name, with which the second and later stages begin; by default the stages
    have equal work. ``micro_batches``: how many a mini-batch is cut into; with S stages a rank idles
    (S - 1) of (micro_batches + S - 1) of the time. ``schedule``: "1f1b", in which a stage goes backward
    as soon as it can and keeps the activations of S micro-batches at most, or "gpipe", first all
    forward, then all backward. ``stages_per_rank``: with 2, ranks 0 and 1 have stages 0 and 2, and 1
    and 3: less idling, more messages (interleaved: Narayanan et al., 2021). ``copies``: of the
    pipeline. With 2, and 4 ranks, ranks 0 and 1 are one and ranks 2 and 3 another, each of which
    takes half of every mini-batch: hybrid parallelism.
    """

    word: ClassVar[str] = "pipeline"
    split: Sequence[str] = ()
    micro_batches: int = 4
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    copies: int = 1

    def stages(self, ranks: int) -> int:
        """Of each pipeline, where the gang has so many ranks."""
        return ranks // self.copies * self.stages_per_rank


Strategy: TypeAlias = DDP | FSDP | Pipeline


def strategy_of(strategy: str | Strategy) -> Strategy:
    """What a word stands for."""
    if isinstance(strategy, str):
        known: dict[str, Strategy] = {"fsdp": FSDP(), "pipeline": Pipeline()}
        return known.get(strategy, DDP(shard_optimizer=strategy == "zero1"))
    return strategy


def check_ranks(strategy: FSDP | Pipeline, ranks: int) -> None:
    """Raise :class:`sparkdl.ParameterError` where the copies do not fit the number of ranks."""
    if ranks % strategy.copies:
        raise ParameterError(
            f"strategy={type(strategy).__name__}(copies={strategy.copies}) with {ranks} replicas: each "
            "copy needs as many ranks as the others."
        )


def problems_of(strategy: Any) -> Iterator[str]:
    """What is wrong with ``Trainer.strategy``."""
    if strategy in (DDP, FSDP, Pipeline):
        name = strategy.__name__
        yield f"strategy is the class {name}: give an instance, sparkdl.{name}()."
    elif isinstance(strategy, DDP):
        yield from (f"strategy=DDP({problem}" for problem in _of_ddp(strategy))
    elif isinstance(strategy, FSDP):
        yield from (f"strategy=FSDP({problem}" for problem in _of_fsdp(strategy))
    elif isinstance(strategy, Pipeline):
        yield from (f"strategy=Pipeline({problem}" for problem in _of_pipeline(strategy))
    elif not isinstance(strategy, str) or strategy not in STRATEGIES:
        yield (
            f'strategy="{strategy}": use one of {", ".join(STRATEGIES)}, sparkdl.DDP(...), '
            f"sparkdl.FSDP(...) or sparkdl.Pipeline(...).{nearest(str(strategy), STRATEGIES)}"
        )


def _of_ddp(strategy: DDP) -> Iterator[str]:
    size = strategy.bucket_cap_mb
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < math.inf:
        yield f"bucket_cap_mb={size!r}): give a number of megabytes above 0."
    for name in ("static_graph", "shard_optimizer"):
        if not isinstance(getattr(strategy, name), bool):
            yield f"{name}={getattr(strategy, name)!r}): give True or False."


def _of_fsdp(strategy: FSDP) -> Iterator[str]:
    units = strategy.units
    if not isinstance(units, (list, tuple)) or not all(isinstance(n, str) for n in units):
        yield f'units={units!r}): give a list of names or patterns, such as ["layers.*"].'
    if not isinstance(strategy.reshard_after_forward, bool):
        yield f"reshard_after_forward={strategy.reshard_after_forward!r}): give True or False."
    yield from _counts(strategy, "copies")
    if strategy.param_dtype not in PRECISIONS:
        yield f'param_dtype="{strategy.param_dtype}"): use one of {", ".join(PRECISIONS)}.'


def _of_pipeline(strategy: Pipeline) -> Iterator[str]:
    split = strategy.split
    if not isinstance(split, (list, tuple)) or not all(isinstance(n, str) for n in split):
        yield f'split={split!r}): give a list of names of modules, such as ["3", "6"].'
    yield from _counts(strategy, "micro_batches", "stages_per_rank", "copies")
    if strategy.schedule not in SCHEDULES:
        yield f'schedule="{strategy.schedule}"): use one of {", ".join(SCHEDULES)}.'


def _counts(strategy: FSDP | Pipeline, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(strategy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name}={value!r}): give a whole number of at least 1."

"""How a gang shares the work, where that takes more than a word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import nearest
from sparkdl.replica.policy import PRECISIONS

STRATEGIES = ("ddp", "zero1", "fsdp")


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

    units: Sequence[str] = ()
    reshard_after_forward: bool = True
    param_dtype: str = "fp32"
    copies: int = 1


def strategy_of(strategy: str | DDP | FSDP) -> DDP | FSDP:
    """What a word stands for."""
    if isinstance(strategy, str):
        return FSDP() if strategy == "fsdp" else DDP(shard_optimizer=strategy == "zero1")
    return strategy


def problems_of(strategy: Any) -> Iterator[str]:
    """What is wrong with ``Trainer.strategy``."""
    if strategy in (DDP, FSDP):
        name = strategy.__name__
        yield f"strategy is the class {name}: give an instance, sparkdl.{name}()."
    elif isinstance(strategy, DDP):
        yield from (f"strategy=DDP({problem}" for problem in _of_ddp(strategy))
    elif isinstance(strategy, FSDP):
        yield from (f"strategy=FSDP({problem}" for problem in _of_fsdp(strategy))
    elif not isinstance(strategy, str) or strategy not in STRATEGIES:
        yield (
            f'strategy="{strategy}": use one of {", ".join(STRATEGIES)}, sparkdl.DDP(...) or '
            f"sparkdl.FSDP(...).{nearest(str(strategy), STRATEGIES)}"
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
    copies = strategy.copies
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        yield f"copies={copies!r}): give a whole number of at least 1."
    if strategy.param_dtype not in PRECISIONS:
        yield f'param_dtype="{strategy.param_dtype}"): use one of {", ".join(PRECISIONS)}.'

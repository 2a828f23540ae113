"""Fully sharded data parallelism: the units of a sharded model, and checks of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from sparkdl.errors import ModelError, in_quotes, known_arguments
from sparkdl.model.buffers import PRECISIONS, TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.model.preparation import matching
from sparkdl.parallel.base import (
    ParallelStrategy,
    check_dense,
    check_elementwise,
    check_torch,
    names_problems,
)
from sparkdl.plain import make_plain
from sparkdl.slices.optimizer import OptimizerSpec

UNIT_PARAMETERS = 100_000
"""The smallest number of parameters in a unit. Smaller blocks would not be worth a message."""


@known_arguments
@dataclass(frozen=True, kw_only=True)
class FSDP(ParallelStrategy):
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
    rank_half: ClassVar[str] = "sparkdl.engines.gang.strategies.fsdp:FSDPRank"
    units: Sequence[str] = ()
    reshard_after_forward: bool = True
    param_dtype: str = "fp32"
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        make_plain(self)

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.parallel.base.ParallelStrategy`, also for the methods below."""
        yield from names_problems(self, "units", 'names or patterns, such as ["layers.*"]')
        if self.param_dtype not in PRECISIONS:
            yield f"param_dtype={in_quotes(self.param_dtype)}): use one of {', '.join(PRECISIONS)}."

    def problems_beside(self, words: str) -> Iterator[str]:
        if self.cpu_offload:
            yield (
                f"strategy: {words} together keep their weights where they compute: leave out "
                "cpu_offload=True."
            )

    def check_model(
        self, module: nn.Module, layout: Layout, optimizer: OptimizerSpec, options: TrainingOptions
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        check_torch(self.word, hasattr(FSDPModule, "set_reduce_scatter_unused_params"))
        check_elementwise(self.word, optimizer)
        check_dense(self.word, layout)
        trainable = [segment for segment in layout.segments if segment.kind == "parameter"]
        for segment in trainable:
            if segment.dtype != trainable[0].dtype:
                raise ModelError(
                    f'strategy="fsdp" needs one dtype: "{trainable[0].name}" is {trainable[0].dtype} '
                    f'and "{segment.name}" is {segment.dtype}.'
                )
        for parameter in whole_parameters(module) if self.cpu_offload else ():
            name = next(name for name, each in module.named_parameters() if each is parameter)
            raise ModelError(
                f'strategy=FSDP(cpu_offload=True): "{name}" is a single number, of which every rank '
                "needs the whole where it computes: give it the shape [1], or leave out "
                "cpu_offload=True."
            )
        _check_shared(module, units_of(module, self.units))


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are a single number, which cannot be cut: every rank has them."""
    return [parameter for parameter in module.parameters() if not parameter.ndim]


def units_of(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the submodules that are units, inner ones first."""
    if not patterns:
        uses = _uses(module)
        return [block for block in _blocks(module) if _uses(block).items() <= uses.items()]
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        for name in matching("strategy=FSDP: no submodule", pattern, names):
            child = module.get_submodule(name)
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                raise ModelError(
                    f'strategy=FSDP: "{name}" is a list of modules, which is never called itself: '
                    f'name its members, "{name}.*".'
                )
            found[name] = child
    with_parameters = {n: m for n, m in found.items() if next(m.parameters(), None) is not None}
    return [with_parameters[n] for n in sorted(with_parameters, key=lambda n: -n.count("."))]


def _uses(module: nn.Module) -> Counter[int]:
    """Count the places in which each parameter is used."""
    return Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest blocks in the model's lists."""
    for child in module.children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and _is_large(child):
            yield child
        else:
            yield from _blocks(child)


def _is_large(module: nn.Module) -> bool:
    called = not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return called and sum(p.numel() for p in module.parameters()) >= UNIT_PARAMETERS


def _check_shared(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Check that no two units share a parameter, which one would gather and both would use."""
    holders: dict[int, set[int]] = {}
    for number, unit in enumerate([*units, module]):
        inside = {id(m) for other in units[:number] for m in other.modules()}
        for child in unit.modules():
            if id(child) not in inside:
                for parameter in child.parameters(recurse=False):
                    holders.setdefault(id(parameter), set()).add(number)
    for name, parameter in module.named_parameters():
        if len(holders[id(parameter)]) > 1:
            raise ModelError(
                f'strategy="fsdp": "{name}" is shared by several units. Name units that hold all of '
                'its places, strategy=sparkdl.FSDP(units=[...]), or use strategy="zero1".'
            )

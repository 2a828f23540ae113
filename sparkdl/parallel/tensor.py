"""Tensor parallelism: the division of layers over ranks, the default plan for a model, and checks.

A linear layer that is split *by column* computes some of its outputs on each rank. One that is
split *by row* takes these as its inputs, and the ranks sum its outputs (Megatron-LM: Shoeybi et
al., 2019). Plain torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sparkdl.errors import ModelError, ParameterError, kind_of, known_arguments, nearest, shown
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.model.preparation import matching
from sparkdl.parallel.base import Mesh, ParallelStrategy, check_dense, check_elementwise
from sparkdl.slices.optimizer import OptimizerSpec

ELEMENTWISE = (
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
"""The modules that treat every input element by itself, so that a rank can do so for its part."""
WAYS = ("column", "row")
FEED_FORWARD = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Tensor(ParallelStrategy):
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
    rank_half: ClassVar[str] = "sparkdl.engines.gang.strategies.tensor:TensorRank"
    plan: Mapping[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.parallel.base.ParallelStrategy`, also for the methods below."""
        plan = self.plan
        if not isinstance(plan, Mapping) or not all(isinstance(name, str) for name in plan):
            yield (
                f"plan={shown(plan)}): give ways by name or pattern, such as "
                '{"0": "column", "2": "row"}.'
            )
            return
        for name, way in plan.items():
            torch_style = any(kind.__name__ == "ParallelStyle" for kind in type(way).__mro__)
            if not torch_style and way not in WAYS:
                yield (
                    f'plan={{"{name}": {shown(way)}}}): use "column", "row", or a style of '
                    f"torch.distributed.tensor.parallel.{nearest(str(way), WAYS)}"
                )

    def check_model(
        self, module: nn.Module, layout: Layout, optimizer: OptimizerSpec, options: TrainingOptions
    ) -> None:
        check_elementwise(self.word, optimizer)
        check_dense(self.word, layout)
        _check_ways(self, module)

    def check_mesh(self, module: nn.Module, mesh: Mesh) -> None:
        ranks = mesh.tensor
        for name, way in plan_of(self, module, ranks).items():
            if not isinstance(way, str):
                continue
            child = module.get_submodule(name)
            outputs, inputs = (
                (child.out_features, child.in_features)
                if isinstance(child, nn.Linear)
                else (child.embedding_dim, child.num_embeddings)
            )
            width, what = (outputs, "outputs") if way == "column" else (inputs, "inputs")
            if width % ranks:  # type: ignore[operator]
                raise ParameterError(
                    f'strategy="tensor" with {ranks} parts: "{name}" has {width} {what}, which {ranks} '
                    "does not divide. Choose another width, or leave it out of the plan."
                )


def plan_of(strategy: Tensor, module: nn.Module, ranks: int) -> dict[str, Any]:
    """Return how submodules are split, by name: "column", "row", or a style of torch.

    The default plan has only layers that ``ranks`` divides.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, Any] = {}
    for pattern, way in strategy.plan.items():
        found |= dict.fromkeys(matching("strategy=Tensor: no submodule", pattern, names), way)
    if not strategy.plan:
        for column, row, width in _pairs(module):
            if width % ranks == 0:
                found |= {column: "column", row: "row"}
        if not found:
            even = f" and a width that {ranks} divides" if ranks > 1 else ""
            raise ModelError(
                'strategy="tensor" finds no two nn.Linear that follow each other, with an activation '
                f"between them{even}: name what to cut, "
                'strategy=sparkdl.Tensor(plan={"name": "column", "name": "row"}).'
            )
    return found


def _pairs(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield the names of consecutive linear layers, and the width between them."""
    if isinstance(module, FEED_FORWARD):
        yield f"{prefix}linear1", f"{prefix}linear2", module.linear1.out_features
    last: tuple[str, int] | None = None
    for name, child in module.named_children():
        linear = child if isinstance(child, nn.Linear) and not is_parametrized(child) else None
        in_list = isinstance(module, nn.Sequential)
        if not in_list or (linear is None and not isinstance(child, ELEMENTWISE)):
            last = None
        if linear is not None:
            if last is not None:
                yield last[0], prefix + name, last[1]
                last = None
            elif in_list:
                last = prefix + name, linear.out_features
        else:
            yield from _pairs(child, f"{prefix}{name}.")


def _check_ways(strategy: Tensor, module: nn.Module) -> None:
    users: dict[int, list[str]] = {}
    for name, child in module.named_modules():
        for parameter in child.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name, way in plan_of(strategy, module, 1).items():
        child = module.get_submodule(name)
        if isinstance(way, str) and not isinstance(child, (nn.Linear, nn.Embedding)):
            raise ModelError(
                f'strategy=Tensor: "{name}" is {kind_of(child)}, and "{way}" is a way to cut '
                "an nn.Linear or an nn.Embedding: name these, or give a style of "
                "torch.distributed.tensor.parallel."
            )
        if isinstance(way, str) and is_parametrized(child):
            raise ModelError(
                f'strategy=Tensor: "{name}" has parametrizations, which need its whole weight: leave '
                "it out of the plan."
            )
        for parameter in child.parameters():
            others = [u for u in users[id(parameter)] if not f"{u}.".startswith(f"{name}.")]
            if others:
                raise ModelError(
                    f'strategy="tensor": a parameter of "{name}" is also used by "{others[0]}", and '
                    'cutting would part them: leave both whole, or use strategy="fsdp".'
                )


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Make torch's transformer layers call their linear layers in the block, also in evaluation.

    The fused operation that they use in evaluation does not support split layers, and its
    floating-point operations cannot be counted.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

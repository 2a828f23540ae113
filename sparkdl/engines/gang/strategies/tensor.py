"""Tensor parallelism: torch's ``parallelize_module`` around the module of a recipe.

All ranks of a model-parallel group compute the same rows. Each has its part of the layers that are
split, and all of the other layers, whose gradients are the same on each rank. So gradients only
have to be summed over the copies of the model. A parameter that every rank of the group has is
updated on each, and counts once.

[Note: whole tensors beside parts] Between a layer that is cut by column and one that is cut by row
a rank has its part of the activations. A whole tensor that meets them there, such as a slope, a
scale or a gate, gets the gradient of this part alone, and all ranks' must be summed. So parts have a
class, and what meets them goes through a function that sums gradients (Megatron-LM's f).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

from sparkdl.collectives.direct import all_reduce
from sparkdl.engines.gang.shards import RowLayout
from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankStrategy, SummedGradients
from sparkdl.errors import ModelError, in_short
from sparkdl.model.flat import local
from sparkdl.model.recipe import LiveReplica, Recipe, parts_of
from sparkdl.parallel.tensor import Tensor, plan_of, without_fused_layers
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, Passed, buffers_kept, evaluating, to_tensors
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import ReplicaIteration


class Row(RowwiseParallel):
    """Torch's row-wise style, which sums the outputs of a linear layer in one round.

    See :mod:`sparkdl.collectives.direct`.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        if outputs.placements != (Partial(),):  # an embedding, whose partial outputs are masked
            return RowwiseParallel._prepare_output_fn(
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
        return _Sum.apply(outputs.to_local(), device_mesh.get_group())


class _Sum(torch.autograd.Function):
    """A sum over the ranks. The gradient of the sum is that of each rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Whole(torch.autograd.Function):
    """A tensor that meets each rank's part of another. Its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(total, ctx.group)
        return total, None


_IN_PLACE = re.compile("[a-z].*_|__i.*__|__setitem__")
"""The names of functions that write to their first argument."""


class _Part(torch.Tensor):
    """A rank's part of activations, and what comes of it; see [Note: whole tensors beside parts]."""

    group: dist.ProcessGroup

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def met(value: Any) -> Any:
            tensor = isinstance(value, torch.Tensor) and not isinstance(value, (cls, DTensor))
            return _Whole.apply(value, cls.group) if tensor and value.requires_grad else value

        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                first = _IN_PLACE.fullmatch(getattr(func, "__name__", "")) is not None
                args = (*args[:first], *tree_map(met, tuple(args[first:])))
                kwargs = tree_map(met, kwargs)
        return super().__torch_function__(func, types, args, kwargs or {})


def part_type(group: dist.ProcessGroup) -> type[_Part]:
    """Return the class of the parts that the ranks of ``group`` have."""
    return type("Part", (_Part,), {"group": group})


def _plain(value: Any) -> Any:
    """Return a tensor of no class of its own."""
    if not isinstance(value, _Part):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)  # type: ignore[arg-type]


STYLES = {"column": ColwiseParallel, "row": Row}


class TensorRank(RankStrategy[Tensor]):
    """A rank with its part of the layers that are split, and with all other layers."""

    order = 0
    splits_rows = True

    def __init__(self, strategy: Tensor, build: Build) -> None:
        super().__init__(strategy, build)
        build.member.at_end.enter_context(without_fused_layers())

    def split(self, build: Build) -> None:
        """Split the layers of the module in place, on the rank's device.

        All ranks have built the same module, so nothing is sent, and each can do this while it
        holds the lock, which is released here. Raises ModelError if the split model fails, or its
        output for the spare rows is different.
        """
        module, spare, device = build.module, build.spare, build.device
        mesh = build.groups.mesh("tensor")
        plan = plan_of(self._strategy, module, mesh.size())
        styles = {n: STYLES[way]() if isinstance(way, str) else way for n, way in plan.items()}
        inputs, targets = to_tensors(spare.inputs, device), to_tensors(spare.targets, device)
        module.to(device)
        with buffers_kept(module):
            right = _output(build.recipe, module, inputs, targets)
        parallelize_module(module, mesh, styles, src_data_rank=None)
        _let_go_of_others(module)
        build.lock.release()
        parts = part_type(mesh.get_group())
        for name, style in styles.items():
            child = module.get_submodule(name)
            child.forward = functools.partial(_without_inference_mode, child.forward)
            child.register_forward_pre_hook(_taken, prepend=True, with_kwargs=True)
            cut = any(isinstance(each, Shard) for each in getattr(style, "output_layouts", ()))
            child.register_forward_hook(functools.partial(_arrived, parts if cut else None))
        try:
            found = _output(build.recipe, module, inputs, targets)
        except Exception as error:
            raise ModelError(
                f"strategy=Tensor(plan=...): the model that is cut so fails. {in_short(error)}.{_HINT}"
            ) from error
        if not _alike(right, found):
            raise ModelError(
                f"strategy=Tensor(plan=...): the model that is cut so puts out something else.{_HINT}"
            )

    def finish(self, build: Build) -> None:
        """Convert between parts of parameters and rows, and count parameters of all ranks once."""
        mesh, rank = build.groups.mesh(*build.row_dimensions), build.rank
        rows, numbers = build.rows(rank), build.numbers(rank)
        repeated: list[int] = []  # the parameters that an earlier rank has too
        if build.mesh.place(rank, "tensor") != 0:
            among = build.groups.mesh("tensor")
            parameters = enumerate(build.live.flat.parameters)
            repeated = [number for number, (_, p) in parameters if not _is_cut(p, among)]
        build.shards = replace(
            build.shards,
            turned=RowLayout(build.live, build.whole, mesh, rows, numbers),
            repeated=frozenset(repeated),
        )

    def gradients(self, build: Build) -> GradientSync:
        return TensorSync(build)


def _let_go_of_others(module: nn.Module) -> None:
    """Copy parts that torch leaves as rows of the whole parameter, so that the whole can be freed."""
    for parameter in module.parameters():
        part = getattr(parameter, "_local_tensor", parameter)
        if part.untyped_storage().nbytes() > part.nbytes and part is not parameter:
            parameter._local_tensor = part.clone()  # type: ignore[attr-defined]


def _without_inference_mode(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call ``forward`` outside of inference mode.

    In inference mode torch does not decompose operations, and sends weights instead of sums.
    """
    if not torch.is_inference_mode_enabled():
        return forward(*inputs, **named)
    with torch.inference_mode(False), torch.no_grad():
        return forward(*inputs, **named)


def _taken(module: nn.Module, inputs: Any, named: Any) -> Any:
    """Return the inputs of a layer that is cut, which torch converts itself."""
    return tree_map(_plain, inputs), tree_map(_plain, named)


def _arrived(
    parts: type[_Part] | None, module: nn.Module, inputs: object, output: object
) -> object:
    """Return the output as a part, or if there are no gradients, wait for a sum over the ranks.

    Otherwise the next operation would wait for it, and if the output is sent to another rank there
    is none.
    """
    if not isinstance(output, torch.Tensor):
        return output
    if not torch.is_grad_enabled():
        return output.clone()
    return output if parts is None or isinstance(output, DTensor) else output.as_subclass(parts)


def _output(
    recipe: Recipe,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> Any:
    """Return the model's output in evaluation mode."""
    with evaluating(module), seeded(0):
        return recipe.signature.call_for_loss(recipe.loss, module, inputs, targets)


_HINT = (
    " A layer cut by column is followed by one cut by row, with nothing between them but what treats "
    "every element by itself."
)


def _alike(right: Any, found: Any) -> bool:
    if isinstance(right, torch.Tensor):
        if not isinstance(found, torch.Tensor) or right.shape != found.shape:
            return False
        return torch.allclose(local(found), right, rtol=1e-2, atol=1e-3, equal_nan=True)
    one, other = parts_of(right), parts_of(found)
    return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)


def settle(live: LiveReplica) -> None:
    """Redistribute gradients whose placements differ from those of their parameters."""
    for _, parameter in live.flat.parameters:
        gradient: Any = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


class TensorSync(SummedGradients):
    """Gradients of the parts of layers. See the note above."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, copies=True)
        self._model_group = build.model_group()

    def run_pass(
        self, work: ReplicaIteration, batch: MiniBatch, share: float, clock: Clock, parts: int = 0
    ) -> Passed:
        passed = super().run_pass(work, batch, share, clock)
        settle(self._live)
        return passed


def _is_cut(parameter: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Return whether a parameter is split along the single dimension of ``mesh``."""
    (dimension,) = mesh.mesh_dim_names or ()
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return dimension in names and parameter.placements[names.index(dimension)].is_shard()

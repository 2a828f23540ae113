"""The strategies of a gang as a user of torch writes them, for ranks that torchrun starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from work import Work

Step = Callable[[], Any]
UNIT_PARAMETERS, MICRO_BATCHES = 100_000, 4


def ddp_step(work: Work, feed: Iterator[tuple[torch.Tensor, ...]]) -> Step:
    module = nn.parallel.DistributedDataParallel(work.make())
    return plain_step(work, module, work.optimizers(module.module), feed)


def zero1_step(work: Work, feed: Iterator[tuple[torch.Tensor, ...]]) -> Step:
    """DDP, and an optimizer that shares out its state."""
    module = nn.parallel.DistributedDataParallel(work.make())
    (plain,) = work.optimizers(module.module)
    kind: Any = type(plain)
    accepted = inspect.signature(kind).parameters
    given = {name: value for name, value in plain.defaults.items() if name in accepted}
    shared = ZeroRedundancyOptimizer(module.module.parameters(), optimizer_class=kind, **given)
    return plain_step(work, module, [shared], feed)


def fsdp_step(work: Work, feed: Iterator[tuple[torch.Tensor, ...]]) -> Step:
    """``fully_shard`` on the large members of the model's lists, then on the whole."""
    module = work.make()
    for unit in list(_blocks(module)):
        fully_shard(unit)
    fully_shard(module)
    return plain_step(work, module, [work.optimizer(module.parameters())], feed)


def tensor_step(work: Work, feed: Iterator[tuple[torch.Tensor, ...]]) -> Step:
    """The first two linear layers of a perceptron, or those of every transformer layer, in two parts;
    both ranks have all samples."""
    module = work.make()
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if not isinstance(module, nn.Sequential):
        ways = {"*.linear1": ColwiseParallel(), "*.linear2": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (2,)), ways)
    optimizers = work.optimizers(module)

    def together() -> Iterator[tuple[torch.Tensor, ...]]:
        for x, y in feed:
            more_x, more_y = next(feed)
            yield torch.cat([x, more_x]), torch.cat([y, more_y])

    return plain_step(work, module, optimizers, together())


def pipeline_step(work: Work, feed: Iterator[tuple[torch.Tensor, ...]]) -> Step:
    """Half of the model on either of two ranks; the first has all inputs, the last all labels."""
    rank, first = dist.get_rank(), next(feed)
    stage = _half(work.make(), rank, first[0])
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=work.loss)
    (optimizer,) = work.optimizers(stage.submod)

    def step() -> None:
        (x, y), (more_x, more_y) = next(feed), next(feed)  # the batches of both ranks
        optimizer.zero_grad(set_to_none=True)
        if rank:
            schedule.step(target=torch.cat([y, more_y]))
        else:
            schedule.step(torch.cat([x, more_x]))
        optimizer.step()

    return step


def _half(module: Any, rank: int, rows: torch.Tensor) -> Any:
    """An ``nn.Sequential`` is cut where the parameters are halved; another model, which torch exports,
    before the middle one of its layers. ``rows``: of a batch of one rank."""
    device = torch.device("cpu")
    if isinstance(module, nn.Sequential):
        sizes = [sum(p.numel() for p in child.parameters()) for child in module]
        cut = min(range(1, len(sizes)), key=lambda n: abs(2 * sum(sizes[:n]) - sum(sizes)))
        return PipelineStage(module[cut:] if rank else module[:cut], rank, 2, device)
    middle = f"layers.{len(module.layers) // 2}"
    micro_batch = rows[: 2 * len(rows) // MICRO_BATCHES]
    cut_there = {middle: SplitPoint.BEGINNING}
    return pipeline(module, (micro_batch,), split_spec=cut_there).build_stage(rank, device)


STEPS: dict[str, Callable[..., Step]] = {
    "ddp": ddp_step,
    "zero1": zero1_step,
    "fsdp": fsdp_step,
    "tensor": tensor_step,
    "pipeline": pipeline_step,
}


def plain_step(
    work: Work,
    module: nn.Module,
    optimizers: list[optim.Optimizer],
    feed: Iterator[tuple[torch.Tensor, ...]],
) -> Step:
    def step() -> None:
        x, y = next(feed)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        work.loss(module(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        listed = isinstance(module, (nn.Sequential, nn.ModuleList))
        if listed and sum(p.numel() for p in child.parameters()) >= UNIT_PARAMETERS:
            yield child
        else:
            yield from _blocks(child)

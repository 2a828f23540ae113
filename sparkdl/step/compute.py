"""One replica, one mini-batch: forward, loss, backward. Plain torch, no Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sparkdl.replica.flat import FlatModule
from sparkdl.replica.recipe import seeded


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of a batch as tensors on ``device``; integers of any width become int64."""
    tensors = []
    for array in arrays:
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if array.dtype.kind == "i":
            tensor = tensor.long()
        tensors.append(tensor.to(device))
    return tensors


def call_loss(
    loss: Callable[..., torch.Tensor], output: object, targets: Sequence[torch.Tensor]
) -> torch.Tensor:
    """``loss(output, target)``; ``loss(output)`` without a label; a tuple for several labels."""
    if not targets:
        return loss(output)
    return loss(output, targets[0] if len(targets) == 1 else tuple(targets))


def forward_backward(
    replica: FlatModule,
    loss: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    seed: int,
) -> tuple[float, list[torch.Tensor | None]]:
    """Mean loss of the mini-batch and the gradient of each trainable parameter (None: none).

    Random draws inside the model (dropout) follow ``seed``.
    """
    module = replica.module
    module.train()
    for _, parameter in replica.parameters:
        parameter.grad = None
    with seeded(seed):
        value = call_loss(loss, module(*inputs), targets)
        value.backward()
    gradients = [parameter.grad for _, parameter in replica.parameters]
    for _, parameter in replica.parameters:
        parameter.grad = None
    return float(value.detach()), gradients


@torch.no_grad()
def write_contribution(
    replica: FlatModule, gradients: Sequence[torch.Tensor | None], out: torch.Tensor
) -> tuple[int, ...]:
    """Write gradients and buffers into ``out`` (a flat vector on the CPU).

    Returns the numbers of the parameters without a gradient, whose places are zeroed.
    """
    absent = []
    for number, ((segment, _), gradient) in enumerate(
        zip(replica.parameters, gradients, strict=True)
    ):
        place = out[segment.start : segment.stop]
        if gradient is None:
            place.zero_()
            absent.append(number)
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            place.view(segment.shape).copy_(dense)
    replica.save_buffers(out)
    return tuple(absent)

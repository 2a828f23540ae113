"""Batch norm over the samples of all ranks of a gang.

torch's SyncBatchNorm works on GPUs only, gives every rank the same weight in a mean, and does not
allow a rank without samples. This one sums over samples: its output and gradients are those of a
single process with the global batch, however the samples are distributed (Ioffe & Szegedy, 2015).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.replica.joint_pass import idle


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class GlobalBatchNorm(_BatchNorm):
    """A replacement for torch's batch norms, for inputs of shape (samples, features, ...)."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize as torch does, in training with the mean and variance over all ranks."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        own, each = 0.0 if idle() else 1.0, input.numel() // input.shape[1]
        # as torch does: the counts and sums of even a few images overflow half precision
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_full((1,), own * each)
        sums = _Sum.apply(torch.cat([own * values.sum(axes), count]))
        total = sums[-1].detach().clamp(min=1.0)
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        variance = _Sum.apply(own * centred.square().sum(axes)) / total
        self._follow(mean.detach(), variance.detach(), sums[-1].detach())
        output = centred * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        """Update the running statistics with the unbiased variance, as torch does.

        Leave them alone if no rank has a sample. ``total`` is the count over all ranks.
        """
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        if idle() and not total:
            return
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * (total / (total - 1).clamp(min=1.0))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronise(module: nn.Module) -> None:
    """Make every torch batch norm in ``module`` normalize over all ranks.

    Names and values stay the same.
    """
    for child in module.modules():
        if type(child) in _KINDS:
            child.__class__ = GlobalBatchNorm

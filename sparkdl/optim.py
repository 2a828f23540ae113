"""Optimizers that ``torch.optim`` lacks: LARS, LAMB and Ftrl. They also work outside sparkdl.

LARS and LAMB scale the step of each tensor by the ratio of the norms of its weights and its update,
so slices are cut between tensors for them. Give biases and the scales of normalization layers a
group with ``adapt=False``, as both papers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

__all__ = ["LAMB", "LARS", "Ftrl"]


class _TensorByTensor(Optimizer):
    """An optimizer that changes one tensor after another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Perform one step, and return the value of ``closure`` if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in (p for p in group["params"] if p.grad is not None):
                self._change(w, w.grad, self.state[w], group)
        return loss

    def _change(
        self, w: torch.Tensor, slope: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Change the weights ``w``, with a gradient ``slope`` and the state of this tensor."""
        raise NotImplementedError


class LARS(_TensorByTensor):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, 2017, arXiv:1708.03888, algorithm 1).

    For each tensor w with gradient g::

        ratio = trust * |w| / (|g| + weight_decay * |w|)       (1 where |w| or |g| is 0)
        v     = momentum * v + lr * ratio * (g + weight_decay * w)
        w     = w - v

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: The learning rate.
        momentum: The factor of the previous velocity v.
        weight_decay: The factor of the weights that is added to the gradient.
        trust: The coefficient eta of the paper.
        adapt: False sets the ratio to 1, which is SGD with momentum.

    Raises:
        ValueError: A value is negative.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        adapt: bool = True,
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        _not_negative(**values)
        super().__init__(params, {**values, "adapt": adapt})

    def _change(
        self, w: torch.Tensor, slope: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        decay, ratio = group["weight_decay"], 1.0
        if group["adapt"]:
            size, steepness = w.norm(), slope.norm()
            ratio = _ratio(group["trust"] * size, steepness + decay * size, size, steepness)
        velocity = state.setdefault("velocity", torch.zeros_like(w))
        velocity.mul_(group["momentum"]).add_((slope + decay * w).mul_(group["lr"] * ratio))
        w.sub_(velocity)


class LAMB(_TensorByTensor):
    """Layer-wise adaptive moments (You et al., 2020, arXiv:1904.00962, algorithm 2).

    For each tensor w with gradient g, in its t-th step, with b1, b2 = betas::

        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w
        w = w - lr * |w| / |u| * u                              (ratio 1 where |w| or |u| is 0)

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: The learning rate.
        betas: The decay rates of the two moving averages m and v.
        eps: A term that keeps the denominator above 0.
        weight_decay: The factor of the weights that is added to the update.
        adapt: False sets the ratio to 1, which is AdamW.

    Raises:
        ValueError: A value is negative, or a beta is outside [0, 1).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        values = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        _not_negative(**values)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: give two numbers of at least 0 and less than 1.")
        super().__init__(params, {**values, "betas": betas, "adapt": adapt})

    def _change(
        self, w: torch.Tensor, slope: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        (b1, b2), ratio = group["betas"], 1.0
        if not state:
            state.update(step=0, mean=torch.zeros_like(w), square=torch.zeros_like(w))
        state["step"] += 1
        mean = state["mean"].mul_(b1).add_(slope, alpha=1 - b1)
        square = state["square"].mul_(b2).addcmul_(slope, slope, value=1 - b2)
        root = (square / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
        update = (mean / (1 - b1 ** state["step"])).div_(root)
        update.add_(group["weight_decay"] * w)
        if group["adapt"]:
            size, length = w.norm(), update.norm()
            ratio = _ratio(size, length, size, length)
        w.sub_(update.mul_(group["lr"] * ratio))


class Ftrl(_TensorByTensor):
    """Follow the regularized leader, proximal (McMahan et al., 2013, "Ad click prediction").

    It works element by element, with the parameters that BigDL and TensorFlow give it
    (p = ``lr_power``)::

        h = g + 2 * l2_shrinkage * w
        z = z + h - ((n + g^2)^-p - n^-p) / lr * w
        n = n + g^2
        w = (sign(z) * l1 - z) / (n^-p / lr + 2 * l2)           (0 where |z| <= l1)

    Args:
        params: Parameters or parameter groups, as for any torch optimizer.
        lr: The learning rate, above 0.
        lr_power: The exponent p, at most 0; the paper's is -0.5.
        initial_accumulator: The initial value of n; z begins at 0.
        l1: The strength of the L1 penalty, which makes weights exactly 0.
        l2: The strength of the L2 penalty.
        l2_shrinkage: The strength of an L2 penalty on the gradient alone.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
    ) -> None:
        values = {"initial_accumulator": initial_accumulator, "l1": l1, "l2": l2}
        _not_negative(lr=lr, **values, l2_shrinkage=l2_shrinkage)
        if lr == 0 or lr_power > 0:
            raise ValueError(f"lr={lr}, lr_power={lr_power}: give lr > 0 and lr_power <= 0.")
        super().__init__(
            params, {"lr": lr, "lr_power": lr_power, **values, "l2_shrinkage": l2_shrinkage}
        )

    def _change(
        self, w: torch.Tensor, slope: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        lr, power, l1 = group["lr"], -group["lr_power"], group["l1"]
        if not state:
            start = torch.full_like(w, group["initial_accumulator"])
            state.update(squares=start, linear=torch.zeros_like(w))
        squares, linear = state["squares"], state["linear"]
        before = squares.pow(power)
        after = squares.addcmul_(slope, slope).pow(power)
        linear.add_(slope).add_(w, alpha=2 * group["l2_shrinkage"])
        linear.sub_((after - before).div_(lr).mul_(w))
        leader = (linear.sign() * l1 - linear).div_(after.div_(lr).add_(2 * group["l2"]))
        w.copy_(leader.masked_fill_(linear.abs() <= l1, 0.0))


def _ratio(
    above: torch.Tensor, below: torch.Tensor, size: torch.Tensor, other: torch.Tensor
) -> Any:
    """Return ``above / below``, or 1 where the norm ``size`` or ``other`` is 0."""
    return torch.where((size > 0) & (other > 0), above / below, torch.ones_like(above))


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}: give a number of at least 0.")

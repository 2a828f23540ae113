"""A replica that can be trained: a built recipe on its device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ModelError
from sparkdl.model.flat import FlatModule
from sparkdl.model.model_loss import PerReplica
from sparkdl.model.preparation import modes_of, prepared_forward, set_modes
from sparkdl.model.recipe import Recipe


@dataclass
class LiveReplica:
    """A built recipe that computes on ``device``; its flat vector may be elsewhere."""

    recipe: Recipe  # without its initial weights
    flat: FlatModule
    call: Callable[..., Any]
    device: torch.device
    loss: Callable[..., torch.Tensor]
    version: str = ""  # names the weights that flat.flat holds now
    sink: Callable[[int, torch.Tensor], None] | None = None
    apart: Callable[[], AbstractContextManager[None]] | None = None  # only accumulates
    _watched: bool = False

    def __post_init__(self) -> None:
        self._modes = modes_of(self.flat.module)

    @staticmethod
    def of(recipe: Recipe, device: torch.device | str = "cpu") -> LiveReplica:
        """Build ``recipe`` on ``device``.

        If the recipe holds a module, build it only once: training changes that module, and whoever
        needs its initial weights again must load the recipe again.
        """
        module = recipe.build()
        _check_new(module)
        return LiveReplica.around(recipe, FlatModule(module, device, recipe.options.buffers))

    @staticmethod
    def around(recipe: Recipe, flat: FlatModule, device: torch.device | None = None) -> LiveReplica:
        """Make a replica of a recipe that is already built."""
        call = prepared_forward(flat.module, recipe.options)
        device = device or flat.flat.device
        recipe = recipe.without_weights()
        return LiveReplica(recipe, flat, call, device, on_device(recipe.loss, device))

    def give_gradients(self, sink: Callable[[int, torch.Tensor], None] | None) -> None:
        """Pass the number and gradient of each parameter to ``sink`` once backward has finished it.

        The parameter then drops its gradient. A ``sink`` of None stops this. As long as no sink was
        ever given, autograd calls no Python.
        """
        self.sink = sink
        if sink is None or self._watched:
            return
        self._watched = True
        this = weakref.ref(self)  # no reference cycle: a dropped replica must be freed at once
        for number, (_, parameter) in enumerate(self.flat.parameters):
            parameter.register_post_accumulate_grad_hook(partial(_finished, this, number))

    def note_version(self, version: str) -> None:
        """Note which weights ``flat.flat`` holds from now on; empty: none that have a name."""
        self.version = version

    def call_through(
        self, call: Callable[..., Any], apart: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Run the module through a wrapper that sums gradients over processes."""
        self.call, self.apart = call, apart

    def train(self) -> None:
        """Put every module into the mode that it was built in."""
        if any(child.training != mode for child, mode in self._modes):
            set_modes(self._modes)

    def clear_gradients(self) -> None:
        """Drop every parameter's gradient."""
        for _, parameter in self.flat.parameters:
            parameter.grad = None


_trained: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters, by id, of the replicas built in this process, as long as anything holds them."""


def _check_new(module: nn.Module) -> None:
    """Raise :class:`sparkdl.ModelError` if an earlier replica of this process has a parameter of this.

    The earlier replica has trained that parameter.
    """
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    for name, parameter in trainable:
        if _trained.get(id(parameter)) is parameter:
            raise ModelError(
                f'model() returned the parameter "{name}" that it had returned before, and that '
                "has been trained since: each call must build all trained modules anew. Create the "
                "modules inside the function, or pass a module itself (model=module)."
            )
    _trained.update({id(parameter): parameter for _, parameter in trainable})


def _finished(replica: weakref.ref[LiveReplica], number: int, parameter: torch.Tensor) -> None:
    """Pass on the gradient of parameter ``number``, which is complete (a hook for autograd)."""
    live = replica()
    if live is not None and live.sink is not None and parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        live.sink(number, gradient)


def on_device(
    loss: Callable[..., torch.Tensor], device: torch.device
) -> Callable[..., torch.Tensor]:
    """Return ``loss`` with its tensors, such as class weights, on ``device``.

    If they are there already, return ``loss`` itself.
    """
    if isinstance(loss, PerReplica):
        moved_loss = on_device(loss.loss, device)
        return loss if moved_loss is loss.loss else PerReplica(moved_loss)
    if isinstance(loss, partial):
        given = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in loss.keywords.items()
        }
        moved = any(value is not loss.keywords[name] for name, value in given.items())
        return partial(loss.func, *loss.args, **given) if moved else loss
    if isinstance(loss, nn.Module) and any(
        tensor.device != device for tensor in (*loss.parameters(), *loss.buffers())
    ):
        return copy.deepcopy(loss).to(device)
    return loss

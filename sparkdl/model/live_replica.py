"""A replica that can be trained: a built recipe on its device."""

from __future__ import annotations

import copy
import functools
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
from sparkdl.model.preparation import prepared_forward
from sparkdl.model.recipe import Recipe


@dataclass
class LiveReplica:
    """A built recipe, computed with on ``device``; its flat vector may be elsewhere. ``call`` runs the
    module, ``loss`` is the recipe's with its tensors on the device; ``version`` names the weights that
    ``flat.flat`` holds now. ``sink``: see :meth:`give_gradients`. ``apart``: a context in which
    gradients only add up; set where they are summed over processes otherwise."""

    recipe: Recipe
    flat: FlatModule
    call: Callable[..., Any]
    device: torch.device
    loss: Callable[..., torch.Tensor]
    version: str = ""
    sink: Callable[[int, torch.Tensor], None] | None = None
    apart: Callable[[], AbstractContextManager[None]] | None = None
    _watched: bool = False

    @staticmethod
    def of(recipe: Recipe, device: torch.device | str = "cpu") -> LiveReplica:
        """Build ``recipe`` on ``device``. A recipe that holds a module is built once: that module is
        trained then, and who needs its first weights again loads the recipe again.

        Raises :class:`sparkdl.ModelError` where the model has a part of one that was built before.
        """
        module = recipe.build()
        _check_new(module)
        return LiveReplica.around(recipe, FlatModule(module, device))

    @staticmethod
    def around(recipe: Recipe, flat: FlatModule, device: torch.device | None = None) -> LiveReplica:
        """Of a recipe that is built. ``device``: None: where its flat vector is."""
        call = prepared_forward(flat.module, recipe.policy)
        device = device or flat.flat.device
        recipe = recipe.without_weights()
        return LiveReplica(recipe, flat, call, device, on_device(recipe.loss, device))

    def give_gradients(self, sink: Callable[[int, torch.Tensor], None] | None) -> None:
        """``sink`` is given the number and gradient of each parameter as soon as backward has finished
        it, and the parameter lets go of it; None: nobody is. Where nobody ever is, autograd calls no
        Python."""
        self.sink = sink
        if sink is None or self._watched:
            return
        self._watched = True
        this = weakref.ref(self)  # no cycle: what is dropped shall be freed at once
        for number, (_, parameter) in enumerate(self.flat.parameters):
            parameter.register_post_accumulate_grad_hook(partial(_finished, this, number))

    def train(self) -> None:
        """Bring every module into training mode."""
        if not all(child.training for child in self._modules):
            self.flat.module.train()

    @functools.cached_property
    def _modules(self) -> list[nn.Module]:
        return list(self.flat.module.modules())

    def clear_gradients(self) -> None:
        """Let go of every parameter's gradient."""
        for _, parameter in self.flat.parameters:
            parameter.grad = None


_trained: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters of the replicas that were built in this process and of what else holds them, by id."""


def _check_new(module: nn.Module) -> None:
    """Raise :class:`sparkdl.ModelError` where another replica in this process was built with one of
    the parameters: it has trained it."""
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    for name, parameter in trainable:
        if _trained.get(id(parameter)) is parameter:
            raise ModelError(
                f'model() returned the parameter "{name}" that it had returned before, and that has '
                "been trained since: it must build anew, at each call, all that is trained. Make the "
                "modules inside it, or pass a module itself (model=module)."
            )
    _trained.update({id(parameter): parameter for _, parameter in trainable})


def _finished(replica: weakref.ref[LiveReplica], number: int, parameter: torch.Tensor) -> None:
    """Autograd's hook of parameter ``number``: its gradient is complete."""
    live = replica()
    if live is not None and live.sink is not None and parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        live.sink(number, gradient)


def on_device(
    loss: Callable[..., torch.Tensor], device: torch.device
) -> Callable[..., torch.Tensor]:
    """``loss`` with its own tensors there, such as weights of classes; itself where they are."""
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

"""The recipe: everything that a process needs to build the same model, loss and optimizer.

A recipe is pickled by value (cloudpickle, as Spark does with any function), shipped once, and lives as
long as the job. It is never a format on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sparkdl.errors import ModelError, kind_of
from sparkdl.model.options import TrainingOptions
from sparkdl.model.preparation import freeze, plain, start_from, start_training, take_buffers
from sparkdl.model.signature import BY_POSITION, Signature
from sparkdl.process.determinism import seeded
from sparkdl.process.output import reports_silenced

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Recipe:
    """The user's model, loss and optimizer, with all else that a process needs to build them."""

    model: Callable[[], nn.Module] | nn.Module
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    seed: int
    options: TrainingOptions = field(default_factory=TrainingOptions)
    weights: Mapping[str, torch.Tensor] | None = None
    strict_weights: bool = True
    frozen: tuple[str, ...] = ()
    unfrozen: tuple[str, ...] = ()
    augment: Callable[..., Any] | None = None
    compression: Callable[..., Any] | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # in no state_dict
    signature: Signature = BY_POSITION
    outer_optimizer: Callable[..., Any] | None = None  # of the slices, if replicas take steps

    def build(self, reported: bool = False) -> nn.Module:
        """Build the module with its initial weights in training mode, the same in every process.

        A callable runs with ``torch``, ``numpy`` and ``random`` seeded; this process's own random
        states are restored afterwards. If ``reported``, libraries may report what they load: in the
        first of many builds.
        """
        module = self._made(reported)
        if self.weights is not None:
            start_from(module, self.weights, self.strict_weights)
            take_buffers(module, self.buffers)
        freeze(module, self.frozen, self.unfrozen)
        changed = start_training(module)
        if changed and reported:
            logger.warning(
                "batch norms arrive in evaluation mode, and are put into training mode with what they "
                "are in, so that they use and change the statistics of mini-batches: %s%s. To keep "
                "theirs, return the model in training mode, and each of them in evaluation mode.",
                ", ".join(changed[:3]),
                f" and {len(changed) - 3} more" if len(changed) > 3 else "",
            )
        return module

    @property
    def for_slices(self) -> Recipe:
        """Return the recipe with the optimizer with which slices are updated."""
        outer = self.outer_optimizer
        return self if outer is None else replace(self, optimizer=outer)

    def without_weights(self) -> Recipe:
        """Return the recipe of a module that is already built, and so has the weights."""
        return replace(self, weights=None, buffers={})

    def _made(self, reported: bool) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return plain(self.model)
        with seeded(self.seed), contextlib.nullcontext() if reported else reports_silenced():
            module = self.model()
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"model() returned {kind_of(module)}: it must return a torch.nn.Module."
            )
        return plain(module)

    def build_optimizer(self, module: nn.Module) -> Any:
        """Build the optimizer, which must be one callable.

        A ``torch.optim`` class (or a partial of one) is called with the trainable parameters. Any other
        callable is called with the module, so that it can form parameter groups, or return several
        optimizers. See :func:`sparkdl.model.optimizer_factory.build_optimizers` for all forms.
        """
        assert not isinstance(self.optimizer, Mapping)
        trainable = [p for p in module.parameters() if p.requires_grad]
        if optimizer_class(self.optimizer) is not None:
            return self.optimizer(trainable)
        return self.optimizer(module)


def optimizer_class(factory: Any) -> type[torch.optim.Optimizer] | None:
    """Return the ``torch.optim.Optimizer`` class that ``factory`` is, or is a partial of; else None."""
    while hasattr(factory, "func"):
        factory = factory.func
    if isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer):
        return factory
    return None


def weights_digest(module: nn.Module) -> str:
    """Return a digest of every parameter and buffer; processes compare their initial weights by it."""
    return _digest([*module.named_parameters(), *module.named_buffers()])


def frozen_digest(module: nn.Module) -> str:
    """Return a digest of the frozen parameters, which are in no checkpoint; "" if there are none."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    return _digest(frozen) if frozen else ""


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's values, without a copy where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

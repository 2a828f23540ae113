"""The recipe: everything that a process needs to build the same model, loss and optimizer.

A recipe is pickled by value (cloudpickle, as Spark does with any function), shipped once, and lives as
long as the job. It is never a format on disk.

The way a model is called, and the part of its return value that is its output.

A replica that can be trained: a built recipe on its device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from sparkdl.errors import ModelError, kind_of, nearest, shown
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import FlatModule
from sparkdl.model.loss import MaskedLoss, OwnLoss, PerReplica, inner, is_own_loss
from sparkdl.model.preparation import (
    freeze,
    modes_of,
    plain,
    prepared_forward,
    set_modes,
    start_from,
    start_training,
    take_buffers,
)
from sparkdl.process.determinism import seeded
from sparkdl.process.system import reports_silenced

Part: TypeAlias = str | int | Callable[[Any], Any] | None
"""A part of a model's return value: a key, an attribute, an index, a function of it, or None (all)."""


@dataclass(frozen=True)
class SparseInput:
    """An input of the model that is a vector, stored as its entries."""

    place: int  # among the inputs
    size: int
    form: str  # see sparkdl.data.columns.sparse.Sparse

    def vectors(self, entries: torch.Tensor) -> list[torch.Tensor]:
        """Return what the model gets of entries (index, value), (rows, entries, 2)."""
        indices, values = entries[..., 0].long(), entries[..., 1]
        if self.form == "dense":
            empty = values.new_zeros((len(values), self.size))
            return [empty.scatter_add_(1, indices, values)]
        there = values != 0  # the others fill up shorter rows
        if (
            self.form == "indices"
        ):  # with an index of the row, so that no other row of a table is used
            return [torch.where(there, indices, indices[:, :1]), values]
        rows = torch.arange(len(values), device=values.device)[:, None].expand_as(indices)
        places, shape = torch.stack([rows[there], indices[there]]), (len(values), self.size)
        return [
            torch.sparse_coo_tensor(
                places, values[there], shape, check_invariants=True
            ).coalesce()  # augment may have changed their order
        ]


@dataclass(frozen=True)
class Signature:
    """A description of how a model is called, and which part of its return value is the output."""

    inputs: tuple[str, ...] = ()  # keywords; (): the model takes them by position
    part: Part = None
    sparse: tuple[SparseInput, ...] = ()

    def bound(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``model`` as a function of its inputs by position; labels may follow by keyword."""
        named = self._named(model)
        if not self.sparse:
            return named
        return lambda *inputs, **others: named(*self.model_inputs(inputs), **others)

    def model_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return what the model gets of the inputs: vectors in place of their entries."""
        if not self.sparse:
            return inputs
        forms = {one.place: one for one in self.sparse}
        found: list[Any] = []
        for place, tensor in enumerate(inputs):
            found += forms[place].vectors(tensor) if place in forms else [tensor]
        return found

    def _named(self, model: Callable[..., Any]) -> Callable[..., Any]:
        if not self.inputs:
            return model

        def call(*inputs: Any, **others: Any) -> Any:
            named = dict(zip(self.inputs, inputs, strict=False))
            return model(*inputs[len(named) :], **named, **others)

        return call

    def call(self, model: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Call ``model`` on ``inputs``."""
        return self.bound(model)(*inputs)

    def call_for_loss(
        self,
        loss: Any,
        model: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """Return what ``model`` returns for a mini-batch, or what a step makes of it."""
        own, call, inputs = inner(loss), self._named(model), self.model_inputs(inputs)
        if isinstance(own, OwnLoss):
            return own.returned(model, call, inputs, targets)
        return call(*inputs)

    def output(self, returned: Any) -> Any:
        return part_of(returned, self.part)

    def for_loss(self, loss: Any, returned: Any) -> Any:
        """Return the argument of ``loss``: the output, or all if the loss is an :class:`OwnLoss`."""
        return returned if is_own_loss(loss) else self.output(returned)


BY_POSITION = Signature()


def part_of(returned: Any, part: Part) -> Any:
    """Return a part of a model's return value."""
    if part is None:
        return returned
    if callable(part):
        return part(returned)
    try:
        if isinstance(returned, torch.Tensor):
            raise KeyError(part)
        if isinstance(part, int) or isinstance(returned, Mapping):
            return returned[part]
        return getattr(returned, part)
    except (LookupError, AttributeError, TypeError):
        raise ModelError(
            f"output={shown(part)}: the model returned {described(returned)}, which has no such part."
            f"{nearest(str(part), map(str, parts_of(returned)))}"
        ) from None


def problems_of_part(part: Any, where: str = "") -> list[str]:
    """Return the problems of a part that a user gave."""
    if (
        part is None
        or callable(part)
        or (isinstance(part, (str, int)) and not isinstance(part, bool))
    ):
        return []
    return [
        f"{where}output={shown(part)}: name a field of what the model returns, or give a function of "
        "it, or None."
    ]


def parts_of(returned: Any) -> dict[Any, Any]:
    """Return the fields of a mapping, named tuple or dataclass by name, or of a list or tuple by index.

    Return nothing for any other value.
    """
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        return dict(returned._asdict())
    if isinstance(returned, (list, tuple)):
        return dict(enumerate(returned))
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {f.name: getattr(returned, f.name, None) for f in dataclasses.fields(returned)}
    return {}


def described(returned: Any) -> str:
    """Return a description of a return value for messages: its shape, or its fields with theirs."""
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {list(returned.shape)}"
    shown = [
        f"{name!r} {list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
        for name, value in list(parts_of(returned).items())[:8]
    ]
    return kind_of(returned) + (f" of {', '.join(shown)}" if shown else "")


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a model's return value, of the same types, with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    parts = {name: with_tensors(part, change) for name, part in parts_of(value).items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(*parts.values())
            if hasattr(value, "_asdict")
            else type(value)(parts.values())
        )
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return parts
    if not parts:
        return value
    changed = copy.copy(value)
    if isinstance(value, MutableMapping):
        for name, part in parts.items():
            changed[name] = part
    if dataclasses.is_dataclass(value):  # transformers' ModelOutput is both
        for name, part in parts.items():
            object.__setattr__(changed, name, part)
    return changed


def for_example(returned: Any) -> str:
    """Return an example of how to name a tensor in the model's return value."""
    parts = parts_of(returned).items()
    names = [name for name, value in parts if isinstance(value, torch.Tensor) and value.ndim]
    named = f"output={shown(names[0])}, or " if names else ""
    return f"{named}output=function of what it returns"


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
        optimizers. See :func:`sparkdl.slices.optimizer.build_optimizers` for all forms.
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
    if isinstance(loss, (PerReplica, MaskedLoss)):
        moved_loss = on_device(loss.loss, device)
        return loss if moved_loss is loss.loss else type(loss)(moved_loss)
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

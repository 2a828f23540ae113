"""A module and its flat vector.

The flat vector is all that changes in training, in one contiguous tensor: trainable parameters
first (those with sparse gradients last among them), then buffers. Slices of it are owned, summed
and published. Its dtype is float64 where the model has float64 parameters, else float32; parameters of
lower precision have their master copy in it. Buffers are of two kinds: floating ones are averaged over
the replicas by sample count, others (counters, masks, floats wider than the vector's) keep their exact
bits and come from the first replica that has samples.
Frozen parameters are no part of it: every process has them from the recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.errors import ModelError
from sparkdl.process.memory import forget_values


@dataclass(frozen=True)
class TensorRange:
    """One tensor's place in the flat vector.

    ``kind``: "parameter", "average" or "exact". ``start`` and ``length`` count elements of the flat
    vector (an "exact" tensor's bytes are counted in elements, rounded up). ``sparse``: the table of
    an embedding with ``sparse=True``, whose gradient is rows of it.
    """

    name: str
    kind: str
    start: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the flat vector of ``size`` elements of ``dtype``."""

    segments: tuple[TensorRange, ...]
    dtype: torch.dtype
    size: int

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, the padding between them not counted."""
        return sum(s.length for s in self.segments if s.kind == "parameter")

    @property
    def parameters_stop(self) -> int:
        """The element after the last one of a trainable parameter."""
        return max((s.stop for s in self.segments if s.kind == "parameter"), default=0)

    @property
    def buffers_start(self) -> int:
        """The element where the buffers begin; they are the last of the flat vector."""
        return min((s.start for s in self.segments if s.kind != "parameter"), default=self.size)

    @property
    def ends(self) -> list[int]:
        """Where the next segment begins after each: its padding belongs to it."""
        return [segment.start for segment in self.segments[1:]] + [self.size]

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


_NOTHING = (
    "the model has no trainable parameter: of its {} parameters none has requires_grad=True. "
    "Leave some out of freeze=, name some in unfreeze=, or build layers that have some."
)


def layout_of(module: nn.Module) -> Layout:
    """Lay out ``module``. Raises :class:`sparkdl.errors.ModelError` for what cannot be trained."""
    tables = sparse_tables(module)
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    trainable.sort(key=lambda item: id(item[1]) in tables)
    if not trainable:
        raise ModelError(_NOTHING.format(sum(1 for _ in module.parameters())))
    memory: dict[int, str] = {}
    for name, parameter in ((name, local(parameter)) for name, parameter in trainable):
        if parameter.is_complex() or not parameter.is_floating_point():
            raise ModelError(f'parameter "{name}" is {parameter.dtype}: only real floats train.')
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f'parameter "{name}" is lazy and has no shape yet: run the model once in model().'
            )
        if parameter.is_meta:
            raise ModelError(
                f'parameter "{name}" is on the device "meta" and has no values: build the model on '
                "the CPU."
            )
        first = memory.setdefault(parameter.untyped_storage().data_ptr(), name)
        if first != name and parameter.numel():
            raise ModelError(
                f'parameters "{first}" and "{name}" share memory but are two objects: tie them by '
                "assigning one nn.Parameter to both places."
            )
    wide = any(p.dtype == torch.float64 for _, p in trainable)
    dtype = torch.float64 if wide else torch.float32
    step = ALIGNMENT // dtype.itemsize
    segments: list[TensorRange] = []
    position = 0

    def place(name: str, kind: str, tensor: torch.Tensor, length: int) -> None:
        nonlocal position
        shape, sparse = tuple(local(tensor).shape), id(tensor) in tables
        segments.append(TensorRange(name, kind, position, length, shape, tensor.dtype, sparse))
        position += math.ceil(length / step) * step

    for name, parameter in trainable:
        place(name, "parameter", parameter, local(parameter).numel())
    for name, buffer in module.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise ModelError(
                f'buffer "{name}" is lazy and has no shape yet: run the model once in model().'
            )
        if buffer.is_floating_point() and buffer.element_size() <= dtype.itemsize:
            place(name, "average", buffer, buffer.numel())
        else:
            nbytes = buffer.numel() * buffer.element_size()
            place(name, "exact", buffer, math.ceil(nbytes / dtype.itemsize))
    return Layout(tuple(segments), dtype, position)


def sparse_tables(module: nn.Module) -> set[int]:
    """The ids of the parameters that are tables of embeddings with ``sparse=True``."""
    return {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: its shard of a DTensor, else all of it."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


Form = tuple[tuple[int, ...], torch.dtype]


def form_of(buffer: torch.Tensor | None) -> Form | None:
    """Shape and dtype of a buffer, or None where there is none."""
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def changed_form(name: str, before: Form | None, after: Form | None) -> str:
    """What to say of a buffer of the state_dict that forward gives another form."""
    was, now = (
        "None" if form is None else f"{list(form[0])} {str(form[1]).removeprefix('torch.')}"
        for form in (before, after)
    )
    return (
        f'forward makes the buffer "{name}" {now}, and it was built {was}: buffers are averaged over '
        "the replicas, so they keep their form. Give it its last form in __init__ (as long as the "
        "longest input, say); one that is only a cache is left alone if it is registered with "
        "persistent=False."
    )


def _in_form(segment: TensorRange, owner: nn.Module, attribute: str) -> torch.Tensor | None:
    """The buffer of ``segment``; None for one that forward has given another form, which is taken for
    a cache of this process if no state_dict holds it. Raises :class:`sparkdl.errors.ModelError`."""
    buffer = owner._buffers.get(attribute)
    if buffer is not None and buffer.dtype == segment.dtype and buffer.shape == segment.shape:
        return buffer
    if attribute not in owner._non_persistent_buffers_set:
        built = segment.shape, segment.dtype
        raise ModelError(changed_form(segment.name, built, form_of(buffer)))
    return None


def _one_place_each(tensor: torch.Tensor) -> bool:
    """Whether every element has a place in memory of its own, unlike those of an expanded tensor."""
    return tensor.layout != torch.strided or all(
        stride > 0 or length <= 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def filled(module: nn.Module, weights: torch.Tensor) -> nn.Module:
    """``module`` with ``weights`` (a flat vector) in it, each tensor in memory of its own, in
    evaluation mode."""
    flat = FlatModule(module)
    flat.flat.copy_(weights)
    flat.refresh()
    for _, parameter in flat.parameters:
        parameter.data = parameter.data.clone()
    return flat.module.eval()


class FlatModule:
    """A module whose trainable parameters are views of one flat tensor, ``flat``.

    Of a module with sharded parameters (DTensors) the flat tensor, and its layout, are of the shards
    that are here; the parameters follow it with :meth:`refresh`.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.layout = layout_of(module)
        self.module = module.to(device)
        self.flat = torch.zeros(self.layout.size, dtype=self.layout.dtype, device=device)
        parameters = dict(module.named_parameters())
        self.parameters: list[tuple[TensorRange, nn.Parameter]] = []
        self._buffers: list[tuple[TensorRange, nn.Module, str]] = []
        self._borrowed: set[int] = set()
        for segment in self.layout.segments:
            if segment.kind == "parameter":
                parameter = parameters[segment.name]
                view = self._view(segment)
                view.copy_(local(parameter).detach())
                if not self._follows(parameter):
                    parameter.data = view
                self.parameters.append((segment, parameter))
            else:
                path, _, attribute = segment.name.rpartition(".")
                owner = module.get_submodule(path)
                buffer = owner._buffers[attribute]
                assert buffer is not None
                if not _one_place_each(buffer):
                    owner._buffers[attribute] = buffer.clone(memory_format=torch.contiguous_format)
                self._buffers.append((segment, owner, attribute))
        self.save_buffers(self.flat)

    def _view(self, segment: TensorRange) -> torch.Tensor:
        return self.flat[segment.start : segment.stop].view(segment.shape)

    def _follows(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is a copy, not a view."""
        return parameter.dtype != self.layout.dtype or hasattr(parameter, "to_local")

    def borrow(self, number: int, values: torch.Tensor) -> bool:
        """Let parameter ``number`` be a view of ``values``, its elements, and not of ``flat``, until
        :meth:`give_back`; what ``flat`` has of it is lost. False: it is a copy, and needs its own."""
        segment, parameter = self.parameters[number]
        if self._follows(parameter):
            return False
        parameter.data = values.view(segment.shape)
        if number not in self._borrowed:
            self._borrowed.add(number)
            forget_values(self._view(segment))
        return True

    def give_back(self) -> None:
        """Let parameters be views of ``flat`` again."""
        for number in self._borrowed:
            segment, parameter = self.parameters[number]
            parameter.data = self._view(segment)
        self._borrowed.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the module follow ``flat`` where it is no view of it: buffers, other dtypes, shards."""
        for segment, parameter in self.parameters:
            if self._follows(parameter):
                local(parameter).copy_(self._view(segment))
        for segment, owner, attribute in self._buffers:
            buffer = _in_form(segment, owner, attribute)
            if buffer is None:
                continue
            if segment.kind == "average":
                buffer.copy_(self._view(segment))
            else:
                raw = self.flat[segment.start : segment.stop].view(torch.uint8)
                nbytes = buffer.numel() * buffer.element_size()
                buffer.copy_(raw[:nbytes].view(segment.dtype).view(segment.shape))

    def buffers(self) -> torch.Tensor:
        """The buffers as they are now, as the end of a flat vector (from ``buffers_start`` on)."""
        start = self.layout.buffers_start
        end = torch.zeros(
            self.layout.size - start, dtype=self.layout.dtype, device=self.flat.device
        )
        self._save_buffers(end, start)
        return end

    @torch.no_grad()
    def save_buffers(self, out: torch.Tensor) -> None:
        """Write the buffers as they are now into their places in ``out`` (a flat vector)."""
        self._save_buffers(out, 0)

    @torch.no_grad()
    def _save_buffers(self, out: torch.Tensor, first: int) -> None:
        """Likewise, where ``out`` begins with element ``first`` of the flat vector."""
        for segment, owner, attribute in self._buffers:
            buffer = _in_form(segment, owner, attribute)
            place = out[segment.start - first : segment.stop - first]
            if buffer is None:
                place.copy_(self.flat[segment.start : segment.stop])
            elif segment.kind == "average":
                place.view(segment.shape).copy_(buffer)
            else:
                raw = buffer.contiguous().reshape(-1).view(torch.uint8)
                place.view(torch.uint8)[: raw.numel()].copy_(raw)

"""A module and its flat vector.

The flat vector is one contiguous tensor of everything that changes in training: trainable parameters
first (those with sparse gradients last among them), then buffers. Slices of it are owned, summed and
published. Its dtype is float64 if the model has float64 parameters, else float32; parameters of lower
precision have their master copy in it.

Floating buffers lie in it as values. Other buffers (counters, masks, floats wider than the vector's)
keep their exact bits. Frozen parameters are not in the vector: every process has them from the recipe.

The layout of the flat vector: which tensors of a module it has, in which order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.errors import ModelError
from sparkdl.model.buffers import FIRST, SUM, Rule, owner_of, rules_of, values_in
from sparkdl.model.preparation import WRAPPED
from sparkdl.process.memory import forget_values


@dataclass(frozen=True)
class TensorRange:
    """The range of one tensor in the flat vector."""

    name: str
    kind: str  # "parameter"; for a buffer "average", or "exact" if its bytes are there
    start: int
    length: int  # in the flat vector; for "exact" the bytes, rounded up
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool = False
    rule: Rule = FIRST  # without meaning for a parameter

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """The layout of the flat vector of ``size`` elements of ``dtype``."""

    segments: tuple[TensorRange, ...]
    dtype: torch.dtype
    size: int

    @property
    def parameters_stop(self) -> int:
        """Return the element after the last trainable parameter."""
        return max((s.stop for s in self.segments if s.kind == "parameter"), default=0)

    @property
    def buffers_start(self) -> int:
        """Return the element at which the buffers begin; they come last in the flat vector."""
        return min((s.start for s in self.segments if s.kind != "parameter"), default=self.size)

    @property
    def ends(self) -> list[int]:
        """Return the end of each segment with its padding, that is, the start of the next one."""
        return [segment.start for segment in self.segments[1:]] + [self.size]

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
_NOTHING = (
    "the model has no trainable parameter: none of its {} parameters has requires_grad=True. Leave "
    "some out of freeze=, name some in unfreeze=, or add layers that have some."
)


def layout_of(module: nn.Module, rules: Mapping[str, Rule] | None = None) -> Layout:
    """Lay out ``module``, with ``rules`` for its buffers by pattern."""
    tables = sparse_tables(module)
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    trainable.sort(key=lambda item: id(item[1]) in tables)
    if not trainable:
        raise ModelError(_NOTHING.format(sum(1 for _ in module.parameters())))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout != torch.strided:
            raise ModelError(
                f'"{name}" is sparse ({tensor.layout}), and what workers exchange is dense: make it '
                "dense, with .to_dense(). A constant may stay sparse as a plain attribute of the "
                "module, which forward moves to the device of its input."
            )
    for name, tensor in (*trainable, *module.named_buffers()):
        if isinstance(tensor, _LAZY):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ModelError(
                f'{kind} "{name}" is lazy and has no shape yet: give the layer its sizes, or '
                "let the function given as model= call the module once on an example."
            )
    for name, parameter in ((name, local(parameter)) for name, parameter in trainable):
        if parameter.is_complex() or not parameter.is_floating_point():
            raise ModelError(
                f'parameter "{name}" is {parameter.dtype}: only parameters of a real '
                "floating-point type can be trained."
            )
        if parameter.is_meta:
            raise ModelError(
                f'parameter "{name}" is on the device "meta" and has no values: build the model on '
                "the CPU."
            )
        if not one_place_each(parameter):
            raise ModelError(
                f'parameter "{name}" is an expanded tensor, whose elements share memory: make it '
                "nn.Parameter(tensor.clone(memory_format=torch.contiguous_format))."
            )
    wide = any(p.dtype == torch.float64 for _, p in trainable)
    dtype = torch.float64 if wide else torch.float32
    step = ALIGNMENT // dtype.itemsize
    segments: list[TensorRange] = []
    position = 0

    def place(name: str, kind: str, tensor: torch.Tensor, length: int, rule: Rule = FIRST) -> None:
        nonlocal position
        shape, sparse = tuple(local(tensor).shape), id(tensor) in tables
        segments.append(
            TensorRange(name, kind, position, length, shape, tensor.dtype, sparse, rule)
        )
        position += math.ceil(length / step) * step

    for name, parameter in trainable:
        place(name, "parameter", parameter, local(parameter).numel())
    named = rules_of(module, rules or {})
    for name, buffer in module.named_buffers():
        rule = named.get(name, FIRST)
        if buffer.is_floating_point() and buffer.element_size() <= dtype.itemsize:
            place(name, "average", buffer, buffer.numel(), rule)
        else:
            nbytes = buffer.numel() * buffer.element_size()
            place(name, "exact", buffer, math.ceil(nbytes / dtype.itemsize), rule)
    layout = Layout(tuple(segments), dtype, position)
    check_memory(module, layout)
    return layout


def check_memory(module: nn.Module, layout: Layout) -> None:
    """Raise an error if a trained parameter shares memory with another one, or with a buffer.

    If the module was copied, give the original: copies of tensors share no memory.
    """
    named = {
        name.replace(WRAPPED, ""): local(tensor)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    found = [(named[s.name].data_ptr(), s) for s in layout.segments if s.length and s.name in named]
    last, end = None, 0
    for start, segment in sorted(found, key=lambda item: item[0]):
        if last is not None and start < end and "parameter" in (last.kind, segment.kind):
            one, other = sorted((last, segment), key=layout.segments.index)
            if other.kind == "parameter":
                raise ModelError(
                    f'parameters "{one.name}" and "{other.name}" share memory but are two objects: '
                    "to tie them, assign the same nn.Parameter to both places."
                )
            raise ModelError(
                f'buffer "{other.name}" shares memory with the parameter "{one.name}", and in '
                "training each has its own: let forward use the parameter, or register a .clone()."
            )
        tensor = named[segment.name]
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()
        if stop > end:
            last, end = segment, stop


def one_place_each(tensor: torch.Tensor) -> bool:
    """Return whether every element has its own place in memory, unlike in an expanded tensor."""
    return tensor.layout != torch.strided or all(
        stride > 0 or length <= 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def sparse_tables(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that are tables of embeddings with ``sparse=True``."""
    return {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor: its shard of a DTensor, else the whole tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


Form = tuple[tuple[int, ...], torch.dtype]


def form_of(buffer: torch.Tensor | None) -> Form | None:
    """Return shape and dtype of a buffer, or None if there is no buffer."""
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def changed_form(name: str, before: Form | None, after: Form | None) -> str:
    """Return the message for a buffer of the state_dict whose form forward changes.

    None: there is no such buffer.
    """
    was, now = (
        "None" if form is None else f"{list(form[0])} {str(form[1]).removeprefix('torch.')}"
        for form in (before, after)
    )
    return (
        f'forward makes the buffer "{name}" {now}, but __init__ made it {was}: replicas exchange '
        "buffers, so their shape and type must not change. Give it its final "
        "form in __init__ (for the longest input, say). If it is only a cache, register it with "
        "persistent=False."
    )


def _in_form(segment: TensorRange, owner: nn.Module, attribute: str) -> torch.Tensor | None:
    """Return the buffer of ``segment``, or None if it is a cache that forward has given another form.

    A buffer that no state_dict holds is taken to be a cache of this process. A buffer whose elements
    share memory gets memory of its own.
    """
    buffer = owner._buffers.get(attribute)
    if buffer is not None and buffer.dtype == segment.dtype and buffer.shape == segment.shape:
        if not one_place_each(buffer):  # it could not be written to
            buffer = buffer.clone(memory_format=torch.contiguous_format)
            owner._buffers[attribute] = buffer
        return buffer
    if attribute not in owner._non_persistent_buffers_set:
        built = segment.shape, segment.dtype
        raise ModelError(changed_form(segment.name, built, form_of(buffer)))
    return None


def filled(
    module: nn.Module, weights: torch.Tensor, places: Mapping[str, int] | None = None
) -> nn.Module:
    """Return ``module`` with the flat vector ``weights`` in it, in evaluation mode.

    Each parameter then has its own memory. ``places``: where tensors begin in ``weights``, if these
    may be of a module with another order of them.
    """
    flat = FlatModule(module)
    if places is None:
        flat.flat.copy_(weights)
    else:
        for one in flat.layout.segments:
            if one.name in places:
                start = places[one.name]
                flat.flat[one.start : one.stop] = weights[start : start + one.length]
    flat.refresh()
    for _, parameter in flat.parameters:
        parameter.data = parameter.data.clone()
    return flat.module.eval()


class FlatModule:
    """A module whose trainable parameters are views of one flat tensor, ``flat``.

    If the module has sharded parameters (DTensors), the flat tensor and its layout cover only the
    shards of this process, and the parameters follow it through :meth:`refresh`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self.layout = layout_of(module, rules)
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
                self._buffers.append((segment, *owner_of(module, segment.name)))
        self.save_buffers(self.flat)

    def _place(self, segment: TensorRange) -> torch.Tensor:
        return self.flat[segment.start : segment.stop]

    def _view(self, segment: TensorRange) -> torch.Tensor:
        return self._place(segment).view(segment.shape)

    def _follows(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is a copy, not a view."""
        return parameter.dtype != self.layout.dtype or hasattr(parameter, "to_local")

    def borrow(self, number: int, values: torch.Tensor) -> bool:
        """Make parameter ``number`` a view of ``values`` instead of ``flat``, until :meth:`give_back`.

        The parameter's values in ``flat`` are lost. Return False, and change nothing, if the
        parameter is a copy and needs its own memory.
        """
        segment, parameter = self.parameters[number]
        if self._follows(parameter):
            return False
        parameter.data = values.view(segment.shape)
        if number not in self._borrowed:
            self._borrowed.add(number)
            forget_values(self._view(segment))
        return True

    def give_back(self) -> None:
        """Make the borrowed parameters views of ``flat`` again."""
        for number in self._borrowed:
            segment, parameter = self.parameters[number]
            parameter.data = self._view(segment)
        self._borrowed.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy ``flat`` into the parts of the module that are no views of it.

        These are buffers, parameters of other dtypes, and shards.
        """
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
        """Return the present buffers as the end of a flat vector (from ``buffers_start`` on).

        Of a buffer whose rule is "sum" this is the difference to its value in ``flat``.
        """
        start = self.layout.buffers_start
        end = torch.zeros(
            self.layout.size - start, dtype=self.layout.dtype, device=self.flat.device
        )
        self._save_buffers(end, start)
        for segment, _, _ in self._buffers:
            if segment.rule == SUM:
                places = end[segment.start - start : segment.stop - start], self._place(segment)
                now, before = (values_in(p, segment.kind, segment.dtype) for p in places)
                before = before.to(segment.dtype).to(now.dtype)  # what the module began with
                now.copy_(torch.where(now == before, 0, now - before))  # infinities too
        return end

    @torch.no_grad()
    def save_buffers(self, out: torch.Tensor) -> None:
        """Write the present buffers into their places in ``out`` (a flat vector)."""
        self._save_buffers(out, 0)

    @torch.no_grad()
    def _save_buffers(self, out: torch.Tensor, first: int) -> None:
        """Write the present buffers into ``out``, which begins with element ``first`` of the vector."""
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

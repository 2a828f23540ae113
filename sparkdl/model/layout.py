"""The layout of the flat vector: which tensors of a module it has, in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.errors import ModelError
from sparkdl.model.buffers import FIRST, Rule, rules_of
from sparkdl.model.preparation import WRAPPED


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
    for name, parameter in ((name, local(parameter)) for name, parameter in trainable):
        if parameter.is_complex() or not parameter.is_floating_point():
            raise ModelError(
                f'parameter "{name}" is {parameter.dtype}: only parameters of a real '
                "floating-point type can be trained."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f'parameter "{name}" is lazy and has no shape yet: give the layer its sizes, or '
                "let the function given as model= call the module once on an example."
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
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise ModelError(
                f'buffer "{name}" is lazy and has no shape yet: give the layer its sizes, or '
                "let the function given as model= call the module once on an example."
            )
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

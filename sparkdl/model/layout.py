"""The layout of the flat vector: which tensors of a module it has, in which order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.errors import ModelError


@dataclass(frozen=True)
class TensorRange:
    """The range of one tensor in the flat vector.

    Attributes:
        name: The name of the parameter or buffer.
        kind: "parameter", "average" or "exact".
        start: The first element in the flat vector.
        length: The number of elements of the flat vector (for "exact": the tensor's bytes, rounded up).
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        sparse: The tensor is the table of an embedding with ``sparse=True``, whose gradient is rows.
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


def layout_of(module: nn.Module) -> Layout:
    """Lay out ``module``.

    Raises:
        ModelError: The module has something that cannot be trained.
    """
    tables = sparse_tables(module)
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    trainable.sort(key=lambda item: id(item[1]) in tables)
    if not trainable:
        raise ModelError(_NOTHING.format(sum(1 for _ in module.parameters())))
    memory: dict[int, str] = {}
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
        first = memory.setdefault(parameter.untyped_storage().data_ptr(), name)
        if first != name and parameter.numel():
            raise ModelError(
                f'parameters "{first}" and "{name}" share memory but are two objects: to tie them, '
                "assign the same nn.Parameter to both places."
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
                f'buffer "{name}" is lazy and has no shape yet: give the layer its sizes, or '
                "let the function given as model= call the module once on an example."
            )
        if buffer.is_floating_point() and buffer.element_size() <= dtype.itemsize:
            place(name, "average", buffer, buffer.numel())
        else:
            nbytes = buffer.numel() * buffer.element_size()
            place(name, "exact", buffer, math.ceil(nbytes / dtype.itemsize))
    return Layout(tuple(segments), dtype, position)


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

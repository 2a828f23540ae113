"""Sections: the gradients and buffers that a replica sends to a slice, as bytes in fixed places.

A *section* is what one replica sends to one slice. It has these parts, in this order, each
aligned to 64 bytes:

* the dense gradient, ``plan.dense_length`` elements in the wire dtype; or, with a compression hook,
  the tensors that the hook sends for each parameter (:mod:`sparkdl.slices.section`);
* the buffers, in the dtype of the flat vector;
* optimizer state, if replicas take steps themselves (``local_steps``): one part for each array;
* for each sparse table the numbers of its touched rows (int64), then their gradients (wire dtype).

The same bytes are in a slab or sent through the shuffle. A :class:`SectionLayout` says how to read
them.

Compression of the gradients that replicas send: hooks, the forms of their output, decompression.

A hook is one function, like a communication hook of torch's DistributedDataParallel: it takes a
:class:`GradBucket` and returns a dictionary of tensors. A gradient is sent in one of three forms,
the classes of Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine
Learning", 2021. :func:`decompress` makes a dense gradient of each:

* quantized: ``values``, as many as the gradient has, of any dtype, multiplied by ``scale`` if it is
  present;
* sparse: ``values`` at ``indices`` into the flattened gradient, each index at most once; all other
  elements are zero; multiplied by ``scale`` if it is present;
* low-rank: ``left @ right.T``, with shapes (n, r) and (m, r), of the gradient as a matrix: n is its
  first dimension, m the product of the others.

Tensors with other names stay on the replica and are in ``bucket.state`` at the next call.

[Note: error feedback] A lossy form omits part of the gradient. The replica adds the omitted part to
its next gradient (Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", 2018; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019). This module keeps this
*residual* for every hook, unless the hook has the attribute ``error_feedback = False``. The
residual belongs to the replica's mean gradient, not to its share of the global sum: a short last
batch changes the shares, and a residual in units of samples would then count many times over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sparkdl.codec.packed import (
    ByParameter,
    Tensors,
    TensorSpec,
    aligned,
    as_tensor,
    open_packed,
    packed_nbytes,
)
from sparkdl.errors import ParameterError, known_arguments, shown
from sparkdl.model.flat import Layout
from sparkdl.plain import is_number, is_whole, make_plain
from sparkdl.slices.spec import Fragment, SliceSpec

RESIDUAL = "sparkdl.residual"
"""The name of the residual among the tensors that a replica keeps."""
TRAVEL = ("values", "indices", "scale", "left", "right")
"""The names of the tensors that are sent."""


@dataclass(frozen=True, kw_only=True)
class GradBucket:
    """The gradient of one parameter on one replica, with the state that the hook keeps for it.

    Attributes:
        name: The parameter's name.
        gradient: The gradient with the residual of the last iterations added. It has the
            parameter's shape and the dtype of the model's flat vector (float32 or float64), is
            contiguous and finite, and must not be changed.
        state: Copies of the tensors that the hook kept for this parameter; empty the first time.
        iteration: The iteration's number, from 0.
        seed: A seed for random draws that is specific to this parameter, replica and iteration.
    """

    name: str
    gradient: torch.Tensor
    state: Tensors = field(default_factory=dict)
    iteration: int = 0
    seed: int = 0


Hook = Callable[[GradBucket], Tensors]
"""The type of ``Trainer.compression``."""


@known_arguments
@dataclass(frozen=True)
class TopK:
    """Send the fraction ``ratio`` of each gradient's elements with the largest magnitude, and their
    indices.

    This is Lin et al., "Deep Gradient Compression", 2018, without its momentum correction: the
    owner of the slice applies momentum to the sum of what arrives. At least one element of each
    tensor is sent; among equal elements the first is taken. An element takes 8 bytes in float32.
    Vectors, and tensors that would not become smaller, are sent whole.
    """

    ratio: float = 0.01
    """Above 0, at most 1."""
    error_feedback: bool = True
    """Add the elements that were not sent to the next gradient."""

    def __post_init__(self) -> None:
        make_plain(self)
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise ParameterError(
                f"TopK: ratio={shown(self.ratio)}: give a number above 0, at most 1."
            )

    def __call__(self, bucket: GradBucket) -> dict[str, torch.Tensor]:
        """Return the sparse form, or the whole gradient as ``values``."""
        flat = bucket.gradient.reshape(-1)
        places = torch.int32 if len(flat) < 2**31 else torch.int64
        count = max(1, round(self.ratio * len(flat)))
        smaller = count * (flat.itemsize + places.itemsize) < len(flat) * flat.itemsize
        if bucket.gradient.ndim < 2 or not smaller:
            return {"values": flat}
        indices = largest(flat, count)
        return {"indices": indices.to(places), "values": flat[indices]}


@known_arguments
@dataclass(frozen=True)
class PowerSGD:
    """Send each gradient matrix as two factors of rank ``rank``.

    This is Vogels, Karimireddy, Jaggi, "PowerSGD", 2019, with one difference. In the paper the
    replicas all-reduce both factors, so that they share one approximation of the mean gradient.
    Here a replica sends once and receives nothing back, so each makes one step of power iteration
    on its *own* gradient, starting from its last ``right`` factor, and the owner of the slice adds
    up the M products. The sum has a rank of up to M times ``rank``; owners receive and multiply M
    pairs of factors. Vectors, and matrices that would not become smaller, are sent whole.
    """

    rank: int = 4
    """At least 1."""
    error_feedback: bool = True
    """Add the error of the approximation to the next gradient."""

    def __post_init__(self) -> None:
        make_plain(self)
        if not is_whole(self.rank, 1):
            raise ParameterError(
                f"PowerSGD: rank={shown(self.rank)}: give a whole number of at least 1."
            )

    def __call__(self, bucket: GradBucket) -> dict[str, torch.Tensor]:
        """Return the low-rank form, whose ``left`` has orthonormal columns, or the whole gradient."""
        if bucket.gradient.ndim < 2 or not bucket.gradient.numel():
            return {"values": bucket.gradient}
        matrix = bucket.gradient.flatten(1)
        if matrix.data_ptr() % 64:  # the bits of a product may depend on alignment
            matrix = matrix.clone()
        rows, columns = matrix.shape
        rank = min(self.rank, rows, columns)
        if rank * (rows + columns) >= matrix.numel():
            return {"values": bucket.gradient}
        begin = bucket.state.get("begin")
        if begin is None or begin.shape != (columns, rank):
            generator = torch.Generator().manual_seed(bucket.seed)
            begin = torch.randn(columns, rank, generator=generator, dtype=matrix.dtype)
        left = _orthonormal(matrix @ _orthonormal(begin.to(matrix.device)))
        right = matrix.T @ left
        return {"left": left, "right": right, "begin": right}


def largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices (int64, ascending) of the ``count`` elements of largest magnitude.

    Among equal elements the first are taken. ``flat`` is one-dimensional and finite and has at
    least ``count`` elements.
    """
    if flat.device.type != "cpu":
        size = flat.abs()
        least = size.topk(count).values[-1]
        above, equal = (size > least).nonzero()[:, 0], (size == least).nonzero()[:, 0]
        return torch.cat([above, equal[: count - len(above)]]).sort().values
    sizes = np.abs(flat.numpy())
    limit = np.partition(sizes, len(sizes) - count)[-count]  # 4 times as fast as torch.topk
    more, same = np.flatnonzero(sizes > limit), np.flatnonzero(sizes == limit)
    return torch.from_numpy(np.sort(np.concatenate([more, same[: count - len(more)]])))


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a space that contains the columns."""
    return torch.linalg.qr(columns).Q


@torch.no_grad()
def compress(
    hook: Hook, bucket: GradBucket, wire: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Compress one gradient into the tensors to send and those to keep, see [Note: error feedback].

    A gradient that is not finite is sent whole, because the iteration will not be applied.
    """
    state = dict(bucket.state)
    residual = state.pop(RESIDUAL, None)
    gradient = bucket.gradient if residual is None else bucket.gradient + residual
    # copies, because the hook may change them
    state = {name: tensor.clone() for name, tensor in state.items()}
    if not math.isfinite(gradient.sum().item()) and not gradient.isfinite().all():
        return {"values": gradient.to(wire)}, dict(bucket.state)
    made = hook(replace(bucket, gradient=gradient, state=state))
    sent = {
        name: tensor.to(wire) if tensor.dtype == gradient.dtype else tensor
        for name, tensor in made.items()
        if name in TRAVEL
    }
    kept = {name: tensor for name, tensor in made.items() if name not in TRAVEL}
    if getattr(hook, "error_feedback", True):
        dense = decompress(sent, gradient.shape, gradient.dtype)
        left_out = torch.sub(gradient, dense, out=dense)
        if left_out.numel() and any(left_out.aminmax()):  # 6 times as fast as Tensor.any
            kept[RESIDUAL] = left_out
    return sent, kept


def decompress(
    sent: Tensors, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the dense gradient that was sent, in new memory."""
    length = math.prod(shape)
    if sent.keys() == {"left", "right"}:
        # copies: the bits of a product may depend on the alignment of its factors
        left, right = (sent[name].to(dtype, copy=True) for name in ("left", "right"))
        rows = shape[0] if shape else 1
        wanted = rows, length // max(rows, 1)
        if left.ndim != 2 or right.ndim != 2 or (len(left), len(right)) != wanted:
            raise ValueError(
                f'"left" is {list(left.shape)} and "right" {list(right.shape)}: they must be '
                f"[{wanted[0]}, r] and [{wanted[1]}, r]"
            )
        return (left @ right.T).view(shape)
    if "values" not in sent or not sent.keys() <= {"values", "indices", "scale"}:
        names = ", ".join(f'"{name}"' for name in sent) or "nothing"
        raise ValueError(
            f'{names} travels: it must be "values", with "indices" and "scale" or without, or '
            '"left" and "right"'
        )
    values = sent["values"].to(dtype, copy=True).view(-1)
    if "scale" in sent:
        if sent["scale"].numel() != 1:
            raise ValueError(f'"scale" has {sent["scale"].numel()} elements: it must be one')
        values.mul_(sent["scale"].to(dtype).view(()))
    if "indices" not in sent:
        if len(values) != length:
            raise ValueError(f'there are {len(values)} "values" of {length}, and no "indices"')
        return values.view(shape)
    indices = sent["indices"].reshape(-1)
    if len(values) != len(indices):
        raise ValueError(f'there are {len(values)} "values" and {len(indices)} "indices"')
    dense = torch.zeros(length, dtype=dtype, device=values.device)
    dense[indices.long()] = values
    return dense.view(shape)


SparseRows = tuple[torch.Tensor, torch.Tensor]
"""The gradient of a sparse table: row numbers (int64, (k,), ascending) and their values ((k,
width))."""


OWN, SUM, NOTHING, SPARE = "own", "sum", "nothing", "spare"
"""The kinds of dense gradient in a section. OWN: the replica's own gradient. SUM: the weighted sum
over a block of replicas of which this is the first, in the dtype of the flat vector. NOTHING: none,
because it is part of another section's sum. SPARE: the sum over all replicas, in memory that the
update may change.
"""


@dataclass(frozen=True)
class SectionLayout:
    """The lengths of the variable parts of a section."""

    wire: torch.dtype
    rows: Mapping[int, int] = field(default_factory=dict)  # touched rows, by number of the table
    arrays: Mapping[str, str] = field(default_factory=dict)  # dtype names, by array
    compressed: tuple[TensorSpec, ...] | None = None  # in place of the dense gradient
    gradient: str = OWN  # or SUM or NOTHING


@dataclass(frozen=True)
class Section:
    """A section, opened: what replica ``replica`` sends to a slice."""

    replica: int
    weight: float  # the number of samples, or the sum of their weights
    gradient: torch.Tensor  # (dense_length,); empty if it is compressed or of kind NOTHING
    buffers: torch.Tensor  # for the rule "sum": what was added
    absent: frozenset[int] = frozenset()
    tables: Mapping[int, SparseRows] = field(default_factory=dict)  # rows from the fragment's first
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)  # after local steps
    compressed: ByParameter | None = None
    kind: str = OWN
    others: bytes = b""
    repeats: bool = False  # an earlier rank, with the same rows, has the same buffers

    def dense_gradient(self, plan: SliceSpec, dtype: torch.dtype) -> torch.Tensor:
        """Return the dense gradient, (dense_length,) in ``dtype``, zero where this replica sent
        nothing."""
        if self.compressed is None:
            return self.gradient if self.gradient.dtype == dtype else self.gradient.to(dtype)
        dense = torch.zeros(plan.dense_length, dtype=dtype)
        for fragment in plan.parameters:
            if fragment.number in self.compressed:
                found = decompress(self.compressed[fragment.number], fragment.shape, dtype)
                dense[fragment.start : fragment.stop] = found.view(-1)
        return dense


def section_nbytes(plan: SliceSpec, dtype: torch.dtype, layout: SectionLayout) -> int:
    """Return the number of bytes of a section, a multiple of 64."""
    return sum(aligned(nbytes) for _, nbytes, _ in _parts(plan, dtype, layout))


def open_section(
    plan: SliceSpec,
    dtype: torch.dtype,
    layout: SectionLayout,
    data: np.ndarray | memoryview,
    *,
    replica: int = 0,
    weight: float = 1.0,
    absent: frozenset[int] = frozenset(),
    others: bytes = b"",
) -> Section:
    """Return a section whose tensors share the memory of ``data``, for reading or for writing."""
    parts: dict[str, torch.Tensor] = {"gradient": torch.empty(0, dtype=layout.wire)}
    compressed: ByParameter | None = None
    place = 0
    for name, nbytes, kind in _parts(plan, dtype, layout):
        raw = np.frombuffer(data, np.uint8, nbytes, place)
        if name == "compressed":
            compressed = open_packed(layout.compressed or (), raw)
        else:
            parts[name] = as_tensor(raw.data, kind)
        place += aligned(nbytes)
    tables = {}
    for fragment in plan.tables:
        if fragment.number in layout.rows:
            values = parts[f"values {fragment.number}"].view(-1, fragment.shape[1])
            tables[fragment.number] = parts[f"rows {fragment.number}"], values
    arrays = {name: parts[f"array {name}"] for name in layout.arrays}
    return Section(
        replica,
        weight,
        parts["gradient"],
        parts["buffers"],
        absent,
        tables,
        arrays,
        compressed,
        layout.gradient,
        others,
    )


def cut_rows(fragment: Fragment, rows: SparseRows) -> SparseRows:
    """Return the rows of a whole table that fall into ``fragment``, counted from its first row."""
    numbers, values = rows
    low, high = torch.searchsorted(
        numbers, torch.tensor([fragment.first_row, fragment.first_row + fragment.shape[0]])
    ).tolist()
    return numbers[low:high] - fragment.first_row, values[low:high]


def write_gradients(
    layout: Layout,
    plan: SliceSpec,
    gradients: Sequence[torch.Tensor | None],
    tables: Mapping[int, SparseRows],
    out: Section,
    written: frozenset[int] = frozenset(),
) -> None:
    """Write the gradients of a replica into a section, rounded to the section's dtype.

    The places of parameters without a gradient are filled with zeros. In a compressed section only
    the tables are written. Those of parameters in ``written`` are there already.
    """
    for fragment in plan.parameters:
        if fragment.number in written:
            continue
        if fragment.sparse:
            if fragment.number in out.tables:
                for place, values in zip(
                    out.tables[fragment.number],
                    cut_rows(fragment, tables[fragment.number]),
                    strict=True,
                ):
                    place.copy_(values)
            continue
        if out.compressed is not None:
            continue
        gradient, place = gradients[fragment.number], out.gradient[fragment.start : fragment.stop]
        if gradient is None:
            place.zero_()
        else:
            offset = plan.start + fragment.start - layout.segments[fragment.number].start
            place.copy_(gradient.reshape(-1)[offset : offset + fragment.length])


def first_not_finite(plan: SliceSpec, section: Section) -> int | None:
    """Return the number of the first parameter with an inf or a NaN in this section, or None."""
    compressed = section.compressed or {}
    floats = {n: [t for t in c.values() if t.is_floating_point()] for n, c in compressed.items()}
    tables = [values for _, values in section.tables.values()]
    if all(map(sums_up, [section.gradient, *tables, *itertools.chain(*floats.values())])):
        return None
    for fragment in plan.parameters:
        if fragment.sparse:
            values = (
                section.tables[fragment.number][1] if fragment.number in section.tables else None
            )
        elif section.compressed is not None:
            found = floats.get(fragment.number)
            values = torch.cat([t.reshape(-1) for t in found]) if found else None
        else:
            values = section.gradient[fragment.start : fragment.stop]
        if values is not None and not torch.isfinite(values).all():
            return fragment.number
    return None


def sums_up(values: torch.Tensor) -> bool:
    """Return whether the sum of the values is finite, in one fast pass.

    False means that an element is not finite, or that the sum of finite elements overflows.
    """
    return math.isfinite(values.sum(dtype=torch.float32).item())


def _parts(
    plan: SliceSpec, dtype: torch.dtype, layout: SectionLayout
) -> Iterator[tuple[str, int, torch.dtype]]:
    dense = dtype if layout.gradient == SUM else layout.wire
    length = 0 if layout.gradient == NOTHING else plan.dense_length
    if layout.compressed is None:
        yield "gradient", length * dense.itemsize, dense
    else:
        yield "compressed", packed_nbytes(layout.compressed), torch.uint8
    yield "buffers", (plan.length - plan.buffers_start) * dtype.itemsize, dtype
    for name, kind in layout.arrays.items():
        array = getattr(torch, kind)
        yield f"array {name}", plan.trainable_length * array.itemsize, array
    for fragment in plan.tables:
        if fragment.number in layout.rows:
            count, width = layout.rows[fragment.number], fragment.shape[1]
            yield f"rows {fragment.number}", count * 8, torch.int64
            yield f"values {fragment.number}", count * width * layout.wire.itemsize, layout.wire

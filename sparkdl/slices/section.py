"""What a replica sends to a slice: gradients and buffers, as bytes with a fixed place for each.

A *section* is one contribution in memory. In this order, each part from a multiple of 64 bytes on:

* the dense gradient, ``plan.dense_length`` elements in the wire's dtype; or, where a hook compresses
  it, what that sends of each parameter (:mod:`sparkdl.slices.compression`);
* the buffers, in the dtype of the flat vector;
* optimizer state, where replicas step by themselves (``local_steps``): one part an array;
* for each sparse table the numbers of its touched rows (int64), then their gradients (wire's dtype).

The same bytes lie in a slab or travel through the shuffle; a :class:`SectionLayout` says how to
read them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sparkdl.codec.packed import (
    ALIGNMENT,
    ByParameter,
    TensorSpec,
    as_tensor,
    open_packed,
    packed_nbytes,
)
from sparkdl.model.flat import Layout
from sparkdl.slices.compression import decompress
from sparkdl.slices.spec import Fragment, SliceSpec

SparseRows = tuple[torch.Tensor, torch.Tensor]
"""Of a sparse table: numbers of rows (int64, (k,), ascending) and their gradients ((k, width))."""


OWN, SUM, NOTHING, SPARE = "own", "sum", "nothing", "spare"
"""What a section has of a dense gradient: the replica's own; the weighted sum over a block of replicas
of which this is the first, in the dtype of the flat vector; nothing, as it is in another's sum."""


@dataclass(frozen=True)
class SectionLayout:
    """How long the variable parts of a section are: ``rows`` of each sparse table by its number,
    the dtype name of each array of optimizer state, and in place of a dense gradient the tensors in
    which it is ``compressed``. ``gradient``: OWN, SUM or NOTHING."""

    wire: torch.dtype
    rows: Mapping[int, int] = field(default_factory=dict)
    arrays: Mapping[str, str] = field(default_factory=dict)
    compressed: tuple[TensorSpec, ...] | None = None
    gradient: str = OWN


@dataclass(frozen=True)
class Section:
    """What replica ``replica`` gives to a slice. ``weight``: its samples, or the sum of their weights.

    ``gradient``: (dense_length,); ``buffers``: the rest of the slice; ``tables``: by parameter
    number, rows counted from the piece's first; ``absent``: parameters without a gradient.
    ``compressed``: what stands for the gradient, by parameter number; ``gradient`` is then empty.
    ``kind``: what ``gradient`` is: OWN, SUM or NOTHING (then it is empty too); SPARE: the sum of all,
    in memory that the update may change. ``arrays``, ``others``: after local steps, the optimizers'
    state, the latter packed.
    """

    replica: int
    weight: float
    gradient: torch.Tensor
    buffers: torch.Tensor
    absent: frozenset[int] = frozenset()
    tables: Mapping[int, SparseRows] = field(default_factory=dict)
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    compressed: ByParameter | None = None
    kind: str = OWN
    others: bytes = b""

    def dense_gradient(self, plan: SliceSpec, dtype: torch.dtype) -> torch.Tensor:
        """(dense_length,) in ``dtype``, zero where this replica sent nothing."""
        if self.compressed is None:
            return self.gradient if self.gradient.dtype == dtype else self.gradient.to(dtype)
        dense = torch.zeros(plan.dense_length, dtype=dtype)
        for piece in plan.parameters:
            if piece.number in self.compressed:
                found = decompress(self.compressed[piece.number], piece.shape, dtype)
                dense[piece.start : piece.stop] = found.view(-1)
        return dense


def section_nbytes(plan: SliceSpec, dtype: torch.dtype, layout: SectionLayout) -> int:
    """Bytes of a section; a multiple of 64."""
    return sum(_aligned(nbytes) for _, nbytes, _ in _parts(plan, dtype, layout))


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
    """A contribution whose tensors share the memory of ``data`` (to be read, or to be written)."""
    parts: dict[str, torch.Tensor] = {"gradient": torch.empty(0, dtype=layout.wire)}
    compressed: ByParameter | None = None
    place = 0
    for name, nbytes, kind in _parts(plan, dtype, layout):
        raw = np.frombuffer(data, np.uint8, nbytes, place)
        if name == "compressed":
            compressed = open_packed(layout.compressed or (), raw)
        else:
            parts[name] = as_tensor(raw.data, kind)
        place += _aligned(nbytes)
    tables = {}
    for piece in plan.tables:
        if piece.number in layout.rows:
            values = parts[f"values {piece.number}"].view(-1, piece.shape[1])
            tables[piece.number] = parts[f"rows {piece.number}"], values
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


def cut_rows(piece: Fragment, rows: SparseRows) -> SparseRows:
    """The rows of a whole table that fall into ``piece``, counted from its first row."""
    numbers, values = rows
    low, high = torch.searchsorted(
        numbers, torch.tensor([piece.first_row, piece.first_row + piece.shape[0]])
    ).tolist()
    return numbers[low:high] - piece.first_row, values[low:high]


def write_gradients(
    layout: Layout,
    plan: SliceSpec,
    gradients: Sequence[torch.Tensor | None],
    tables: Mapping[int, SparseRows],
    out: Section,
    written: frozenset[int] = frozenset(),
) -> None:
    """Write the gradients of a replica (by parameter number) into a section, rounding to its dtype.

    Places of parameters without a gradient are zeroed; those of ``written`` ones left as they are. In
    a compressed section: the tables alone.
    """
    for piece in plan.parameters:
        if piece.number in written:
            continue
        if piece.sparse:
            if piece.number in out.tables:
                for place, values in zip(
                    out.tables[piece.number], cut_rows(piece, tables[piece.number]), strict=True
                ):
                    place.copy_(values)
            continue
        if out.compressed is not None:
            continue
        gradient, place = gradients[piece.number], out.gradient[piece.start : piece.stop]
        if gradient is None:
            place.zero_()
        else:
            offset = plan.start + piece.start - layout.segments[piece.number].start
            place.copy_(gradient.reshape(-1)[offset : offset + piece.length])


def first_not_finite(plan: SliceSpec, section: Section) -> int | None:
    """The number of the first parameter with an inf or a NaN in this section; None: all finite."""
    compressed = section.compressed or {}
    floats = {n: [t for t in c.values() if t.is_floating_point()] for n, c in compressed.items()}
    tables = [values for _, values in section.tables.values()]
    if all(map(sums_up, [section.gradient, *tables, *itertools.chain(*floats.values())])):
        return None
    for piece in plan.parameters:
        if piece.sparse:
            values = section.tables[piece.number][1] if piece.number in section.tables else None
        elif section.compressed is not None:
            found = floats.get(piece.number)
            values = torch.cat([t.reshape(-1) for t in found]) if found else None
        else:
            values = section.gradient[piece.start : piece.stop]
        if values is not None and not torch.isfinite(values).all():
            return piece.number
    return None


def sums_up(values: torch.Tensor) -> bool:
    """Whether the sum is finite, one fast pass: it is not where an element is not, nor where finite
    ones add up to too much."""
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
    for piece in plan.tables:
        if piece.number in layout.rows:
            count, width = layout.rows[piece.number], piece.shape[1]
            yield f"rows {piece.number}", count * 8, torch.int64
            yield f"values {piece.number}", count * width * layout.wire.itemsize, layout.wire


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

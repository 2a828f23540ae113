"""Sections: the gradients and buffers that a replica sends to a slice, as bytes in fixed places.

A *section* is what one replica sends to one slice. It has these parts, in this order, each
aligned to 64 bytes:

* the dense gradient, ``plan.dense_length`` elements in the wire dtype; or, with a compression hook,
  the tensors that the hook sends for each parameter (:mod:`sparkdl.slices.compression`);
* the buffers, in the dtype of the flat vector;
* optimizer state, if replicas take steps themselves (``local_steps``): one part for each array;
* for each sparse table the numbers of its touched rows (int64), then their gradients (wire dtype).

The same bytes are in a slab or sent through the shuffle. A :class:`SectionLayout` says how to read
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sparkdl.codec.frames import as_tensor
from sparkdl.codec.packed import ALIGNMENT, ByParameter, TensorSpec, open_packed, packed_nbytes
from sparkdl.model.layout import Layout
from sparkdl.slices.compression import decompress
from sparkdl.slices.spec import Fragment, SliceSpec

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
        place += _aligned(nbytes)
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

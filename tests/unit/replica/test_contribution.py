"""What a replica sends: sections of fixed place, rounded to nearest, tables never dense."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.replica.compute import MiniBatch, forward_backward
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import (
    ReplicaResult,
    section_maps,
    sections_nbytes,
    take_gradients,
    write_sections,
)
from sparkdl.slices.reduce import penalties
from sparkdl.slices.section import (
    Section,
    SectionLayout,
    cut_rows,
    first_not_finite,
    open_section,
    section_nbytes,
)
from sparkdl.slices.spec import Fragment, SliceSpec, slice_specs

NAMES, WIDTH = 1000, 8


class Net(nn.Module):
    """A table among dense parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(NAMES, WIDTH, sparse=True)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(self.table(x).sum(1)))


def live_of(**options: object) -> LiveReplica:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output**2).mean() + output.sum()

    return LiveReplica.of(Recipe(Net, loss, torch.optim.SGD, 1, TrainingOptions(**options)))


def outcome_of(live: LiveReplica, rows: list[list[int]]) -> ReplicaResult:
    batch = MiniBatch([torch.tensor(rows)], [])
    loss = forward_backward(live, batch, 0, 1.0, Clock())
    return ReplicaResult(loss, batch.weight, len(batch), take_gradients(live))


def sections_of(live: LiveReplica, outcome: ReplicaResult, slices: int):
    plans = slice_specs(live.flat.layout, slices)
    maps = section_maps(live, plans, outcome)
    sizes = sections_nbytes(live, plans, maps)
    memory = np.full(sum(sizes), 0xAB, np.uint8)  # a section may find anything in its memory
    return plans, maps, sizes, write_sections(live, plans, maps, outcome, memory)


# Tables


@pytest.mark.parametrize("slices", [1, 3, 7])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_bytes_follow_the_touched_rows_and_not_the_table(slices: int, wire: str) -> None:
    live, item = live_of(wire=wire), {"fp32": 4, "bf16": 2}[wire]
    found = {}
    for touched in (4, 8, 64):
        rows = np.linspace(0, NAMES - 1, touched).astype(int).reshape(-1, 2).tolist()
        *_, sizes, _ = sections_of(live, outcome_of(live, rows), slices)
        found[touched] = sum(sizes)
    row = 8 + WIDTH * item
    for less, more in ((4, 8), (8, 64)):
        grown = found[more] - found[less]
        assert abs(grown - (more - less) * row) <= 2 * slices * ALIGNMENT  # parts are aligned
    assert found[64] < NAMES * WIDTH * item / 2


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_rows_of_all_slices_are_the_gradient(slices: int) -> None:
    live = live_of()
    outcome = outcome_of(live, [[0, 5], [5, 999], [500, 501]])
    plans, *_, sections = sections_of(live, outcome, slices)
    numbers, values = [], []
    for plan, section in zip(plans, sections, strict=True):
        for fragment in plan.tables:
            rows, gradient = section.tables[fragment.number]
            assert ((rows >= 0) & (rows < fragment.shape[0])).all()
            numbers += (rows + fragment.first_row).tolist()
            values.append(gradient)
    assert numbers == [0, 5, 500, 501, 999]
    (wanted,) = outcome.gradients.tables.values()
    assert torch.equal(torch.cat(values), wanted[1])


@settings(deadline=None, max_examples=50)
@given(
    st.sets(st.integers(0, 99), max_size=30), st.lists(st.integers(0, 100), min_size=0, max_size=4)
)
def test_cut_rows_gives_each_row_to_one_piece(rows: set[int], cuts: list[int]) -> None:
    numbers = torch.tensor(sorted(rows), dtype=torch.int64)
    values = numbers.double()[:, None] * torch.ones(1, 3)
    bounds, found = [0, *sorted(cuts), 100], []
    for low, high in itertools.pairwise(bounds):
        fragment = Fragment(0, "parameter", 0, (high - low) * 3, (high - low, 3), True, low)
        mine, gradient = cut_rows(fragment, (numbers, values))
        assert torch.equal(mine + low, gradient[:, 0].long())
        assert len(mine) == 0 or 0 <= int(mine.min()) <= int(mine.max()) < high - low
        found += (mine + low).tolist()
    assert found == sorted(rows)


# Dense parts


@pytest.mark.parametrize(("wire", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("slices", [1, 3])
def test_gradients_are_rounded_to_nearest_and_buffers_not(wire, dtype, slices) -> None:
    live = live_of(wire=wire)
    outcome = outcome_of(live, [[1, 2], [3, 4], [5, 6]])
    plans, maps, _, sections = sections_of(live, outcome, slices)
    flat = torch.zeros(live.flat.layout.size)
    for segment, gradient in zip(live.flat.layout.segments, outcome.gradients.dense, strict=False):
        if gradient is not None:
            flat[segment.start : segment.stop] = gradient.reshape(-1)
    buffers = live.flat.buffers()
    assert {m.wire for m in maps} == {dtype}
    for plan, section in zip(plans, sections, strict=True):
        assert section.gradient.dtype == dtype
        assert section.buffers.dtype == torch.float32
        for fragment in plan.parameters:
            if not fragment.sparse:
                start = plan.start + fragment.start
                exact = flat[start : start + fragment.length]
                assert torch.equal(
                    section.gradient[fragment.start : fragment.stop], exact.to(dtype)
                )
        begin = plan.start + plan.buffers_start - live.flat.layout.buffers_start
        assert torch.equal(section.buffers, buffers[begin : begin + len(section.buffers)])
    assert not torch.equal(flat, flat.to(dtype).float())


@pytest.mark.parametrize("slices", [1, 3])
def test_places_without_a_gradient_are_zero_whatever_lay_there(slices: int) -> None:
    live = live_of()
    outcome = outcome_of(live, [[1, 2], [3, 4], [5, 6]])
    number = [s.name for s, _ in live.flat.parameters].index("first.weight")
    outcome.gradients.dense[number] = None
    plans, *_, sections = sections_of(live, outcome, slices)
    places = [
        section.gradient[fragment.start : fragment.stop]
        for plan, section in zip(plans, sections, strict=True)
        for fragment in plan.parameters
        if fragment.number == number
    ]
    assert sum(map(len, places)) == WIDTH * WIDTH
    assert not torch.cat(places).any()
    assert all(number in section.absent for section in sections)


@pytest.mark.parametrize("rows", [{}, {1: 3}, {1: 0}])
@pytest.mark.parametrize("arrays", [{}, {"exp_avg": "float32", "steps": "int64"}])
def test_parts_begin_at_multiples_of_64_and_do_not_overlap(rows, arrays) -> None:
    live = live_of()
    (plan,) = slice_specs(live.flat.layout, 1)
    table = plan.tables[0].number
    layout = SectionLayout(
        torch.bfloat16, dict.fromkeys([table] * len(rows), next(iter(rows.values()), 0)), arrays
    )
    nbytes = section_nbytes(plan, torch.float32, layout)
    memory = np.zeros(nbytes, np.uint8)
    section = open_section(plan, torch.float32, layout, memory, replica=4, weight=2.5)
    assert (section.replica, section.weight) == (4, 2.5)
    parts = [section.gradient, section.buffers, *section.arrays.values()]
    parts += [t for pair in section.tables.values() for t in pair]
    assert set(section.arrays) == set(arrays)
    for mark, part in enumerate(parts, start=1):
        if part.numel():
            assert (part.data_ptr() - memory.ctypes.data) % ALIGNMENT == 0
            part.view(-1).view(torch.uint8).fill_(mark)
    for mark, part in enumerate(parts, start=1):
        assert (part.reshape(-1).view(torch.uint8) == mark).all()
    assert nbytes % ALIGNMENT == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["first.weight", "first.bias", "table.weight", "norm.weight"])
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("slices", [1, 3])
def test_the_first_parameter_that_is_not_finite(value, where, place, slices) -> None:
    live = live_of()
    outcome = outcome_of(live, [[1, 2], [3, 4], [5, 6]])
    names = [s.name for s, _ in live.flat.parameters]
    number = names.index(where)
    if where == "table.weight":
        outcome.gradients.tables[number][1][place, 3] = value
    else:
        outcome.gradients.dense[number].view(-1)[place] = value
    plans, *_, sections = sections_of(live, outcome, slices)
    found = [first_not_finite(p, s) for p, s in zip(plans, sections, strict=True)]
    assert set(found) == ({number} if slices == 1 else {None, number})


@pytest.mark.parametrize("value", [0.0, 3e38, -3e38])
def test_finite_gradients_are_finite_whatever_their_sum(value: float) -> None:
    plan = SliceSpec(0, 0, 4, (Fragment(0, "parameter", 0, 4),))
    section = Section(0, 1.0, torch.full((4,), value), torch.empty(0))
    assert first_not_finite(plan, section) is None


# Norms


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, {}),
        (0.5, {"first.weight": 0.5, "first.bias": 0.5, "norm.weight": 0.5, "norm.bias": 0.5}),
        ({"*.weight": 0.1, "first.*": 0.25},
         {"first.weight": 0.35, "first.bias": 0.25, "norm.weight": 0.1}),
        ({"first.bias": 0.0}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_strengths_by_pattern_and_never_of_tables_or_buffers(value, expected) -> None:
    layout = live_of().flat.layout
    found = {layout.segments[n].name: s for n, s in penalties(value, layout).items()}
    assert found == expected

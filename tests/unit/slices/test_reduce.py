"""Sums of gradients and averages of buffers, in replica order: the mathematics of one slice."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.model.buffers import RULES
from sparkdl.slices.reduce import merge_buffers, reduce_gradients
from sparkdl.slices.section import Section
from sparkdl.slices.spec import Fragment, SliceSpec

INF, NAN = float("inf"), float("nan")


def plan_of(*fragments: Fragment) -> SliceSpec:
    return SliceSpec(0, 0, max(fragment.stop for fragment in fragments), fragments)


GRADIENT = plan_of(Fragment(0, "parameter", 0, 4))
AVERAGE = plan_of(Fragment(0, "parameter", 0, 2), Fragment(1, "average", 4, 3, rule="mean"))
"""Two parameters and two elements of padding before the buffer."""


def sections(
    weights: list[float],
    *,
    gradients: list[list[float]] | None = None,
    buffers: list[list[float]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Section]:
    """One of each replica. What is not given is NaN, and must not be looked at."""
    none = [[NAN, NAN]] * len(weights)
    parts = zip(weights, gradients or none, buffers or none, strict=True)
    return [
        Section(m, weight, torch.tensor(gradient, dtype=dtype), torch.tensor(buffer, dtype=dtype))
        for m, (weight, gradient, buffer) in enumerate(parts)
    ]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def reduced(
    items: list[Section], dtype: torch.dtype | None = None, plan: SliceSpec = GRADIENT
) -> torch.Tensor:
    out = torch.full((plan.dense_length,), NAN, dtype=dtype or items[0].gradient.dtype)
    assert reduce_gradients(plan, items, out).gradient is out
    return out


def test_no_weight_at_all_is_no_gradient_and_leaves_the_buffers() -> None:
    """A batch whose samples all have weight 0."""
    items = sections([0, 0], gradients=[[1, 2, 3, 4], [5, 6, 7, 8]])
    assert reduced(items).tolist() == [0.0] * 4
    assert merged(sections([0, 0], buffers=[[1, 2, 4], [5, 6, 8]])).tolist() == [9.0] * 7


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30),
                min_size=4,
                max_size=4,
            ),
            st.integers(1, 100) | st.floats(0.01, 100),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_arrival_changes_no_bit(
    rows: list[tuple[list[float], float]], random: object
) -> None:
    values, weights = zip(*rows, strict=True)
    items = sections(weights, gradients=values)
    arrived = list(items)
    random.shuffle(arrived)  # type: ignore[attr-defined]
    assert bits(reduced(arrived)) == bits(reduced(items))
    total = sum(item.weight for item in items)
    exact = torch.stack([i.gradient.double() * i.weight for i in items]).sum(0) / total
    scale = max(float(item.gradient.abs().max()) for item in items)
    assert (reduced(items).double() - exact).abs().max() <= scale * 1e-6
    assert [item.gradient.tolist() for item in items] == list(values)  # left as they are


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_the_dense_trainable_part_is_summed(dtype: torch.dtype) -> None:
    """A table's rows and the buffers go their own ways."""
    plan = plan_of(
        Fragment(0, "parameter", 0, 2),
        Fragment(1, "parameter", 2, 6, (2, 3), True),
        Fragment(2, "average", 8, 2),
    )
    buffers = torch.full((2,), NAN, dtype=dtype)
    rows = torch.tensor([1]), torch.ones(1, 3, dtype=dtype)
    items = [
        Section(0, 1, torch.tensor([1, 2], dtype=dtype), buffers, tables={1: rows}),
        Section(1, 1, torch.tensor([3, 4], dtype=dtype), buffers),
    ]
    out = torch.full((2,), NAN, dtype=dtype)
    found = reduce_gradients(plan, items, out)
    assert out.dtype == dtype
    assert out.tolist() == [2.0, 3.0]
    numbers, values = found.tables[1]
    assert (numbers.tolist(), values.tolist()) == ([1], [[0.5] * 3])
    assert values.dtype == dtype


def test_what_travels_in_another_dtype_is_summed_in_that_of_the_model() -> None:
    """1 + 2**-9 is 1 in bfloat16: the sum must not be rounded to it on the way."""
    items = sections([1, 1], gradients=[[1.0] * 4, [2.0**-8] * 4], dtype=torch.bfloat16)
    assert reduced(items, torch.float32).tolist() == [(1 + 2.0**-8) / 2] * 4


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ([{1, 2}, {2, 3}, {2}], {2}),
        ([{1}, set(), {1}], set()),
        ([{0, 1}], {0, 1}),
        ([set(), set()], set()),
    ],
)
def test_a_parameter_is_absent_where_no_replica_has_it(
    absent: list[set[int]], expected: set[int]
) -> None:
    items = [
        Section(replica, 1, torch.zeros(4), torch.empty(0), frozenset(numbers))
        for replica, numbers in enumerate(absent)
    ]
    assert reduce_gradients(GRADIENT, items, torch.empty(4)).absent == frozenset(expected)


# Tables: rows of the replicas are added up, each row in replica order

TABLE = plan_of(Fragment(0, "parameter", 0, 24, (8, 3), True))


def with_rows(replica: int, weight: float, rows: list[int], seed: int) -> Section:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rows), 3, generator=generator)
    tables = {0: (torch.tensor(rows, dtype=torch.int64), values)}
    return Section(replica, weight, torch.empty(0), torch.empty(0), tables=tables)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 7)), st.integers(0, 9)), min_size=1, max_size=5
    ).filter(lambda parts: any(weight for _, weight in parts)),
    st.randoms(use_true_random=False),
)
def test_rows_add_up_as_the_whole_table_would(
    parts: list[tuple[set[int], int]], random: object
) -> None:
    items = [with_rows(i, weight, sorted(rows), i) for i, (rows, weight) in enumerate(parts)]
    arrived = list(items)
    random.shuffle(arrived)  # type: ignore[attr-defined]
    numbers, values = reduce_gradients(TABLE, arrived, torch.empty(0)).tables[0]
    assert numbers.tolist() == sorted(set().union(*[rows for rows, _ in parts]))
    total, whole = sum(weight for _, weight in parts), torch.zeros(8, 3)
    for item in items:
        rows, mine = item.tables[0]
        whole[rows] = whole[rows].add(mine, alpha=item.weight / total)
    assert bits(values) == bits(whole[numbers])


def test_a_table_that_no_replica_touched_has_no_rows() -> None:
    item = Section(0, 1, torch.empty(0), torch.empty(0), frozenset({0}))
    assert reduce_gradients(TABLE, [item], torch.empty(0)).tables == {}


# Buffers: what is equal everywhere keeps its bits


def merged(items: list[Section], plan: SliceSpec = AVERAGE) -> torch.Tensor:
    weights = torch.full((plan.length,), 9.0, dtype=items[0].buffers.dtype)
    merge_buffers(plan, items, weights)
    return weights


def test_floats_are_averaged_by_counts_and_parameters_left_alone() -> None:
    items = sections([1, 3], buffers=[[1, 2, 4], [5, 6, 8]])
    assert merged(items).tolist() == [9.0, 9.0, 9.0, 9.0, 4.0, 5.0, 7.0]


EQUAL = [0.1, -0.0, 0.0, 1e-45, 3.4e38, INF, -INF]


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 7], [1, 2, 3, 5, 7]])
def test_what_is_equal_everywhere_keeps_its_bits(counts: list[int]) -> None:
    """A constant buffer (a mask of -inf, a position table) must not drift over the iterations."""
    plan = plan_of(Fragment(0, "average", 0, len(EQUAL), rule="mean"))
    items = sections(counts, buffers=[EQUAL] * len(counts))
    assert bits(merged(items, plan)) == bits(torch.tensor(EQUAL))


@pytest.mark.parametrize("rows", [[[NAN] * 3, [NAN] * 3], [[1.0] * 3, [NAN] * 3]])
def test_nan_stays_to_be_seen(rows: list[list[float]]) -> None:
    assert merged(sections([1, 1], buffers=rows))[4:].isnan().all()


def test_buffers_merge_in_replica_order() -> None:
    items = sections([1, 2, 3], buffers=[[1e8, 1, 0.1], [-1e8, 2, 0.2], [1, 3, 0.3]])
    expected = bits(merged(items))
    for arrival in itertools.permutations(items):
        assert bits(merged(list(arrival))) == expected


def test_exact_buffers_come_from_the_first_replica() -> None:
    """Their bits, whatever floats they would be: counters, masks, even the bits of a NaN."""
    patterns = [0x7FA00001, 0x00000001, 0xFFFFFFFF, 0x80000000]
    plan = plan_of(Fragment(0, "exact", 0, 4))
    first = torch.frombuffer(bytearray(struct.pack("<4I", *patterns)), dtype=torch.float32)
    nothing = torch.empty(0)
    items = [
        Section(5, 1, nothing, torch.zeros(4)),
        Section(2, 1, nothing, first),  # replicas 0 and 1 had no samples
        Section(7, 100, nothing, torch.ones(4)),
    ]
    assert struct.unpack("<4I", bits(merged(items, plan))) == tuple(patterns)


BEFORE = [1, 2]
ROWS = [[7, -2], [9, 4], [3, 8]]


DTYPES = torch.int64, torch.int16, torch.uint8, torch.float64, torch.bool
REFUSED = {("sum", torch.bool), *(("mean", d) for d in DTYPES if not d.is_floating_point)}
"""Before training, see test_flat.py."""


@pytest.mark.parametrize(
    ("rule", "dtype"),
    sorted(set(itertools.product([*RULES, "median"], DTYPES)) - REFUSED, key=str),
    ids=str,
)
def test_every_type_of_buffer_follows_its_rule(rule: str, dtype: torch.dtype) -> None:
    """In the bytes of their places, which the rows of the vector's own type do not show."""
    rows, before = (torch.tensor(v).to(dtype) for v in (ROWS, BEFORE))
    function = lambda values: values.to(torch.int64).median(0).values.to(values.dtype)  # noqa: E731
    expected = {
        "first": rows[0],
        "min": rows.amin(0) if dtype != torch.bool else rows.all(0),
        "max": rows.amax(0) if dtype != torch.bool else rows.any(0),
        "sum": before + rows.sum(0, dtype=dtype),
        "mean": (rows.double() * torch.tensor([[1], [3], [4]])).sum(0).div(8).to(dtype),
        "median": function(rows),
    }[rule]
    used = function if rule == "median" else rule
    length = -(-2 * dtype.itemsize // 4)
    fragment = Fragment(0, "exact", 0, length, (2,), dtype=dtype, rule=used)  # type: ignore[arg-type]

    def place(values: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(length)
        memory.view(torch.uint8)[: 2 * dtype.itemsize] = values.view(torch.uint8)
        return memory

    items = [
        Section(m, w, torch.empty(0), place(rows[i]))
        for i, m, w in [(0, 1, 1), (1, 2, 3), (2, 5, 4)]
    ]
    items.insert(0, Section(0, 0, torch.empty(0), place(rows[2])))  # without weight
    weights = place(before)
    merge_buffers(plan_of(fragment), items, weights)
    assert torch.equal(weights.view(torch.uint8)[: 2 * dtype.itemsize].view(dtype), expected)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[INF, 1.0, -INF], [2.0, INF, 5.0]], [INF, INF, -INF]),
        ([[1.0, INF, 2.0], [INF, -INF, 3.0], [-INF, 4.0, NAN]], [INF, INF, NAN]),
    ],
)
def test_no_mean_of_infinity_is_nan(rows: list[list[float]], expected: list[float]) -> None:
    found = merged(sections([1] * len(rows), buffers=rows))[4:]
    assert torch.equal(found.nan_to_num(9.0), torch.tensor(expected).nan_to_num(9.0))
    for rule, name in ((torch.amin, "min"), (torch.amax, "max")):
        plan = plan_of(Fragment(0, "average", 0, 3, rule=name))
        found = merged(sections([1] * len(rows), buffers=rows), plan)
        assert torch.equal(found.nan_to_num(9.0), rule(torch.tensor(rows), 0).nan_to_num(9.0))


def test_ranks_of_one_model_count_once() -> None:
    """They have the same buffers: of a mean that changes nothing, of a sum it would."""
    rows = torch.tensor([[1.0, 5.0], [1.0, 5.0], [3.0, 7.0]])
    repeats = [False, True, False]
    items = [
        Section(m, 1, torch.empty(0), row, repeats=again)
        for m, (row, again) in enumerate(zip(rows, repeats, strict=True))
    ]
    for rule, expected in {"sum": [13.0, 21.0], "mean": [5 / 3, 17 / 3]}.items():
        weights = torch.full((2,), 9.0)
        merge_buffers(plan_of(Fragment(0, "average", 0, 2, rule=rule)), items, weights)
        assert weights.tolist() == pytest.approx(expected)

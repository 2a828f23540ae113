"""The written-out algorithms on virtual ranks: results, order of sums, bytes and cost formulas."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_ranks import Network, VirtualLink, on_virtual_ranks

from sparkdl.collectives.algorithms import (
    ALGORITHMS,
    SubgroupLink,
    Terms,
    cost,
    even_bounds,
    power_below,
    terms,
)

CASES = [(operation, name) for operation, names in ALGORITHMS.items() for name in names]
SUMS = ("reduce", "all_reduce", "reduce_scatter")
BLOCKS = ("reduce_scatter", "all_gather")
SIZES = (1, 2, 3, 5, 8, 11)
NETWORK = Network(alpha=1000.0, beta=3.0, gamma=0.5)


def runner(operation: str, name: str, given: list[torch.Tensor], bounds: list[int]) -> Callable:
    """What each rank runs on a copy of its tensor; returns the tensor."""

    def do(link: VirtualLink) -> torch.Tensor:
        flat = given[link.rank].clone()
        ends = [bounds] if operation in BLOCKS else []
        combine = [link.add] if operation in SUMS else []
        ALGORITHMS[operation][name](link, flat, *ends, *combine)
        return flat

    return do


def assert_result(operation: str, found, given, bounds) -> None:
    """Bit for bit: the values are such that their sums are exact in any order."""
    total = functools.reduce(torch.add, given)
    parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    whole = torch.cat([one[part] for one, part in zip(given, parts, strict=True)])
    for rank, flat in enumerate(found):
        if operation == "broadcast":
            assert torch.equal(flat, given[0])
        elif operation == "all_reduce" or (operation == "reduce" and rank == 0):
            assert torch.equal(flat, total)
        elif operation == "reduce_scatter":
            assert torch.equal(flat[parts[rank]], total[parts[rank]])
        elif operation == "all_gather":
            assert torch.equal(flat, whole)


def whole_numbers(size: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (length,), generator=generator).double() for _ in range(size)]


@pytest.mark.parametrize(("operation", "name"), CASES)
@settings(max_examples=15)
@given(
    size=st.integers(1, 12),
    lengths=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    seed=st.integers(0, 99),
)
def test_any_blocks_on_any_number_of_ranks(operation, name, size, lengths, seed):
    bounds = [0, *itertools.accumulate(lengths[:size])]
    given = whole_numbers(size, bounds[-1], seed)
    found, _ = on_virtual_ranks(size, runner(operation, name, given, bounds))
    assert_result(operation, found, given, bounds)


@pytest.mark.parametrize(("operation", "name"), CASES)
@pytest.mark.parametrize("size", SIZES)
def test_takes_the_time_of_the_formula(operation, name, size):
    length = 2 * size * power_below(size)
    given, bounds = whole_numbers(size, length), even_bounds(length, size)
    found, links = on_virtual_ranks(size, runner(operation, name, given, bounds), NETWORK)
    assert_result(operation, found, given, bounds)
    expected = cost(name, operation, 8 * length, size, *NETWORK)
    assert max(link.clock for link in links) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_reduce"])
@pytest.mark.parametrize(
    ("name", "size"),
    [*(("ring", size) for size in (2, 3, 4, 7, 8)), *(("halving-doubling", s) for s in (2, 4, 8))],
)
def test_every_rank_sends_the_bytes_of_the_formula(operation, name, size):
    length = size * power_below(size)
    given, bounds = whole_numbers(size, length), even_bounds(length, size)
    _, links = on_virtual_ranks(size, runner(operation, name, given, bounds))
    share = terms(name, operation, size).volume
    least = (size - 1) / size * (2 if operation == "all_reduce" else 1)
    assert share == pytest.approx(least)
    assert [link.sent for link in links] == [round(share * 8 * length)] * size
    assert [link.received for link in links] == [round(share * 8 * length)] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_most_that_a_rank_sends(size):
    """The column of docs/collectives.md, in multiples of the vector."""
    levels, share = power_below(size).bit_length() - 1, (size - 1) / size
    most = {
        ("linear", "broadcast"): size - 1,
        ("linear", "reduce"): 1,
        ("linear", "all_reduce"): size - 1,
        ("tree", "broadcast"): levels,
        ("tree", "reduce"): 1,
        ("tree", "all_reduce"): levels,
        ("ring", "broadcast"): 1,
        ("ring", "reduce"): 1,
        ("ring", "all_reduce"): 2 * share,
        ("ring", "reduce_scatter"): share,
        ("ring", "all_gather"): share,
        ("halving-doubling", "broadcast"): 2 * share,
        ("halving-doubling", "reduce"): share + 1 / 2,
        ("halving-doubling", "all_reduce"): 2 * share,
        ("halving-doubling", "reduce_scatter"): share,
        ("halving-doubling", "all_gather"): share,
    }
    length = size * size
    given, bounds = whole_numbers(size, length), even_bounds(length, size)
    found = {}
    for operation, name in CASES:
        _, links = on_virtual_ranks(size, runner(operation, name, given, bounds))
        found[name, operation] = max(link.sent for link in links) / (8 * length)
    assert found == pytest.approx(most)


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_no_bytes_are_sent_in_vain(operation, name):
    """One rank alone sends nothing, and nobody sends an empty vector."""
    for size, length in ((1, 6), (5, 0)):
        given, bounds = whole_numbers(size, length), even_bounds(length, size)
        _, links = on_virtual_ranks(size, runner(operation, name, given, bounds))
        assert not any(link.sent or link.clock for link in links)


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("name", list(ALGORITHMS["all_reduce"]))
def test_the_order_of_sums_is_fixed(name, size):
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(1003, generator=generator) for _ in range(size)]
    do = runner("all_reduce", name, given, [])
    first, _ = on_virtual_ranks(size, do)
    again, _ = on_virtual_ranks(size, do)
    exact = torch.stack(given).double().sum(0)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, first[0])
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(size=st.integers(1, 9), root=st.integers(0, 8))
def test_any_rank_can_be_the_root(size, root):
    root %= size
    given = whole_numbers(size, 5)

    def do(link):
        flat = given[link.rank].clone()
        ALGORITHMS["broadcast"]["halving-doubling"](SubgroupLink.rooted(link, root), flat)
        total = given[link.rank].clone()
        ALGORITHMS["reduce"]["tree"](SubgroupLink.rooted(link, root), total, link.add)
        return flat, total

    found, _ = on_virtual_ranks(size, do)
    assert all(torch.equal(flat, given[root]) for flat, _ in found)
    assert torch.equal(found[root][1], functools.reduce(torch.add, given))


@given(length=st.integers(0, 40), blocks=st.integers(1, 9))
def test_even_bounds_are_those_of_tensor_split(length, blocks):
    expected = [len(part) for part in torch.arange(length).tensor_split(blocks)]
    bounds = even_bounds(length, blocks)
    assert (bounds[0], bounds[-1]) == (0, length)
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == expected


def test_the_formulas_of_the_literature():
    """Thakur et al. (2005), section 3, and Chan et al. (2007), tables, for a power of two."""
    p, lg = 16, 4
    share = (p - 1) / p
    assert terms("linear", "broadcast", p) == Terms(p - 1, p - 1.0, 0.0)
    assert terms("tree", "broadcast", p) == Terms(lg, lg, 0)
    assert terms("tree", "reduce", p) == Terms(lg, lg, lg)
    assert terms("ring", "all_gather", p) == Terms(p - 1, share, 0)
    assert terms("ring", "all_reduce", p) == Terms(2 * (p - 1), 2 * share, share)
    assert terms("halving-doubling", "reduce_scatter", p) == Terms(lg, share, share)
    assert terms("halving-doubling", "all_gather", p) == Terms(lg, share, 0)
    assert terms("halving-doubling", "reduce", p) == Terms(2 * lg, 2 * share, share)
    assert terms("halving-doubling", "all_reduce", p) == Terms(2 * lg, 2 * share, share)
    assert terms("tree", "broadcast", 5).steps == math.ceil(math.log2(5))
    assert terms("halving-doubling", "all_reduce", 5).steps == 2 * 2 + 2
    assert cost("tree", "reduce", 1000, 8, alpha=2.0, beta=0.5, gamma=0.25) == 3 * (2 + 500 + 250)
    with pytest.raises(KeyError):
        cost("tree", "all_gather", 1, 2, 1.0, 1.0)

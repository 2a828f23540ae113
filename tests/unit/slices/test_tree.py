"""Sums in the shape of a tree: the same bits, whoever adds up what."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.slices.reduce import CHUNK, Term, additions, blocks, tree_sum

quick = settings(deadline=None, max_examples=50)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def terms_of(places: list[int], length: int = 5, dtype: torch.dtype = torch.float32) -> list[Term]:
    generator = torch.Generator().manual_seed(len(places))
    return [
        Term(place, torch.randn(length, generator=generator).to(dtype), 0.1 + 0.3 * (place % 3))
        for place in places
    ]


def plain(terms: list[Term], start: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The definition, one bracket after another."""
    if size == 1:
        found = [t for t in terms if t.place == start]
        return found[0].values.to(dtype) * found[0].share if found else None
    left = plain(terms, start, size // 2, dtype)
    right = plain(terms, start + size // 2, size // 2, dtype)
    return right if left is None else left if right is None else left + right


places = st.sets(st.integers(0, 40), min_size=1, max_size=12).map(sorted)


@quick
@given(places, st.sampled_from([torch.float32, torch.float64]))
def test_it_is_the_sum_of_the_tree(some: list[int], dtype: torch.dtype) -> None:
    terms = terms_of(some)
    expected = plain(terms, 0, 64, dtype)
    assert expected is not None
    assert bits(tree_sum(terms, torch.empty(5, dtype=dtype))) == bits(expected)


@quick
@given(st.integers(1, 17), st.data())
def test_any_grouping_into_nodes_gives_the_same_bits(replicas: int, data: st.DataObject) -> None:
    """Every node sums its blocks; some replicas have no samples."""
    nodes = [data.draw(st.integers(0, 3)) for _ in range(replicas)]
    silent = {m for m in range(1, replicas) if data.draw(st.integers(0, 5)) == 0}
    terms = {t.place: t for t in terms_of([m for m in range(replicas) if m not in silent])}
    arrived = []
    for node in set(nodes):
        members = [m for m in range(replicas) if nodes[m] == node]
        for block in blocks(members, replicas):
            own = [terms[m] for m in block if m in terms]
            if own:
                arrived.append(Term(own[0].place, tree_sum(own, torch.empty(5))))
    expected = tree_sum(list(terms.values()), torch.empty(5))
    assert bits(tree_sum(arrived[::-1], torch.empty(5))) == bits(expected)


@quick
@given(st.integers(1, 40), st.data())
def test_blocks_are_whole_subtrees_and_cover_the_members(
    replicas: int, data: st.DataObject
) -> None:
    members = data.draw(st.sets(st.integers(0, replicas - 1)))
    found = blocks(members, replicas)
    assert [m for block in found for m in block] == sorted(members)
    for block in found:
        size = 1 << (len(block) - 1).bit_length()
        assert block.start % size == 0
        assert len(block) == size or block.stop == replicas


def test_blocks_are_as_large_as_can_be() -> None:
    assert blocks([0, 1, 2, 3], 4) == [range(0, 4)]
    assert blocks([2, 3], 4) == [range(2, 4)]
    assert blocks([0, 2], 4) == [range(0, 1), range(2, 3)]
    assert blocks([1, 2, 3], 4) == [range(1, 2), range(2, 4)]
    assert blocks([4, 5], 6) == [range(4, 6)]
    assert blocks([], 6) == []


def test_one_replica_keeps_its_bits_and_two_are_one_addition() -> None:
    one, other = torch.tensor([0.1, -3e-42, 1e38, -0.0]), torch.tensor([0.7, 1.0, 2.0, 3.0])
    assert bits(tree_sum([Term(3, one, 1.0)], torch.empty(4))) == bits(one)
    assert bits(tree_sum([Term(0, one), Term(1, other)], torch.empty(4))) == bits(one + other)
    assert tree_sum([], torch.ones(2)).tolist() == [0.0, 0.0]


@quick
@given(st.integers(1, 64))
def test_as_many_partial_sums_as_the_tree_has_levels(replicas: int) -> None:
    height, highest = 0, 0
    for count in additions(range(replicas)):
        height += 1
        highest = max(highest, height)
        height -= count
    assert height == 1
    assert highest <= 1 + max(0, replicas - 1).bit_length()


def test_what_is_longer_than_a_chunk_is_summed_to_its_end() -> None:
    terms = terms_of([0, 1, 2], 2 * CHUNK + 17)
    expected = plain(terms, 0, 4, torch.float32)
    assert expected is not None
    assert bits(tree_sum(terms, torch.empty(2 * CHUNK + 17))) == bits(expected)

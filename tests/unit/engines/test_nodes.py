"""Bytes between nodes: what is planned beside the least there can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.engines.shuffle.messages import (
    Nodes,
    SliceBytes,
    between_nodes,
    least_bytes,
    planned,
    sum_is_smaller,
)
from sparkdl.loop.advance import Traffic, busiest

SLICE = SliceBytes(wire=400, flat=400, weights=400)


def even(nodes: int, replicas: int) -> Nodes:
    """``replicas`` a node, side by side, and as many slices."""
    node_ids = tuple(f"node {k}" for k in range(nodes) for _ in range(replicas))
    return Nodes(node_ids, node_ids)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_where_nodes_sum_first_they_send_the_least_there_is(nodes: int, replicas: int) -> None:
    placed = even(nodes, replicas)
    slices = [SLICE] * nodes * replicas
    least = least_bytes(400 * len(slices), nodes)
    found = planned(placed, slices, summed=True)
    assert len(found) == (nodes if nodes > 1 else 0)
    for node in found.values():
        assert (node.sent, node.received) == (least, least)
        assert node.gradients_sent == node.weights_sent == least / 2
    assert busiest(found) == least


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_where_they_do_not_it_is_as_often_as_they_have_replicas(replicas: int) -> None:
    placed, slices = even(3, replicas), [SLICE] * 3 * replicas
    assert busiest(planned(placed, slices, summed=False)) == replicas * least_bytes(
        400 * len(slices), 3
    )


def test_the_figures_of_a_case_by_hand() -> None:
    """Replicas 0 and 1 are a block of the tree, 2 is alone; the one slice is at 2's node."""
    placed = Nodes(("a", "a", "b"), ("b",))
    found = planned(placed, [SliceBytes(wire=100, flat=200, weights=300)], summed=False)
    assert found == {"a": Traffic(200, 0, 0, 600), "b": Traffic(0, 600, 200, 0)}
    found = planned(placed, [SliceBytes(wire=200, flat=200, weights=300)], summed=True)
    assert found == {"a": Traffic(200, 0, 0, 300), "b": Traffic(0, 300, 200, 0)}
    assert busiest(found) == 300


def test_replicas_that_are_no_block_of_the_tree_cannot_be_summed() -> None:
    apart = Nodes(("a", "b", "a", "b"), ("a", "b"))
    found = planned(apart, [SLICE] * 2, summed=True)
    assert found["a"].gradients_sent == 2 * 400
    assert found["a"].weights_sent == 400


def test_half_the_width_is_worth_a_sum_only_of_more_than_two() -> None:
    assert [sum_is_smaller(k, wire=2, flat=4) for k in (1, 2, 3)] == [False, False, True]
    assert [sum_is_smaller(k, wire=4, flat=4) for k in (1, 2, 3)] == [False, True, True]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=7),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=5),
)
def test_each_slice_has_one_representative_a_node_and_what_leaves_arrives(
    replicas: list[str], slices: list[str]
) -> None:
    nodes = Nodes(tuple(replicas), tuple(slices))
    assert sorted(m for node_id in nodes.node_ids for m in nodes.members(node_id)) == list(
        range(len(replicas))
    )
    for node_id in nodes.node_ids:
        for n in range(len(slices)):
            assert replicas[nodes.representative(node_id, n)] == node_id
    plain = planned(nodes, [SLICE] * len(slices), summed=False)
    summed = planned(nodes, [SLICE] * len(slices), summed=True)
    for found in (plain, summed):
        assert sum(node.sent for node in found.values()) == sum(n.received for n in found.values())
    assert busiest(summed) <= busiest(plain)


def test_what_stays_on_its_node_counts_nothing() -> None:
    assert between_nodes([("a", "a", 5)], [("b", "b", 7)]) == {}
    assert busiest({}) == 0

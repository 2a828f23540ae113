"""The mesh of ranks, and strategies together over it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl import DDP, FSDP, ParameterError, Pipeline, Tensor
from sparkdl.parallel.base import DIMENSIONS, Mesh, mesh_of
from sparkdl.parallel.plan import parallel_of, parts_of, problems_of

meshes = st.builds(Mesh, *[st.integers(1, 4)] * 4)


@given(meshes)
def test_every_rank_has_a_place_of_its_own(mesh):
    places = {tuple(mesh.place(r, d) for d in DIMENSIONS) for r in range(mesh.size)}
    assert places == set(itertools.product(*(range(n) for n in mesh.sizes.values())))


@given(meshes, st.sets(st.sampled_from(DIMENSIONS)), st.data())
def test_ranks_along_some_dimensions_differ_in_these_only(mesh, names, data):
    rank = data.draw(st.integers(0, mesh.size - 1))
    found = mesh.along(rank, *names)
    assert found == sorted(found)
    assert found == [
        other
        for other in range(mesh.size)
        if all(mesh.place(other, d) == mesh.place(rank, d) for d in DIMENSIONS if d not in names)
    ]


@given(meshes)
def test_every_rank_is_in_one_model_parallel_group(mesh):
    assert sorted(rank for group in mesh.model_groups for rank in group) == list(range(mesh.size))
    assert all(mesh.model_group(rank) == group for group in mesh.model_groups for rank in group)


def test_ranks_that_follow_each_other_differ_in_the_last_dimension():
    mesh = Mesh(data=2, tensor=2)
    assert mesh.along(0, "tensor") == [0, 1]
    assert mesh.along(0, "data") == [0, 2]
    assert mesh.model_groups == [[0, 1], [2, 3]]


def test_all_ranks_are_along_the_one_strategy():
    assert mesh_of(None, ("tensor",), 4) == Mesh(tensor=4)
    assert mesh_of(None, ("data",), 4) == Mesh(data=4)
    assert mesh_of(None, (), 4) == Mesh(data=4)


def test_what_is_left_are_copies():
    assert mesh_of({"pipe": 2}, ("pipe",), 6) == Mesh(data=3, pipe=2)
    assert mesh_of({"shard": 2, "tensor": 3}, ("shard", "tensor"), 6) == Mesh(shard=2, tensor=3)


@pytest.mark.parametrize("sizes", [{"pipe": 4}, {"data": 2, "pipe": 2}, {"data": 3}])
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(ParameterError, match="give sizes whose product is replicas"):
        mesh_of(sizes, (), 6 if sizes == {"pipe": 4} else 2)


def test_a_mesh_names_strategies():
    cut = FSDP(units=["0"])
    assert parts_of("ddp", {"data": 2, "pipe": 2}) == {"pipe": Pipeline()}
    assert parts_of(cut, {"shard": 2, "tensor": 2}) == {"shard": cut, "tensor": Tensor()}
    assert parts_of([cut, "tensor"], None) == {"shard": cut, "tensor": Tensor()}
    assert parts_of("zero1", {"data": 2}) == {"data": DDP(shard_optimizer=True)}


def test_who_shares_what():
    found = parallel_of(parts_of("ddp", {"data": 2, "tensor": 2}), {"data": 2, "tensor": 2}, 4)
    assert found.parts == {"tensor": Tensor()}
    assert found.mesh == Mesh(data=2, tensor=2)


@pytest.mark.parametrize(
    ("strategy", "mesh", "problem"),
    [
        ([], None, "strategy is an empty list"),
        (["fsdp", FSDP()], None, "strategy has two of a kind"),
        (DDP(static_graph=True), {"pipe": 2}, '"ddp" and "pipeline" do not go together'),
        ("ddp", {}, "mesh={}: give sizes by name"),
        ("ddp", {"data": True}, "data is a whole number of at least 1"),
        ("ddp", {"data": 0}, "data is a whole number of at least 1"),
        ("ddp", {"rows": 2}, 'use data, pipe, shard, tensor, not "rows"'),
        ("fsdp", {"data": 2}, 'has no size of strategy="fsdp"'),
    ],
)
def test_what_does_not_go_together(strategy, mesh, problem):
    (found,) = problems_of(strategy, mesh)
    assert problem in found


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("ddp", None),
        ("zero1", {"data": 2}),
        (["fsdp", Tensor()], {"data": 2, "shard": 2, "tensor": 2}),
        (Pipeline(), {"data": 2, "pipe": 2}),
        (["fsdp", "pipeline"], {"pipe": 2, "shard": 2}),
        ("zero1", {"data": 2, "pipe": 2}),
        (["tensor", "zero1"], {"data": 2, "tensor": 2}),
    ],
)
def test_what_does(strategy, mesh):
    assert list(problems_of(strategy, mesh)) == []

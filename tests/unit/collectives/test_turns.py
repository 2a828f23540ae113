"""Who of several clients has the next turn, and what an order is good for."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.collectives.key_range import (
    Gradient,
    KeyRange,
    KeySpec,
    Manifest,
    Rounds,
    read_ranges,
    write_ranges,
)
from sparkdl.collectives.server_messages import Kind, Operation, OperationOrder
from sparkdl.errors import CheckpointError, ParameterError


@st.composite
def programs_of_clients(draw):
    """For each client its pushes and pulls. All push the same keys, and some end before others."""
    keys = draw(st.lists(st.integers(0, 1), max_size=6))
    pulls = st.lists(st.integers(0, 1), max_size=2)
    programs = []
    for length in draw(st.lists(st.integers(0, len(keys)), min_size=1, max_size=4)):
        programs.append([(Kind.PULL, key) for key in draw(pulls)])
        for key in keys[:length]:
            programs[-1] += [(Kind.PUSH, key), *((Kind.PULL, other) for other in draw(pulls))]
    return programs


PROGRAMS = programs_of_clients()


def run(programs, staleness, seed, replay=None):
    """Give turns until all have finished; clients come in an arbitrary order. Returns what was done."""
    chance, turns, done = random.Random(seed), OperationOrder(len(programs), staleness, replay), []
    left = [[*(Operation(c, kind, (key,)) for kind, key in its), Operation(c, Kind.FINISH)]
            for c, its in enumerate(programs)]  # fmt: skip
    idle = set(range(len(programs)))
    while any(left) or len(idle) < len(programs):
        asking = [client for client in idle if left[client]]
        if asking and (chance.random() < 0.7 or len(idle) == len(programs)):
            client = chance.choice(asking)
            idle.remove(client)
            turns.ask(left[client].pop(0))
        granted = turns.grant()
        if granted is not None:
            done.append(granted)
            idle.add(granted.client)
        else:
            assert asking, "nobody can go on"
    return done, list(turns.order)


@given(PROGRAMS, st.sampled_from([None, 0, 1, 2]), st.integers(0, 99), st.integers(0, 99))
def test_clocks_keep_together_and_an_order_can_be_repeated(programs, staleness, seed, other):
    done, order = run(programs, staleness, seed)
    assert order == [operation.client for operation in done]
    clocks, active = {}, set(range(len(programs)))
    for operation in done:
        for key in operation.keys:
            its = clocks.setdefault(key, [0] * len(programs))
            slowest = min(its[client] for client in active)
            assert staleness is None or its[operation.client] - slowest <= staleness
            its[operation.client] += operation.kind == Kind.PUSH
        if operation.kind == Kind.FINISH:
            active.remove(operation.client)
    assert run(programs, staleness, other, replay=order) == (done, order)


@given(PROGRAMS, st.integers(0, 99))
def test_turns_are_given_in_the_order_of_asking(programs, seed):
    turns = OperationOrder(len(programs), None)
    clients = list(range(len(programs)))
    random.Random(seed).shuffle(clients)
    for client in clients:
        turns.ask(Operation(client, Kind.PUSH, (0,)))
    assert [turns.grant().client for _ in clients] == clients
    assert turns.grant() is None


def test_an_order_of_another_run_is_told():
    turns = OperationOrder(2, None, replay=[0, 1, 0])
    turns.ask(Operation(1, Kind.PUSH, (0,)))
    assert turns.grant() is None
    turns.ask(Operation(0, Kind.PUSH, (0,)))
    assert [turns.grant().client, turns.grant().client] == [0, 1]
    with pytest.raises(ParameterError, match="rank 1 has made 1 operations and asks for one more"):
        turns.ask(Operation(1, Kind.PUSH, (0,)))
    turns = OperationOrder(1, None, replay=[0, 0])
    with pytest.raises(
        ParameterError, match="made 0 operations and ends, but the order has 2 of it"
    ):
        turns.ask(Operation(0, Kind.FINISH))


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 7))
def test_every_row_has_one_place(rows, places, number):
    spec = KeySpec.of("key", number, (rows, 2), torch.float32, places)
    covered = sorted(row for p in range(places) for row in range(rows)[spec.range_of(p)])
    assert covered == list(range(rows))
    assert {p for p in range(places) if spec.range_shape(p)[0]} == set(spec.places)
    for row, place in enumerate(spec.places_of(torch.arange(rows)).tolist()):
        assert row in range(rows)[spec.range_of(place)]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
def test_rounds_take_one_gradient_of_each(pushes):
    rounds, pushed, found = Rounds(3), [0, 0, 0], []
    for client, _ in pushes:
        rounds.add(client, Gradient(torch.tensor([float(client), float(pushed[client])])))
        pushed[client] += 1
        found += rounds.complete([0, 1, 2])
    assert len(found) == min(pushed)
    found += rounds.complete([])  # all have finished
    assert len(found) == max(pushed)
    for number, gradients in enumerate(found):
        expected = [[float(c), float(number)] for c in range(3) if pushed[c] > number]
        assert [gradient.values.tolist() for gradient in gradients] == expected


@pytest.mark.parametrize("average", [True, False])
def test_rows_and_whole_gradients_add_up(average):
    its = KeyRange(torch.zeros(3, 2), None, average)
    its.step([
        Gradient(torch.ones(3, 2)),
        Gradient(torch.full((3, 2), 2.0), torch.tensor([1, 1, 0])),
    ])  # fmt: skip
    expected = torch.tensor([[3.0, 3.0], [5.0, 5.0], [1.0, 1.0]])
    assert torch.equal(its.values, expected / 2 if average else expected)


NOTES = {
    "rows": (lambda place: torch.full((3,), float(place)), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
    "a count": (lambda place: place, 1),
    "a count in a tensor": (lambda place: torch.tensor(float(place)), 1.0),
    "nothing": (lambda place: None, None),
    "the same word": (lambda place: "word", "word"),
    "another word": (lambda place: f"word {place}", "is a str"),
    "tensors in a list": (lambda place: [torch.zeros(3)], "is a list"),
    "no rows": (lambda place: torch.zeros(2), "is a Tensor"),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_optimizers_know_is_joined_where_there_are_fewer_owners(case, tmp_path):
    note, expected = NOTES[case]
    make = partial(torch.optim.SGD, lr=0.1)
    two, one = (KeySpec.of("w", 0, (6, 2), torch.float32, owners) for owners in (2, 1))
    saved = Manifest(tmp_path, "name", 2, "SGD", (two,))
    for place in range(2):
        its = KeyRange(torch.full(two.range_shape(place), float(place)), make, False)
        its.state["note"] = note(place)
        write_ranges(saved.file_of(place), {0: its})
        (again,) = read_ranges(saved, [two], place, make, False).values()
        assert str(again.state) == str(its.state)  # whatever it is, as many owners have it again
    if case in ("another word", "tensors in a list", "no rows"):
        said = (
            f"\"note\" of 'w' {expected}, which cannot be shared out to other owners: use as many"
        )
        with pytest.raises(CheckpointError, match=said):
            read_ranges(saved, [one], 0, make, False)
        return
    (found,) = read_ranges(saved, [one], 0, make, False).values()
    assert found.values[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    known = found.state["note"]
    assert (known.tolist() if isinstance(known, torch.Tensor) else known) == expected


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2), (2, 4)])
def test_rows_come_to_another_number_of_owners_with_what_is_known_of_them(before, after, tmp_path):
    make, rows = partial(torch.optim.SGD, lr=0.1), torch.arange(14.0).view(7, 2)
    old, new = (KeySpec.of("w", 2, (7, 2), torch.float32, owners) for owners in (before, after))
    saved = Manifest(tmp_path, "name", before, "SGD", (old,))
    for place in range(before):
        its = KeyRange(rows[old.range_of(place)].clone(), make, False)
        its.state["note"] = its.values + 0.5
        write_ranges(saved.file_of(place), {old.number: its})
    for place in range(after):
        (its,) = read_ranges(saved, [new], place, make, False).values()
        assert torch.equal(its.values, rows[new.range_of(place)])
        assert torch.equal(its.state["note"], its.values + 0.5)
        assert its.values.untyped_storage().nbytes() == its.values.nbytes  # nothing else is kept

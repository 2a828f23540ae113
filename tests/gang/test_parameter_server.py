"""The parameter server on the ranks of a gang, against one process; and what becomes of mistakes."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import pytest
import server_scenarios as scenarios
import torch
from pyspark import cloudpickle

import sparkdl
from sparkdl.collectives import ParameterServer

pytestmark = [pytest.mark.gang, pytest.mark.spark]
cloudpickle.register_pickle_by_value(sys.modules["server_scenarios"])
RANKS = 2


@pytest.fixture(scope="module")
def ranks(spark: Any, tmp_path_factory: Any) -> list[tuple[dict[str, Any], list[str]]]:
    """What both ranks have found, in one gang."""
    folder = str(tmp_path_factory.mktemp("server"))
    return sparkdl.gang.run(scenarios.run_all, folder, ranks=RANKS, timeout=120)


@pytest.fixture(scope="module")
def found(ranks: Any) -> list[dict[str, Any]]:
    return [its for its, _ in ranks]


def test_values_of_every_shape_and_dtype_add_up(found):
    for its in found:
        *values, out = its["values"]
        kinds = [(shape, dtype) for shape in scenarios.SHAPES for dtype in scenarios.DTYPES]
        for value, (shape, dtype) in zip(values, kinds, strict=True):
            assert torch.equal(value, torch.full(shape, 1 + 2 * (1 + 2)).to(dtype))
        assert torch.equal(out, torch.full((5, 2, 3), 7.0))


@pytest.mark.parametrize("optimizer", scenarios.OPTIMIZERS)
def test_synchronous_clients_are_one_process(found, optimizer):
    """A mean in rank order for each step, whoever comes first and wherever the rows lie."""
    value = torch.ones(10, 3)
    make = scenarios.OPTIMIZERS[optimizer]
    one, expected = make and make([value]), []
    for number in range(scenarios.ROUNDS):
        clients = range(RANKS) if number < scenarios.ROUNDS - 1 else [0]
        mean = sum(scenarios.gradient(rank, number) for rank in clients) / len(clients)
        if one is None:
            value += mean
        else:
            value.grad = mean
            one.step()
        expected.append(value.clone())
    for owners in (None, [1]):
        for rank, its in enumerate(found):
            seen, operations = its[f"synchronous, {optimizer}, {owners}"]
            assert all(map(torch.equal, seen, expected[: len(seen)])), (owners, rank)
            assert operations == 2 * (2 * scenarios.ROUNDS - 1) + RANKS


def test_stale_clients_miss_the_last_steps_at_most(found):
    for its in found:
        for pushes, seen in enumerate(its["stale"], 1):
            assert RANKS * (pushes - 1) <= seen <= RANKS * (pushes + 1)


@pytest.mark.parametrize("optimizer", scenarios.SPARSE)
@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_rows_are_those_of_one_process(found, optimizer, consistency):
    table, make = torch.arange(20.0).view(10, 2), scenarios.SPARSE[optimizer]
    one = make and make([table])
    steps = [((0, 1), 0), ((0, 1), 1)]
    if consistency == "asynchronous":
        steps = [((0,), 0), ((0,), 1), ((1,), 0), ((1,), 1)]
    for ranks, number in steps:
        rows = torch.cat([scenarios.ROWS[rank] for rank in ranks])
        parts = [scenarios.gradient(rank, number, (3, 2)) for rank in ranks]
        values = torch.cat(parts) / len(ranks)
        if one is None:
            table.index_add_(0, rows, values)
        else:
            table.grad = torch.sparse_coo_tensor(
                rows[None], values, table.shape, check_invariants=False
            ).coalesce()
            one.step()
    for its in found:
        whole, picked = its[f"rows, {optimizer}, {consistency}"]
        assert torch.equal(whole, table)
        assert torch.equal(picked, table[[9, 1, 9, 0]])


def test_an_order_is_recorded_and_replayed_bit_by_bit(found):
    for its in found:
        (live, order), (again, same) = its["live"], its["replayed"]
        assert len(order) == RANKS * (12 * 3 + 1)
        assert torch.equal(order, same)
        assert torch.equal(order, found[0]["live"][1])
        assert all(map(torch.equal, live, again))
    (error,) = found[0]["replay of another run"]
    assert "asks for one more, but the order has 2 of it" in error


MISTAKES = {
    "word": 'consistency = \'synchron\': give "asynchronous" or "synchronous". Did you mean "synch',
    "owners": "3 problems:",
    "kinds": "2 problems:",
    "optimizer": "give a torch.optim class or a partial of one",
    "whole tensors": "LARS looks at whole tensors, and 2 owners have some rows each",
    "ranks differ": "The ranks do not call the same collective:",
    "unknown key": "There is no key 'weigth': init it on all ranks first. Did you mean \"weight\"?",
    "shape": "'weight' needs float32 [4, 3], not float32 [3].",
    "dtype": "'weight' needs float32 [4, 3], not float64 [4, 3].",
    "no row": "'weight' has no row 4: its rows are 0 to 3.",
    "sparse": "the optimizer takes no gradient of some rows (Adam does not support sparse",
    "no tensor": "'weight': give a tensor, not a list.",
    "again": "The key 'weight' exists already.",
    "dtype of a key": "is int64, which the optimizer cannot update",
    "key": "key = {}: give a str, an int or a tuple, or a list of these.",
    "init differs": "rank 1: init 'bias' torch.float32 [3]",
    "calls differ": "rank 1: barrier",
    "early order": "call close().",
    "closed": "This ParameterServer is closed: make a new one.",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_on_every_rank(found, mistake):
    for its in found:
        assert its["mistakes"].keys() == MISTAKES.keys()
        (text,) = its["mistakes"][mistake]
        assert text.startswith("ParameterError: ")
        assert MISTAKES[mistake] in text


def test_whoever_waits_too_long_is_told_for_whom(found):
    told, waited, value = found[0]["late"]
    assert told == [
        "StalledError: 'weight': no turn within 0.5 s: rank 1 is 1 pushes behind this one."
    ]
    assert 0.4 < waited < 3
    assert [its["late"][2].tolist() for its in found] == [[1.0, 1.0]] * RANKS
    assert value is not None


def test_an_update_that_fails_is_told_to_all(found):
    told = [text for its in found for texts in its["failing update"] for text in texts]
    assert len(told) >= RANKS + 1
    expected = "TrainingError: an update failed on rank 0: ArithmeticError: enough"
    assert expected in told
    assert all(text == expected or text.startswith("StateLostError") for text in told)


@pytest.mark.parametrize("case", [*scenarios.OPTIMIZERS, "rows"])
def test_a_saved_server_goes_on_with_the_same_bits(found, case):
    """Also with another number of owners."""
    for its in found:
        whole, *again = its[f"saved, {case}"]
        assert len(again) == 2
        assert all(all(map(torch.equal, whole, each)) for each in again)


NOT_SAVED = {
    "nothing there": 'CheckpointError: Cannot load the parameter server in "',
    "uri": "ParameterError: path = 's3://bucket/server': give a folder that the machines of all",
    "no folder": 'CheckpointError: Cannot save the parameter server in "/dev/null/server": [Errno',
    "exists": "ParameterError: The key 'weight' exists already.",
    "another optimizer": 'ParameterError: "{}/other" has the state of SGD, and this server has none',
}


@pytest.mark.parametrize("case", NOT_SAVED)
def test_what_cannot_be_saved_or_loaded(found, case):
    for its in found:
        (text,) = its["not saved"][case]
        assert re.match(re.escape(NOT_SAVED[case]).replace(r"\{\}", ".*"), text)


def test_a_file_that_an_owner_cannot_read_is_told_to_all(found):
    (other,), (own,) = (its["not saved"]["file lost"] for its in found)
    assert own.startswith("CheckpointError: Cannot load the parameter server in")
    assert other.startswith("ParameterError: The ranks do not call the same:")
    assert "rank 1: Cannot load the parameter server" in other


def test_kvstore_has_the_rules_of_mxnet(found):
    for its in found:
        kind, workers, summed, picked, stepped = its["kvstore"]
        assert (kind, workers) == ("dist_sync", RANKS)
        assert torch.equal(summed, torch.full((2, 3), 3.0))
        assert torch.equal(picked, torch.tensor([[0.0, 0, 0], [0, 2, 0]]))
        assert torch.equal(stepped, 2 * torch.eye(2, 3) - 0.5 * 2)


def test_an_engine_runs_collectives_in_one_order(found):
    for its in found:
        assert its["ordered sums"] == [3 * (2.0 * number + 1) for number in range(8)]


def test_no_thread_is_left(ranks):
    for _, threads in ranks:
        assert not {"sparkdl-server", "sparkdl-listener"} & {*threads}


def test_a_killed_owner_ends_the_waits_for_it(spark):
    begun = time.monotonic()
    with pytest.raises(sparkdl.StateLostError):
        sparkdl.gang.run(scenarios.waits_for_a_killed_rank, 0.5, ranks=RANKS)
    assert time.monotonic() - begun < 30


def test_a_rank_that_fails_is_the_one_that_is_told(spark):
    begun = time.monotonic()
    with pytest.raises(sparkdl.TrainingError, match="rank 1 has its own trouble"):
        sparkdl.gang.run(scenarios.waits_for_a_failed_rank, ranks=RANKS)
    assert time.monotonic() - begun < 30


def test_a_server_that_nobody_closes_ends_with_its_gang(spark):
    assert sparkdl.gang.run(scenarios.forgets_to_close, ranks=RANKS) == [2.0, 2.0]
    for threads in sparkdl.gang.run(scenarios.threads_left, ranks=RANKS):
        assert not {"sparkdl-server", "sparkdl-listener"} & {*threads}


def test_there_is_no_server_outside_of_a_gang():
    with pytest.raises(sparkdl.ParameterError, match=r"sparkdl\.gang\.run"):
        ParameterServer()

"""The communicator on real processes: against the library, and what it does with mistakes."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import soak_but
from real_ranks import WORLD, impatient

from sparkdl.collectives.algorithms import ALGORITHMS, terms
from sparkdl.collectives.communicator import DTYPES, LIBRARY, OPS, Communicator
from sparkdl.collectives.parameter_server import ParameterServer
from sparkdl.errors import ParameterError

pytestmark = pytest.mark.gang

SIZES = (1, 2, 3, 4, 5, 7, 8)
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (8, 3), (5, 2, 3))


class Case(NamedTuple):
    operation: str
    algorithm: str
    shape: tuple[int, ...] = (3, 2)
    dtype: torch.dtype = torch.float32
    op: str | None = None
    root: int | None = None
    seed: int = 0
    turned: bool = False

    def tensor(self, rank: int) -> torch.Tensor:
        """Whole numbers, few enough that their sums are exact in every dtype, in every order."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = list(self.shape)
        if self.operation == "all_gather":
            shape[0] += rank % 3
        found = torch.randint(0, 9, shape[::-1] if self.turned else shape, generator=generator)
        return (found.permute(tuple(range(found.dim()))[::-1]) if self.turned else found).to(
            self.dtype
        )

    def run(self, communicator: Communicator) -> torch.Tensor | None:
        arguments = {"op": self.op, "root": self.root, "algorithm": self.algorithm}
        given = self.tensor(communicator.rank)
        before = given.clone()
        found = getattr(communicator, self.operation)(
            given, **{key: value for key, value in arguments.items() if value is not None}
        )
        assert torch.equal(given, before), "the input was changed"
        assert found is None or found.dtype == given.dtype
        assert found is None or found.untyped_storage().nbytes() == found.nbytes
        return found

    def expected(self, size: int) -> list[torch.Tensor | None]:
        """By plain torch, in one process."""
        all_given = [self.tensor(rank) for rank in range(size)]
        if self.operation == "broadcast":
            return [all_given[self.root or 0]] * size
        if self.operation == "all_gather":
            return [torch.cat(all_given)] * size
        total = functools.reduce(OPS[self.op or "sum"][0], all_given)
        total = total / size if self.op == "mean" else total
        if self.operation == "reduce_scatter":
            return list(total.tensor_split(size))
        return [
            total if self.operation == "all_reduce" or rank == (self.root or 0) else None
            for rank in range(size)
        ]


def all_cases(size: int) -> list[Case]:
    """Each operation and algorithm: with each shape, each op, each root, and on some ranks dtype."""
    found = []
    dtypes = DTYPES if size in (2, 3, 5) else (torch.bfloat16,)
    for operation, written in ALGORITHMS.items():
        for name in (LIBRARY, *written):
            by_rows = operation in ("reduce_scatter", "all_gather")
            shapes = [shape for shape in SHAPES if shape or not by_rows]
            case = Case(operation, name)
            found += [case._replace(shape=shape) for shape in shapes]
            found += [case._replace(shape=shape, turned=True) for shape in shapes]
            if operation in ("broadcast", "reduce"):
                found += [case._replace(root=root) for root in range(size)]
            if operation in ("broadcast", "all_gather"):
                found += [case._replace(dtype=dtype) for dtype in dtypes]
            else:
                found += [case._replace(op=op) for op in OPS]
                found += [
                    case._replace(dtype=dtype, op="max" if dtype == torch.bool else "sum")
                    for dtype in dtypes
                ]
    return found


def run_all(communicator: Communicator, cases: list[Case]) -> list[Any]:
    return [case.run(communicator) for case in cases]


def assert_same(found: torch.Tensor | None, expected: torch.Tensor | None, what: Any) -> None:
    if found is None or expected is None:
        assert found is expected, what
    else:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
        assert torch.equal(found, expected), what


@pytest.mark.parametrize("size", soak_but([3], SIZES))
def test_every_algorithm_gives_what_the_library_gives(ranks, size):
    cases = all_cases(size)
    found = ranks.run(size, run_all, cases)
    for i, case in enumerate(cases):
        for rank, expected in enumerate(case.expected(size)):
            assert_same(found[rank][i], expected, (case, rank))


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    which=st.sampled_from([(o, name) for o, names in ALGORITHMS.items() for name in names]),
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    dtype=st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]),
    op=st.sampled_from(["sum", "max", "min"]),
    seed=st.integers(0, 1000),
    turned=st.booleans(),
)
def test_any_shape_and_dtype(ranks, size, which, shape, dtype, op, seed, turned):
    operation, name = which
    case = Case(operation, name, tuple(shape), dtype, seed=seed, turned=turned)
    if operation not in ("broadcast", "all_gather"):
        case = case._replace(op=op)
    both = [case, case._replace(algorithm=LIBRARY)]
    for found, expected in zip(ranks.run(size, run_all, both), case.expected(size), strict=True):
        for one, its in zip(found, both, strict=True):
            assert_same(one, expected, its)


def sum_twice(communicator: Communicator, names: list[str], length: int) -> list[Any]:
    generator = torch.Generator().manual_seed(communicator.rank)
    given = torch.randn(length, generator=generator)
    return [given, *([communicator.all_reduce(given, algorithm=n) for _ in "ab"] for n in names)]


@pytest.mark.parametrize("size", [3, 8])
def test_sums_have_the_same_bits_on_all_ranks_and_in_every_run(ranks, size):
    found = ranks.run(size, sum_twice, list(ALGORITHMS["all_reduce"]), 10_007)
    exact = torch.stack([given for given, *_ in found]).double().sum(0)
    for _, *by_algorithm in found:
        for (first, again), (reference, _) in zip(by_algorithm, found[0][1:], strict=True):
            assert torch.equal(first, again)
            assert torch.equal(first, reference)
            torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)


def bytes_sent(communicator: Communicator, operation: str, name: str, length: int) -> Any:
    before = communicator.sent
    getattr(communicator, operation)(torch.ones(length, dtype=torch.float64), algorithm=name)
    return communicator.sent.messages - before.messages, communicator.sent.bytes - before.bytes


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["ring", "halving-doubling"])
def test_sends_the_messages_and_bytes_of_the_formula(ranks, size, name):
    for operation in ("all_reduce", "reduce_scatter"):
        expected = terms(name, operation, size)
        found = ranks.run(size, bytes_sent, operation, name, 3 * size)
        assert found == [(expected.steps, round(expected.volume * 24 * size))] * size
    assert ranks.run(size, bytes_sent, "all_reduce", LIBRARY, 3) == [(0, 0)] * size


def enter_and_leave(communicator: Communicator, name: str) -> tuple[float, float]:
    time.sleep(0.03 * communicator.rank)
    entered = time.monotonic()
    communicator.barrier(algorithm=name)
    return entered, time.monotonic()


@pytest.mark.parametrize("name", [LIBRARY, *ALGORITHMS["all_reduce"]])
def test_nobody_leaves_a_barrier_before_all_have_come(ranks, name):
    entered, left = zip(*ranks.run(5, enter_and_leave, name), strict=True)
    assert max(entered) - min(entered) > 0.05
    assert min(left) >= max(entered)


def things_to_push() -> list[torch.Tensor]:
    dtypes = (*DTYPES, torch.int16, torch.complex64, torch.float8_e4m3fn)
    found = [torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in dtypes]
    found += [torch.arange(6.0).view(2, 3).T, torch.zeros(0, 4), torch.tensor(3.0)]
    return [*found, torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]


def push_there_and_back(communicator: Communicator) -> None:
    tensors = things_to_push()
    if communicator.rank:
        found = [communicator.pull(0) for _ in tensors]
        for tensor in found:
            communicator.push(tensor, to=0, tag=7)
    else:
        for tensor in tensors:
            communicator.push(tensor, to=1)
        found = [communicator.pull(1, tag=7) for _ in tensors]
    for its, expected in zip(found, tensors, strict=True):
        assert (its.shape, its.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(its.to(torch.complex128), expected.to(torch.complex128))


def test_pull_gives_what_was_pushed(ranks):
    ranks.run(2, push_there_and_back)


def sum_while_pushing(communicator: Communicator) -> list[float]:
    """A message without the reserved tag is under way while a written-out collective runs."""
    message = torch.full((1,), 5.0 * (communicator.rank == 0))
    if communicator.rank == 0:
        work = dist.isend(message, group=communicator._group, group_dst=1)
    total = communicator.all_reduce(torch.ones(1), algorithm="linear")
    if communicator.rank == 0:
        work.wait()
    else:
        dist.recv(message, group=communicator._group, group_src=0)
    return [float(total), float(message)]


def test_collectives_leave_the_messages_of_users_alone(ranks):
    assert ranks.run(2, sum_while_pushing) == [[2.0, 5.0], [2.0, 5.0]]


def differ(communicator: Communicator) -> list[str]:
    """Each pair of calls that do not fit; then one that does."""
    first, one = communicator.rank == 0, torch.ones(4)
    calls = [
        lambda: communicator.all_reduce(one, algorithm="ring" if first else "tree"),
        lambda: communicator.all_reduce(one if first else one.double()),
        lambda: communicator.all_reduce(one if first else torch.ones(5)),
        lambda: communicator.reduce(one, root=0 if first else 1),
        lambda: communicator.all_gather(one.view(2, 2) if first else one.view(1, 4)),
        communicator.barrier if first else lambda: communicator.broadcast(one),
    ]
    found = []
    for call in calls:
        with pytest.raises(ParameterError) as caught:
            call()
        found.append(str(caught.value))
    assert torch.equal(communicator.all_reduce(one, algorithm="ring"), 3 * one)
    return found


def test_ranks_that_disagree_all_get_the_same_error_and_go_on(ranks):
    found = ranks.run(3, differ)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == (
        "The ranks do not call the same collective:\n"
        "  rank 0: all_reduce (ring, sum) of float32 [4]\n"
        "  ranks 1, 2: all_reduce (tree, sum) of float32 [4]"
    )
    assert "float64 [4]" in found[0][1]
    assert "float32 [5]" in found[0][2]
    assert "root 1" in found[0][3]
    assert "rank 0: all_gather (library) of float32 [any, 2]" in found[0][4]
    assert "rank 0: barrier (library)" in found[0][5]


def wait_in_vain(communicator: Communicator) -> float:
    communicator = impatient()
    if communicator.rank == 0:
        return 0.0
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        communicator.all_reduce(torch.ones(1), algorithm="ring")
    return time.monotonic() - started


def test_a_rank_that_never_comes_is_waited_for_until_the_timeout(ranks):
    assert 0.5 < ranks.run(2, wait_in_vain)[1] < 10


def mistakes(communicator: Communicator) -> list[str]:
    one = torch.ones(3)
    calls = [
        lambda: communicator.all_gather(one, algorithm="tree"),
        lambda: communicator.all_reduce(one, algorithm="halving_doubling"),
        lambda: communicator.all_reduce(one, op="avg"),
        lambda: communicator.all_reduce(one.int(), op="mean"),
        lambda: communicator.all_reduce(one.bool()),
        lambda: communicator.all_reduce(one.short()),
        lambda: communicator.all_reduce(one.to("meta")),
        lambda: communicator.all_reduce(one.to_sparse()),
        lambda: communicator.all_gather(torch.tensor(1.0)),
        lambda: communicator.broadcast(one, root=2),
        lambda: communicator.push(one, to=communicator.rank),
        lambda: communicator.pull(-1, tag=-1),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared
            call()
        found.append(str(caught.value))
    return found


def test_mistakes_are_told_before_anything_is_sent(ranks):
    found = ranks.run(2, mistakes)[0]
    carried = "float32, float64, float16, bfloat16, int8, uint8, int32, int64, bool"
    assert found == [
        "all_gather has no algorithm 'tree', only library, ring, halving-doubling.",
        "all_reduce has no algorithm 'halving_doubling', only library, linear, tree, ring, "
        'halving-doubling. Did you mean "halving-doubling"?',
        "There is no op 'avg', only sum, mean, max, min.",
        "A mean needs floating-point numbers, not int32: convert the tensor.",
        'Sums of bool are not defined: take op="max" for "any" or "min" for "all".',
        f"Collectives carry {carried}, but not int16.",
        "This group carries cpu tensors: move it from meta.",
        "The tensor is torch.sparse_coo: make it dense first.",
        "A tensor without dimensions has no rows: give it one, with reshape(1).",
        "There is no rank 2: this group has ranks 0 to 1.",
        "Rank 0 is this one: push and pull join two ranks.",
        "2 problems:\n"
        "  - There is no rank -1: this group has ranks 0 to 1.\n"
        "  - A tag is a number from 0 to 1073741823, not -1.",
    ]


def join_a_group_of_others(communicator: Communicator) -> None:
    group = dist.new_group([0])
    if communicator.rank:
        with pytest.raises(ParameterError, match="not in that group"):
            Communicator(group)
    else:
        assert Communicator(group).size == 1


def test_only_members_of_a_group_join_it(ranks):
    ranks.run(8, join_a_group_of_others)


def test_needs_a_process_group():
    with pytest.raises(ParameterError, match="init_process_group"):
        Communicator()


def serve_all(communicator: Communicator, replay: torch.Tensor | None) -> Any:
    """Steps whose result depends on their order, from eight clients at three owners."""
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with ParameterServer(momentum, owners=[6, 2, 3], replay=replay, timeout=30) as server:
        server.init(["a", "b"], [torch.ones(5, 2), torch.ones(1)])
        for number in range(3):
            a, b = server.pull(["a", "b"])
            server.push_rows("a", [communicator.rank % 5, number], a[:2])
            server.push("b", b * communicator.rank)
        server.barrier()
        found = server.pull(["a", "b"])
    return found, server.order


def test_a_parameter_server_of_three_owners_replays_eight_clients(ranks):
    live = ranks.run(WORLD, serve_all, None)
    values, order = live[0]
    assert sorted(order.bincount().tolist()) == [3 * 3 + 1 + 1] * WORLD
    for found, same in [*live, *ranks.run(WORLD, serve_all, order)]:
        assert all(map(torch.equal, found, values))
        assert same.tolist()[: WORLD * 3 * 3] == order.tolist()[: WORLD * 3 * 3]

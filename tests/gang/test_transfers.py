"""Sums over ranks by a dependency engine: as one after another, and urgent ones overtake."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_ranks import impatient

from sparkdl.collectives import Communicator, Engine
from sparkdl.errors import ParameterError, TrainingError

pytestmark = pytest.mark.gang

SIZES = (0, 1, 7, 40)
"""The lengths of the tensors."""
WORLD = 3


class Step(NamedTuple):
    """A sum of a tensor, or a change of it by another one, on some ranks or where it fails."""

    tensor: int
    other: int | None
    ranks: frozenset[int]
    fails_on: int | None
    op: str
    priority: int
    pause: tuple[float, ...]


TENSORS = st.integers(0, len(SIZES) - 1)
STEPS = st.lists(
    st.builds(
        Step,
        TENSORS,
        st.none() | TENSORS,
        st.frozensets(st.integers(0, WORLD - 1), min_size=1),
        st.sampled_from([None] * 9 + [0, 1, 2]),
        st.sampled_from(["sum", "max"]),
        st.integers(-1, 1),
        st.tuples(*[st.sampled_from([0.0, 0.0, 0.002])] * WORLD),
    ),
    max_size=12,
)


def start(rank: int) -> list[torch.Tensor]:
    return [torch.arange(size) * (rank + 1) + n for n, size in enumerate(SIZES)]


def change(step: Step, rank: int, tensors: list[torch.Tensor]) -> None:
    if step.fails_on == rank:
        raise ZeroDivisionError
    tensors[step.tensor] += 1 + int(tensors[step.other or 0].sum()) % 1009


def one_after_another(steps: list[Step]) -> tuple[list[Any], list[list[bool]]]:
    """The tensors of each rank, and which of its steps fail."""
    world = [start(rank) for rank in range(WORLD)]
    spoilt: list[set[int]] = [set() for _ in range(WORLD)]
    failed: list[list[bool]] = [[] for _ in range(WORLD)]
    for step in steps:
        if step.other is None:
            its = [tensors[step.tensor] for tensors in world]
            fails = [any(step.tensor in some for some in spoilt)] * WORLD
            if not fails[0]:
                total = sum(its) if step.op == "sum" else torch.stack(its).amax(0)
                for tensor in its:
                    tensor.copy_(total)
        else:
            fails = []
            for rank, tensors in enumerate(world):
                here = rank in step.ranks
                fail = {step.tensor, step.other} & spoilt[rank] or step.fails_on == rank
                fails.append(bool(here and fail))
                if here and not fail:
                    change(step, rank, tensors)
        for rank, fail in enumerate(fails):
            failed[rank].append(fail)
            if fail:
                spoilt[rank].add(step.tensor)
    return [[tensor.tolist() for tensor in tensors] for tensors in world], failed


def by_engine(communicator: Communicator, steps: list[Step], threads: int) -> Any:
    rank = communicator.rank
    tensors, futures = start(rank), []

    def changed(step: Step) -> None:
        time.sleep(step.pause[rank])
        change(step, rank, tensors)

    engine = Engine(threads)
    for step in steps:
        its = tensors[step.tensor]
        if step.other is None:
            futures.append(
                engine.all_reduce(
                    communicator, its, op=step.op, priority=step.priority, chunk_bytes=64
                )
            )
        elif rank in step.ranks:
            what = partial(changed, step)
            futures.append(engine.push(what, read=[tensors[step.other]], mutate=[its]))
        else:
            futures.append(engine.push(int))
    engine.close()
    errors = [future.exception(0) for future in futures]
    assert all(isinstance(error, (ZeroDivisionError, TrainingError)) for error in errors if error)
    return [tensor.tolist() for tensor in tensors], [error is not None for error in errors]


@settings(deadline=None, max_examples=40)
@given(STEPS, st.integers(1, 3))
def test_values_are_those_of_one_step_after_another(ranks, steps, threads):
    values, failed = one_after_another(steps)
    assert ranks.run(WORLD, by_engine, steps, threads) == list(zip(values, failed, strict=True))


def overtaking(communicator: Communicator) -> Any:
    """The order in which sums end. Each rank is ready for the small ones in an order of its own."""
    large, ended = torch.ones(1 << 17), []
    small = [torch.full((3,), float(communicator.rank)) for _ in range(4)]
    with Engine(threads=2) as engine:
        begun = engine.all_reduce(communicator, large, chunk_bytes=4096)
        begun.add_done_callback(lambda _: ended.append("large"))
        for n in (range(4), reversed(range(4)))[communicator.rank % 2]:
            engine.push(partial(time.sleep, 0.001), mutate=[small[n]])
        for n, its in enumerate(small):
            its = engine.all_reduce(communicator, its, op="mean", priority=n % 2 + 1)
            its.add_done_callback(lambda _, n=n: ended.append(n))
    assert large.eq(communicator.size).all()
    assert all(its.eq((communicator.size - 1) / 2).all() for its in small)
    return ended


def test_an_urgent_sum_overtakes_a_large_one(ranks):
    for ended in ranks.run(2, overtaking):
        assert sorted(ended[:4]) == [0, 1, 2, 3]
        assert ended[4] == "large"


def misused(communicator: Communicator) -> Any:
    """Return what the futures of wrong or cancelled sums have; the group is still of use after them."""
    first, engine = communicator.rank == 0, Engine(threads=1)
    tensors = [torch.ones(2) for _ in range(4)]
    other_size = engine.all_reduce(communicator, torch.ones(2 if first else 3))
    other_shape = engine.all_reduce(communicator, torch.ones((2, 3) if first else (3, 2)))
    other_priority = engine.all_reduce(communicator, tensors[0], priority=float(first))
    other_chunks = engine.all_reduce(communicator, tensors[3], chunk_bytes=4 if first else 8)
    blocked = engine.push(partial(time.sleep, 0.05), mutate=[tensors[1]])
    cancelled = engine.all_reduce(communicator, tensors[1])
    if first:
        assert cancelled.cancel()
    last = engine.all_reduce(communicator, tensors[2])
    engine.close()
    assert blocked.exception() is None
    assert last.result().tolist() == [2.0, 2.0]
    if first:
        with pytest.raises(CancelledError):
            cancelled.result()
    else:
        assert isinstance(cancelled.exception(), TrainingError)
    others = (other_size, other_shape, other_priority, other_chunks)
    return [str(future.exception()) for future in others]


def test_mistakes_are_told_on_all_ranks(ranks):
    for rank, (size, shape, priority, chunks) in enumerate(ranks.run(2, misused)):
        assert f"all_reduce number 0 of this group is of float32 [{3 if rank else 2}]" in size
        assert f"number 1 of this group is of float32 [{'3, 2' if rank else '2, 3'}]" in shape
        assert f"priority={float(not rank)} and chunk_bytes={4 << 20} here" in priority
        assert f"priority=0.0 and chunk_bytes={8 if rank else 4} here, but not on every" in chunks


def refused(communicator: Communicator) -> None:
    tensor = torch.ones(4, 4)
    with Engine() as engine:
        for given_, words in (
            ({"tensor": 3}, "tensor is an int"),
            ({"tensor": tensor.T}, "not contiguous"),
            ({"tensor": tensor.to_sparse()}, "make it dense first"),
            ({"op": "product"}, "no op 'product'"),
            ({"priority": "high"}, "priority='high': give a number"),
            ({"chunk_bytes": 0}, "chunk_bytes=0: give a whole number"),
            ({"communicator": None}, "communicator is None"),
        ):
            with pytest.raises(ParameterError, match=words):
                engine.all_reduce(**{"communicator": communicator, "tensor": tensor, **given_})
    with pytest.raises(ParameterError, match="closed"):
        engine.all_reduce(communicator, tensor)


def test_wrong_arguments_are_told_at_once(ranks):
    ranks.run(1, refused)


def deserted(_: Communicator) -> bool:
    """One rank asks for sums that the other does not: all of them fail, and nothing hangs."""
    communicator, engine = impatient(), Engine()
    if communicator.rank == 0:
        return True
    blocked, free = torch.ones(2), threading.Event()
    engine.push(free.wait, mutate=[blocked])
    tensors = [torch.ones(2), blocked, torch.ones(2)]
    futures = [engine.all_reduce(communicator, tensor) for tensor in tensors]

    def get_another_ready(_: Any) -> None:  # while those that are ready are ended
        free.set()
        time.sleep(0.1)

    futures[0].add_done_callback(get_another_ready)
    errors = [future.exception(10) for future in futures]
    late = engine.all_reduce(communicator, torch.ones(2))
    engine.close()
    return all(isinstance(error, RuntimeError) for error in [*errors, late.exception()])


def test_a_rank_that_is_gone_fails_the_sums_of_the_others(ranks):
    assert ranks.run(2, deserted) == [True, True]

"""Messages between neighbours of a pipeline on one node."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from real_ranks import WORLD, real_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

from sparkdl.engines.gang.strategies.pipeline_messages import (
    SLOT_BYTES,
    SLOTS,
    Line,
    NearGroup,
    near_group,
)
from sparkdl.gang.rank_task import _by_group

pytestmark = [pytest.mark.gang, pytest.mark.linux]
cloudpickle.register_pickle_by_value(sys.modules[__name__])
KINDS: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.float32, (3, 5)),
    (torch.float64, ()),
    (torch.bfloat16, (7,)),
    (torch.float16, (0, 4)),
    (torch.int64, (2, 3, 4)),
    (torch.uint8, (5,)),
    (torch.bool, (9,)),
    (torch.complex64, (2, 2)),
]


@pytest.fixture(scope="module")
def ranks():
    with real_ranks() as found:
        yield found


@pytest.fixture
def folder(tmp_path):
    """A private one, whose path is longer than that of a socket may be."""
    long = tmp_path / ("long" * 30)
    long.mkdir(mode=0o700)
    return long


def numbers(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    return drawn.abs().to(dtype)


def grouped(communicator: Any, folder: Path) -> tuple[dist.ProcessGroup, int, int]:
    """The group, this rank in it, and its size."""
    members = range(WORLD - communicator.size, WORLD)
    near = near_group(members, communicator._group, folder)
    return near, dist.get_rank(near), dist.get_world_size(near)


def passed_around(communicator: Any, folder: Path, distance: int) -> None:
    """Of each kind one tensor to the rank ``distance`` behind this one, all at once."""
    near, rank, size = grouped(communicator, folder)
    to, source = (rank + distance) % size, (rank - distance) % size
    got = [torch.empty(shape, dtype=dtype) for dtype, shape in KINDS]
    works = [dist.irecv(tensor, group=near, group_src=source) for tensor in got]
    sent = [numbers(rank, *kind) for kind in KINDS]
    works += [dist.isend(tensor, group=near, group_dst=to) for tensor in sent]
    for work in works:
        work.wait()
    for tensor, kind in zip(got, KINDS, strict=True):
        assert torch.equal(tensor, numbers(source, *kind))
    near.shutdown()


@pytest.mark.parametrize(("size", "distance"), [(2, 1), (3, 1), (3, 2), (5, 1), (5, 4)])
def test_neighbours_get_what_is_sent(ranks, folder, size, distance):
    ranks.run(size, passed_around, folder, distance)
    assert not list(folder.iterdir())


def test_others_get_it_too(ranks, folder):
    ranks.run(5, passed_around, folder, 2)


def large_and_small(communicator: Any, folder: Path) -> None:
    near, rank, _ = grouped(communicator, folder)
    shapes = [(5,), (SLOT_BYTES // 4,), (6,), (SLOT_BYTES // 4 + 1,), (7,)] * 3
    got = [torch.empty(shape) for shape in shapes]
    works = [dist.irecv(tensor, group=near, group_src=1 - rank) for tensor in got]
    works += [
        dist.isend(numbers(rank + n, torch.float32, shape), group=near, group_dst=1 - rank)
        for n, shape in enumerate(shapes)
    ]
    for work in works:
        work.wait()
    for n, (tensor, shape) in enumerate(zip(got, shapes, strict=True)):
        assert torch.equal(tensor, numbers(1 - rank + n, torch.float32, shape))
    near.shutdown()


def test_larger_than_a_slot_among_smaller_ones(ranks, folder):
    ranks.run(2, large_and_small, folder)


def of_any_strides(communicator: Any, folder: Path) -> None:
    near, rank, _ = grouped(communicator, folder)
    values = numbers(0, torch.float32, (4, 6, 2))
    if rank:
        dist.isend(values.permute(2, 0, 1), group=near, group_dst=0).wait()
    else:
        got = torch.zeros(6, 4, 2).permute(2, 1, 0).requires_grad_()
        dist.irecv(got, group=near, group_src=1).wait()
        assert torch.equal(got, values.permute(2, 0, 1))
    near.shutdown()


def test_strides_are_each_ends_own(ranks, folder):
    ranks.run(2, of_any_strides, folder)


def steps_of_a_pipeline(communicator: Any, folder: Path, micro_batches: int) -> None:
    """Torch's own schedule, by Gloo and by this: the same bits."""
    near, rank, _ = grouped(communicator, folder)
    found = []
    for group in (communicator._group, near):
        torch.manual_seed(rank)
        module = nn.Linear(6, 3) if rank else nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.cross_entropy)
        for step in range(3):
            x = numbers(step, torch.float32, (4 * micro_batches, 5))
            y = torch.arange(len(x)) % 3
            schedule.step(target=y) if rank else schedule.step(x)
        found.append([parameter.grad for parameter in module.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one, other)
    near.shutdown()


@pytest.mark.parametrize("micro_batches", [2, 3 * SLOTS])
def test_the_schedules_of_torch_take_it_for_gloo(ranks, folder, micro_batches):
    ranks.run(2, steps_of_a_pipeline, folder, micro_batches)


def left_alone(communicator: Any, folder: Path) -> bool:
    near, rank, _ = grouped(communicator, folder)
    if rank:
        near.shutdown()
        return True
    with pytest.raises(dist.DistNetworkError, match="rank 1 of the pipeline: it has ended") as told:
        dist.irecv(torch.zeros(3), group=near, group_src=1).wait()
    near.shutdown()
    return _by_group(told.value)


def test_who_waits_for_a_rank_that_ends_is_told(ranks, folder):
    assert all(ranks.run(2, left_alone, folder))


def never_met(communicator: Any, folder: Path) -> bool:
    """Rank 0 is gone when its neighbour would connect, as when it is killed."""
    if not communicator.rank:
        dist.all_gather(
            [torch.empty(1, dtype=torch.int64)] * 2, torch.tensor([5]), communicator._group
        )
        return True
    near = NearGroup(dist.HashStore(), 1, 2, timedelta(seconds=5))
    with pytest.raises(dist.DistNetworkError, match=r"do not meet: .*No such file") as told:
        near.connect(communicator._group, folder)
    return _by_group(told.value)


def test_a_neighbour_that_is_killed_before_they_meet(ranks, folder):
    assert all(ranks.run(2, never_met, folder))
    assert not list(folder.iterdir())


def test_a_neighbour_that_is_killed_while_they_meet():
    one, other = socket.socketpair()
    other.close()
    with pytest.raises(dist.DistNetworkError, match="nothing comes from rank 1"):
        Line(one, 1)
    one.close()
    one, other = socket.socketpair()
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(dist.DistNetworkError, match="it has ended"):
        Line(one, 1)
    one.close(), other.close()


def descriptors_after(communicator: Any, folder: Path) -> int:
    near, _, _ = grouped(communicator, folder)
    near.shutdown()
    del near
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_it(ranks, folder):
    assert ranks.run(3, descriptors_after, folder) == ranks.run(3, descriptors_after, folder)


def a_line(seconds: float = 20.0) -> tuple[Line, Line]:
    """Both its ends."""
    ends, lines = socket.socketpair(), [None, None]
    for end in ends:
        end.settimeout(seconds)

    def make(n: int) -> None:
        lines[n] = Line(ends[n], 1 - n)

    both = [threading.Thread(target=make, args=(n,)) for n in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return lines[0], lines[1]


def test_a_rank_that_says_nothing_is_not_waited_for_for_ever():
    one, other = a_line(0.2)
    with pytest.raises(dist.DistNetworkError, match=r"nothing comes from rank 1 .*timed out"):
        one.receive(torch.zeros(2)).wait()
    one.close(), other.close()


def test_a_tensor_for_which_there_is_no_room_is_sent_when_there_is():
    one, other = a_line()
    works = [one.send(torch.full((3,), float(n))) for n in range(3 * SLOTS)]
    for n in range(3 * SLOTS):
        got = torch.empty(3)
        other.receive(got).wait()
        assert torch.equal(got, torch.full((3,), float(n)))
        if (n + 1) % SLOTS == 0:  # credit has come back: the next ones go
            works[min(n + SLOTS, len(works) - 1)].wait()
    one.close(), other.close()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_number_of_messages_in_any_order_of_waiting(data):
    """Either end asks for all that comes, sends, and waits for its messages in an order of its own."""
    counts = [data.draw(st.integers(0, 3 * SLOTS)) for _ in range(2)]
    orders = [data.draw(st.permutations(range(sum(counts)))) for _ in range(2)]
    lines, failed = a_line(), []

    def live(me: int) -> None:
        try:
            got = [torch.empty(n + 1) for n in range(counts[1 - me])]
            works: list[Any] = [lines[me].receive(tensor) for tensor in got]
            works += [lines[me].send(torch.full((n + 1,), float(n))) for n in range(counts[me])]
            receiving = [n for n in orders[me] if n < len(got)]
            sending = [n for n in orders[me] if n >= len(got)]
            for n in receiving + sending:
                works[n].wait()
            for n, tensor in enumerate(got):
                assert torch.equal(tensor, torch.full((n + 1,), float(n)))
        except BaseException as error:
            failed.append(error)

    both = [threading.Thread(target=live, args=(me,)) for me in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not failed
    for line in lines:
        line.close()

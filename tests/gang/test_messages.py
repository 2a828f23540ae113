"""What ranks tell each other: values as they were, and nothing that runs."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_ranks import Ranks

from sparkdl.collectives.communicator import Communicator
from sparkdl.engines.gang.rank_messages import (
    _read,
    _written,
    broadcast,
    gathered_values,
    receive,
    send,
)

pytestmark = pytest.mark.gang
CPU = torch.device("cpu")


def value_of(rank: int) -> Any:
    shared = torch.arange(6.0) + rank
    return (
        {3: {"step": 4, "rate": math.inf, "factor": shared[:2]}, 7: {}},
        [shared, shared[1:], torch.tensor(rank), torch.zeros(0, 3, dtype=torch.bfloat16)],
        ("text", None, True, (), 0.1),
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def told(communicator: Communicator) -> bool:
    """All ways, in the group of the last ranks."""
    group, rank = communicator._group, dist.get_rank()
    members = dist.get_process_group_ranks(group)
    first, last = members[0], members[-1]
    right = same(broadcast(value_of(rank), last, group, CPU), value_of(last))
    right &= same(gathered_values(value_of(rank), group, CPU), [value_of(r) for r in members])
    if rank == first:
        send(value_of(rank), last, group, CPU)
    if rank == last:
        right &= same(receive(first, group, CPU), value_of(first))
    return right


@pytest.mark.parametrize("size", [2, 3])
def test_values_come_as_they_were(ranks: Ranks, size: int) -> None:
    assert ranks.run(size, told) == [True] * size


def test_what_has_no_such_form_is_refused() -> None:
    with pytest.raises(TypeError, match=r"what a rank sends.* is a complex"):
        _written([1j])


def test_a_pickle_is_not_read() -> None:
    content = torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"header|too|bytes|file"):
        _read(content, CPU)

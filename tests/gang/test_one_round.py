"""Sums that ranks make themselves of what all send."""

from __future__ import annotations

import sys

import pytest
import torch
from pyspark import cloudpickle

from sparkdl.collectives.direct import (
    MOST_BYTES,
    MOST_RANKS,
    DirectReduceScatter,
    all_reduce,
    exchange_all,
    reduce_scatter,
)

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SIZES = [2, 3, MOST_RANKS, MOST_RANKS + 1]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed_everywhere(communicator, count, dtype):
    tensor = values(communicator.rank, count, dtype)
    all_reduce(tensor, communicator._group)
    return tensor


def scattered(communicator, count, dtype):
    tensor = values(communicator.rank, count * communicator.size, dtype)
    found = torch.empty(count, dtype=dtype)
    reduce_scatter(found, tensor, communicator._group)
    assert torch.equal(tensor, values(communicator.rank, count * communicator.size, dtype))
    return found


def right(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """In the order of ranks, rounded once."""
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    total = torch.zeros(count, dtype=wide)
    for rank in range(size):
        total += values(rank, count, dtype)
    return total.to(dtype)


@pytest.mark.parametrize("count", [1, 2, 5, 1000, 100_001, MOST_BYTES // 4 + 1])
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_on_every_rank(ranks, size, count):
    found = ranks.run(size, summed_everywhere, count, torch.float32)
    for one in found:
        assert torch.equal(one, found[0])
    if size <= min(MOST_RANKS, count) and count * 4 <= MOST_BYTES:
        assert torch.equal(found[0], right(size, count, torch.float32))
    torch.testing.assert_close(found[0], right(size, count, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_narrow_values_are_rounded_once(ranks, size, dtype):
    for one in ranks.run(size, summed_everywhere, 1000, dtype):
        assert one.dtype == dtype
        assert torch.equal(one, right(size, 1000, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, MOST_RANKS])
def test_a_scattered_sum(ranks, size, dtype):
    found = torch.cat(ranks.run(size, scattered, 333, dtype))
    assert torch.equal(found, right(size, 333 * size, dtype))


def test_a_scattered_sum_of_many_ranks_is_torchs(ranks):
    size = MOST_RANKS + 1
    found = torch.cat(ranks.run(size, scattered, 20, torch.float32))
    torch.testing.assert_close(found, right(size, 20 * size, torch.float32))


def exchanged(communicator):
    rank, size = communicator.rank, communicator.size
    parts = [torch.full((rank + 1,), 10.0 * rank + other) for other in range(size)]
    arriving = [torch.empty(other + 1) for other in range(size)]
    exchange_all(parts, arriving, communicator._group)
    return [float(part[0]) for other, part in enumerate(arriving) if other != rank]


def test_parts_of_any_size_from_all_to_all(ranks):
    found = ranks.run(3, exchanged)
    assert found == [[10.0, 20.0], [1.0, 21.0], [2.0, 12.0]]


def only_sums(communicator):
    with pytest.raises(AssertionError):
        DirectReduceScatter()(
            torch.empty(1), torch.empty(2), communicator._group, torch.distributed.ReduceOp.AVG
        )


def test_only_sums(ranks):
    ranks.run(2, only_sums)

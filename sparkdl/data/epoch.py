"""The rows of mini-batch t, as pure arithmetic on (seed, epoch, iteration, counts).

An epoch visits every sample exactly once, in an order that is drawn anew each epoch from the seed.
Iteration i of an epoch takes global batch i. Each replica contributes rows in proportion to the size of
its partition, by the Sainte-Laguë method (Webster's divisor method). That method is monotone in the
number of seats (here: samples), so the rows of successive iterations are exact, disjoint, and cover
each partition.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np


def derive_seed(seed: int, purpose: str, *position: int) -> int:
    """Return a 63-bit seed for a purpose at a position, such as ``("forward", iteration, replica)``.

    The seed does not depend on attempts, executors or the order of tasks.
    """
    text = "/".join([str(seed), purpose, *map(str, position)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *position: int) -> np.random.Generator:
    """Return NumPy's random generator for one purpose at one position, see :func:`derive_seed`."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, *position)))


STEP = np.uint64(0x9E3779B97F4A7C15)
"""The increment of the states of SplitMix64."""


def mixed(state: np.ndarray) -> np.ndarray:
    """Return 64-bit states as random bits: the finalizer of SplitMix64 (Steele et al., 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class RowDraws:
    """Random numbers for all rows of a batch at once, which :class:`sparkdl.Batched` gets.

    Each array begins with the rows. The numbers of a row depend on the seed, the epoch and the row
    alone, and not on the batch that it is in.
    """

    def __init__(self, seed: int, rows: np.ndarray) -> None:
        self._states = mixed(mixed(rows.astype(np.uint64) * STEP) + np.uint64(seed))

    def _bits(self, shape: tuple[int, ...]) -> np.ndarray:
        if not all(hasattr(length, "__index__") for length in shape):
            raise TypeError(
                f"{shape} are no lengths: give those of one row, as in rng.random(3); the rows are "
                "the first dimension, and normal has no mean and no deviation"
            )
        count = math.prod(shape)
        steps = np.arange(1, count + 1, dtype=np.uint64) * STEP
        bits = mixed(self._states[:, None] + steps)
        if count:
            self._states = self._states + steps[-1]
        return bits.reshape(len(self._states), *shape)

    def random(self, *shape: int) -> np.ndarray:
        """Return numbers from 0 to below 1, of shape (rows, *shape)."""
        return (self._bits(shape) >> np.uint64(11)) * 2.0**-53

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Return integers from ``low`` to below ``high``, of shape (rows, *shape)."""
        return low + (self.random(*shape) * (high - low)).astype(np.int64)

    def normal(self, *shape: int) -> np.ndarray:
        """Return numbers of the standard normal distribution, of shape (rows, *shape)."""
        radius, angle = 1.0 - self.random(*shape), self.random(*shape)
        return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)


ORDER_BYTES = 64 << 20
"""Limit on the memory of a process's remembered orders; the two most recent are always kept."""
_MAX_ORDERS = 32
_orders: OrderedDict[Hashable, np.ndarray] = OrderedDict()
_lock = threading.Lock()
"""Guards ``_orders``: a driver may train in several threads."""


def remembered(key: Hashable, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the order for this ``key``, from the cache or newly drawn; it is shared, hence read-only.

    An order takes 8 bytes a row, and a partition may be larger than memory, so the cache is small.
    """
    with _lock:
        if key in _orders:
            _orders.move_to_end(key)
            return _orders[key]
    order = draw()
    order.flags.writeable = False
    with _lock:
        _orders[key] = order
        _orders.move_to_end(key)
        while len(_orders) > _MAX_ORDERS or (
            len(_orders) > 2 and sum(kept.nbytes for kept in _orders.values()) > ORDER_BYTES
        ):
            _orders.popitem(last=False)
    return order


def permutation(seed: int, epoch: int, replica: int, num_rows: int) -> np.ndarray:
    """Return the order (int64) in which ``replica`` visits its ``num_rows`` rows in ``epoch``."""
    return generator(seed, "shuffle", epoch, replica).permutation(num_rows)


def apportion(counts: Sequence[int], position: int) -> np.ndarray:
    """Return how many of the first ``position`` samples of an epoch each replica contributes.

    The result (int64, (M,)) sums to ``position`` (at most ``sum(counts)``), no component exceeds its
    count, and every component is monotone in ``position``.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    total, replicas = int(sizes.sum()), len(sizes)
    if position >= total:
        return sizes.copy()
    # Start below the final seats in every component, then give out the few missing ones by key.
    start = np.floor(sizes * ((position - replicas / 2) / total) - 0.5).astype(np.int64)
    taken = np.clip(start, 0, sizes)
    missing = position - int(taken.sum())
    while missing > 0:
        keys = np.full(replicas, np.inf)
        left = taken < sizes
        keys[left] = (taken[left] + 0.5) / sizes[left]
        taken[int(np.argmin(keys))] += 1
        missing -= 1
    return taken


@dataclass(frozen=True)
class EpochPlan:
    """A plan of an epoch: partitions of ``counts`` rows, cut into global batches of ``batch_size``."""

    counts: tuple[int, ...]
    batch_size: int

    @property
    def num_samples(self) -> int:
        return sum(self.counts)

    @property
    def num_iterations(self) -> int:
        """Return the iterations of an epoch; the last batch may be short."""
        return -(-self.num_samples // self.batch_size)

    def rows(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return, for each replica, the range of its permutation that global batch ``index`` takes."""
        if not 0 <= index < self.num_iterations:
            raise IndexError(f"batch {index} of an epoch of {self.num_iterations}")
        start = _remembered_seats(self.counts, index * self.batch_size)
        stop = _remembered_seats(self.counts, (index + 1) * self.batch_size)
        return tuple(zip(start, stop, strict=True))


@functools.lru_cache(maxsize=8)
def _remembered_seats(counts: tuple[int, ...], position: int) -> list[int]:
    """Return :func:`apportion` from a cache: a batch starts where the one before stopped."""
    return apportion(counts, position).tolist()

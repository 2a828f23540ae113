"""Rows of the next mini-batch, prepared in a thread while this one is computed with.

What is prepared is a pure function of what it is asked for by, so it makes no difference to anything
but time: rows that were not foreseen are prepared when they are asked for. Spark may run a replica's
next task in another process: then the work was for nothing. A process in which that happens more often
than not stops to prepare ahead; one that has a slot, or a GPU, to itself always meets its own replica.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkdl.data.ragged import Rows
from sparkdl.process.determinism import times_seeded, work_beside

Prepare = Callable[[int, int], list[Rows]]
"""``prepare(start, stop)``: the rows of that range of an order, one entry a field."""


@dataclass(frozen=True)
class _Range:
    position: Any
    start: int
    stop: int
    rows: Future[list[Rows]]


class Prefetcher:
    """Foresees that the range after this one will be asked for, where to prepare it takes long.

    ``patience``: how much more may be prepared for nothing than for use.
    """

    def __init__(self, worth_seconds: float = 0.002, max_kept: int = 4, patience: int = 8) -> None:
        self.worth_seconds, self.max_kept, self.patience = worth_seconds, max_kept, patience
        self.used = self.wasted = 0
        self._thread = ThreadPoolExecutor(1, "sparkdl-ahead", work_beside)
        self._ranges: OrderedDict[Hashable, _Range] = OrderedDict()
        self._slow: set[Hashable] = set()
        self._quick: set[Hashable] = set()
        self._lock = threading.Lock()

    def serve(self, many: int) -> None:
        """So many take turns: keep what is prepared for each."""
        self.max_kept = max(self.max_kept, many)

    def take(
        self, who: Hashable, position: Any, start: int, stop: int, end: int, prepare: Prepare
    ) -> list[Rows]:
        """``prepare(start, stop)``, which must be pure; ``end`` is that of the whole order.

        ``who`` asks for one range after the other; ``position`` is all else that the rows depend on.
        Raises what ``prepare`` raises.
        """
        with self._lock:
            found = self._ranges.pop(who, None)
        rows = None if found is None else self._prepared(found, position, start, stop)
        if found is not None:
            self.used, self.wasted = self.used + (rows is not None), self.wasted + (rows is None)
        if rows is None:
            rows = self._timed(who, lambda: prepare(start, stop))
        if who in self._slow and stop < end and self.wasted <= self.used + self.patience:
            size = stop - start + 1  # shares of mini-batches differ by one
            after = min(end, stop + size)
            self._keep(
                who, _Range(position, stop, after, self._thread.submit(prepare, stop, after))
            )
        return rows

    def _timed(self, who: Hashable, prepare: Callable[[], list[Rows]]) -> list[Rows]:
        """Note whether it took long, and whether it could be done in the thread: draws from a global
        generator would disturb those of the forward pass beside it. To look at these generators takes
        as long as to gather a few rows: it is not done again for what was quick."""
        states = None if who in self._quick else _random_states()
        began = time.perf_counter()
        rows = prepare()
        slow = time.perf_counter() - began >= self.worth_seconds
        (self._quick.discard if slow else self._quick.add)(who)
        apart = slow and states is not None and states == _random_states()
        (self._slow.add if apart else self._slow.discard)(who)
        return rows

    def _prepared(self, found: _Range, position: Any, start: int, stop: int) -> list[Rows] | None:
        """What was prepared, if it is that; None also where it was not begun, or failed."""
        wanted = found.position == position and found.start == start and found.stop >= stop
        if found.rows.cancel() or not wanted or found.rows.exception() is not None:
            return None
        return [rows[: stop - start] for rows in found.rows.result()]

    def _keep(self, who: Hashable, coming: _Range) -> None:
        with self._lock:
            self._ranges[who] = coming
            while len(self._ranges) > self.max_kept:
                _, oldest = self._ranges.popitem(last=False)
                oldest.rows.cancel()


def _random_states() -> list[Any]:
    """Return the states of the generators that code may draw from without being handed one, and how
    often they were seeded for such code."""
    numpys = np.random.get_state(legacy=False)["state"]
    return [
        random.getstate(),
        numpys["key"].tobytes(),
        numpys["pos"],
        torch.get_rng_state().numpy().tobytes(),
        times_seeded(),
    ]


AHEAD = Prefetcher()
"""Of this process."""

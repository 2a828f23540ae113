"""Rows of the next mini-batch, prepared in a thread while the current one is computed.

The prepared rows are a pure function of the request, so prefetching affects only time: rows that were
not foreseen are prepared on request. Spark may run a replica's next task in another process; then the
work is wasted. A process that wastes more than it uses stops prefetching. A process that has a slot, or
a GPU, to itself always meets its own replica.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparkdl.data.ragged import Rows
from sparkdl.process.determinism import times_seeded, work_beside

Prepare = Callable[[int, int], list[Rows]]
"""``prepare(start, stop)`` returns the rows of that range of an order, one entry a field."""


@dataclass(frozen=True)
class _Range:
    position: Any
    start: int
    stop: int
    rows: Future[list[Rows]]


class Prefetcher:
    """A prefetcher of the range after the requested one, if preparing takes ``worth_seconds``.

    It stops once it has wasted ``patience`` ranges more than were used.
    """

    def __init__(self, worth_seconds: float = 0.002, max_kept: int = 4, patience: int = 8) -> None:
        self.worth_seconds, self.max_kept, self.patience = worth_seconds, max_kept, patience
        self.used = self.wasted = 0
        self._thread = ThreadPoolExecutor(1, "sparkdl-ahead", work_beside)
        self._ranges: OrderedDict[Hashable, _Range] = OrderedDict()
        self._slow: set[Hashable] = set()
        self._lock = threading.Lock()

    def serve(self, many: int) -> None:
        """Keep prepared ranges for at least ``many`` requesters that take turns."""
        self.max_kept = max(self.max_kept, many)

    def take(
        self, who: Hashable, position: Any, start: int, stop: int, end: int, prepare: Prepare
    ) -> list[Rows]:
        """Return ``prepare(start, stop)``, from what was prepared ahead if possible.

        ``prepare`` is pure, and its exceptions propagate. ``position`` is everything else that the
        rows depend on, ``end`` the end of the whole order.
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
        """Prepare the rows, and note whether that is slow and may be done in the thread.

        It may not if it draws from a global generator, which would disturb the forward pass that runs
        at the same time: such work is seeded, see :func:`steadily`, and seedings are counted.
        """
        seeded, began = times_seeded(), time.perf_counter()
        rows = prepare()
        slow = time.perf_counter() - began >= self.worth_seconds
        apart = slow and times_seeded() == seeded
        (self._slow.add if apart else self._slow.discard)(who)
        return rows

    def _prepared(self, found: _Range, position: Any, start: int, stop: int) -> list[Rows] | None:
        """Return the prepared rows if they match; None if they do not, were not begun, or failed."""
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


AHEAD = Prefetcher()
"""The prefetcher of this process."""

"""The ranges of one owner, and what operations do to them. Pure torch: no threads, no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sparkdl.collectives.key_range import WHOLE, Gradient, KeyRange, MakeOptimizer, Rounds
from sparkdl.collectives.server_files import write_ranges
from sparkdl.collectives.server_messages import pairs


class OwnedRanges:
    """The rows of all keys that lie at one owner."""

    def __init__(
        self, clients: int, make: MakeOptimizer | None, synchronous: bool, average: bool
    ) -> None:
        self._make, self._synchronous, self._average = make, synchronous, average
        self._clients, self._active = clients, list(range(clients))
        self._ranges: dict[int, KeyRange] = {}
        self._rounds: dict[int, Rounds] = {}

    def init(self, key: int, values: torch.Tensor) -> None:
        """Add a range."""
        self.add({key: KeyRange(values, self._make, self._average)})

    def add(self, ranges: Mapping[int, KeyRange]) -> None:
        """Add ranges by the numbers of their keys."""
        self._ranges |= ranges
        self._rounds |= {key: Rounds(self._clients) for key in ranges}

    def save(self, path: Path) -> None:
        """Write all ranges to a file."""
        write_ranges(path, self._ranges)

    def push(self, client: int, words: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Take a client's gradients, and make the steps that they complete.

        ``words`` has the key and the number of rows, or WHOLE, of each gradient; ``tensors`` has
        its rows, unless they are all, and its values.
        """
        left = iter(tensors)
        for key, count in pairs(words):
            rows = None if count == WHOLE else next(left)
            gradient = Gradient(next(left), rows)
            if self._synchronous:
                self._rounds[key].add(client, gradient)
                self._step_complete(key)
            else:
                self._ranges[key].step([gradient])

    def pull(self, words: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return values, which the next push may change; see :meth:`push`."""
        left, found = iter(tensors), []
        for key, count in pairs(words):
            values = self._ranges[key].values
            found.append(values if count == WHOLE else values[next(left)])
        return found

    def finish(self, client: int) -> None:
        """Make the steps that waited for this client alone, which pushes no more."""
        self._active.remove(client)
        for key in self._rounds:
            self._step_complete(key)

    def use(self, make: MakeOptimizer | None) -> None:
        """Update with new optimizers from now on."""
        self._make = make
        for its in self._ranges.values():
            its.use(make)

    def _step_complete(self, key: int) -> None:
        for gradients in self._rounds[key].complete(self._active):
            self._ranges[key].step(gradients)

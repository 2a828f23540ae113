"""A rank's work on snapshots of the gang: its whole state on some nodes, from which new ranks start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.engines.gang.node_files import (
    SnapshotFiles,
    broadcast_bytes,
    pack,
    pack_kept,
    unpack,
    unpack_kept,
)
from sparkdl.engines.gang.rank_state import RankState, States
from sparkdl.engines.gang.strategies.base import GradientSync


class Snapshots:
    """The snapshots of a rank.

    Every method but :meth:`begin` is a command that all ranks get at the same time.

    A snapshot has one part for each slice and, if gradients are compressed, one more for the
    residuals of each rank.

    Args:
        files: The snapshot files of this node.
        rank: This rank.
        slices: The number of slices.
        residuals: The number of ranks that may have residuals; 0 if gradients are not compressed.
    """

    def __init__(self, files: SnapshotFiles, rank: int, slices: int, residuals: int) -> None:
        self._files, self._rank = files, rank
        self._slices, self._residuals = slices, residuals

    def begin(self, held: RankState, sync: GradientSync) -> None:
        """Set the state and the gradients of which to take snapshots."""
        self._held, self._sync = held, sync

    def save(self, name: str, holders: Sequence[int]) -> str | None:
        """Write this state to files on the nodes of ``holders``, the first rank of each node.

        Returns:
            A problem on this rank, such as a full disk, or None. No other rank waits because of it.
        """
        self._sync.settle()
        holds, held = self._rank in holders, self._held
        current, best = held.as_slices(held.states), held.as_slices(held.best)
        problems: list[str] = []
        for n, plan in enumerate(held.slices):
            packed = None
            if n in current and (self._slices > 1 or holds):
                kept = [states[n] for states in (current, best) if n in states]
                packed = _tried(functools.partial(pack, plan, kept), problems)
            if self._slices > 1:
                packed = broadcast_bytes(packed, n)
            if packed and holds:
                _tried(functools.partial(self._files.write, name, n, packed), problems)
        for r in range(self._residuals):
            mine = None
            if r == self._rank:
                mine = _tried(functools.partial(pack_kept, self._sync.kept), problems)
            packed = broadcast_bytes(mine, r)
            if holds:
                _tried(
                    functools.partial(self._files.write, name, self._slices + r, packed), problems
                )
        return problems[0] if problems else None

    def drop(self, name: str, holders: Sequence[int]) -> None:
        """Delete a snapshot that is no longer needed."""
        if self._rank in holders:
            self._files.delete(name, self._slices + self._residuals)

    def there(self, name: str) -> list[bool]:
        """Return which parts are on this node: first the slices, then the residuals of each rank."""
        return self._files.there(name, self._slices + self._residuals)

    def load(self, name: str, sources: Sequence[int]) -> None:
        """Continue from a snapshot. ``sources`` has, for each part, a rank whose node has it."""
        current: States = {}
        best: States = {}
        for n, source in enumerate(sources):
            mine = self._rank == source
            packed = broadcast_bytes(self._files.read(name, n) if mine else None, source)
            if n in self._held.owners:
                dtype = self._held.live.flat.layout.dtype
                current[n], *kept = unpack(self._held.slices[n], packed, dtype)
                if kept:
                    best[n] = kept[0]
            if n - self._slices == self._rank:
                self._sync.place_kept(unpack_kept(packed))
        self._held.place(current)
        if best:
            self._held.place_best(best)


def _tried(action: Callable[[], Any], problems: list[str]) -> Any:
    """Return the result of ``action``. If it fails, add the problem to ``problems`` and return None."""
    try:
        return action()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
        return None

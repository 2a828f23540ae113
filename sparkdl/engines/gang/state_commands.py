"""The commands of the driver that read or replace the state of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparkdl.codec.packed import ByParameter
from sparkdl.engines.gang.background import (
    Background,
    BackgroundResult,
    copied_residuals,
    on_copies,
)
from sparkdl.engines.gang.rank_state import RankState, States
from sparkdl.engines.gang.strategies.base import GradientSync
from sparkdl.loop.engine import BEST, ReadResiduals, ReadState, StateWork, weights_of
from sparkdl.replica.run import RunSpec
from sparkdl.slab.parts import Left, left_where_large, read_part
from sparkdl.slab.pool import Reference, open_pool
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState


class StateCommands:
    """The use of a rank's state by the driver. Every public method is one of its commands.

    ``_read`` is the state that :meth:`read` has read and :meth:`place` has still to place.
    """

    def __init__(self, held: RankState, sync: GradientSync, run: RunSpec, rank: int) -> None:
        self._held, self._sync, self._run, self._rank = held, sync, run, rank
        self._read: tuple[str, States] | None = None
        self._background: Background | None = None

    @property
    def writing(self) -> bool:
        """Return whether background work is still running."""
        return self._background is not None and self._background.busy

    def _answers_for(self, number: int) -> bool:
        """Return whether this rank reports on slice ``number``, which several ranks may own."""
        return number in self._held.owners and (self._run.slices > 1 or self._rank == 0)

    def read(
        self, read: ReadState | None, reported: tuple[type[Exception], ...], which: str
    ) -> Any:
        """Read the initial slices, without placing them; None: the recipe's weights.

        Returns an exception of ``reported``, if one was raised.
        """
        self._read = None
        if read is None:
            return None
        held, found = self._held, {}
        for n in held.owners:
            try:
                found[n] = read(held.slices[n], held.live.flat.layout.dtype)
            except reported as error:
                return error
        self._read = which, found
        return None

    def place(self) -> None:
        """Place the state that was read or, if none was, the recipe's weights."""
        if self._read is None:
            self._held.begin()
            return
        which, found = self._read
        self._read = None
        if which == BEST:
            self._held.place_best(found)
        else:
            self._held.place(found)

    def keep_best(self) -> None:
        """Keep a copy of the current weights."""
        self._sync.settle()
        self._held.keep_best()

    def weights(self, which: str, submission: int) -> dict[int, np.ndarray | Left]:
        """Return the weights of the slices that this rank answers for, as NumPy arrays.

        Arrays travel with fewer copies than tensors. ``which`` may also be the moving average. For
        the arguments see :meth:`map_slices`.
        """
        self._sync.settle()
        held, pool = self._held, open_pool(self._run.slab)
        states = held.best if which == BEST else held.states
        slices = held.as_slices({n: SliceState(weights_of(s, which)) for n, s in states.items()})
        return {
            n: left_where_large(pool, s.weights.numpy(), submission)
            for n, s in slices.items()
            if self._answers_for(n)
        }

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str, submission: int
    ) -> dict[int, Any]:
        """Use the states of the slices that this rank answers for; large results stay in slabs."""
        plans, states, pool = self._held.slices, self._slices(which), open_pool(self._run.slab)
        return {
            n: left_where_large(pool, use(n, plans[n], state), submission)
            for n, state in states.items()
        }

    def read_parts(self, parts: Mapping[int, Reference]) -> dict[int, bytes]:
        """Read parts of what this rank has left in slabs."""
        pool = open_pool(self._run.slab)
        return {n: read_part(pool, part) for n, part in parts.items() if self._answers_for(n)}

    def _slices(self, which: str) -> States:
        """Return the states of the slices that this rank answers for."""
        self._sync.settle()
        held = self._held
        states = held.as_slices(held.best if which == BEST else held.states)
        return {n: state for n, state in states.items() if self._answers_for(n)}

    def begin_background(self, name: str, uses: StateWork) -> None:
        """Start to use copies of the state in the background. Only one such work runs at a time."""
        plans = dict(enumerate(self._held.slices))
        states = [on_copies(use, plans, self._slices(which)) for use, which in uses.states]
        residuals = []
        if self._sync.kept is not None:
            kept = copied_residuals(self._sync.kept)
            residuals.append(functools.partial(uses.residuals, self._rank, kept))
        self._background = Background(name, states, residuals)

    def background(self, name: str) -> BackgroundResult | None:
        """Return the results of background work, or None if this rank is new and does not know it."""
        found, self._background = self._background, None
        return found.results() if found is not None and found.name == name else None

    def load_residuals(self, read: ReadResiduals, reported: tuple[type[Exception], ...]) -> Any:
        """Load this rank's residuals. See :class:`sparkdl.loop.engine.Engine`.

        An exception of ``reported`` is returned instead of raised.
        """
        try:
            self._sync.place_kept(read(self._rank))
        except reported as error:
            return error
        return None

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        """Return ``[use(rank, kept)]``, or an empty list if this rank has no residuals."""
        kept = self._sync.kept
        return [] if kept is None else [use(self._rank, kept)]

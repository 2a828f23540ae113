"""The pickled recipe on its way to the ranks: in their set-up where it is small, else as a file of
each node.

A recipe that holds a module or weights is as large as these. In the set-up each rank would be sent all
of it, and would have it in memory, before any of them has its turn to build
(:mod:`sparkdl.engines.gang.build_turn`); so one rank of each node writes it to a disk, in pieces.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.errors import SlabFullError
from sparkdl.gang.driver import Gang
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.recipe import Recipe
from sparkdl.replica.run import RECIPE
from sparkdl.slab.root import SlabConfig, open_private, open_root

INLINE_BYTES = 1 << 20
"""A recipe up to this size is in the set-up."""
PIECE_BYTES = 32 << 20
DOING = "sending the model to the ranks"


@dataclass(frozen=True)
class RecipeSource:
    """Where a rank finds the recipe: ``inline``, or, where that is None, in the file of its node."""

    slab: SlabConfig
    inline: bytes | None = field(repr=False)

    @staticmethod
    def of(slab: SlabConfig, recipe: bytes) -> RecipeSource:
        return RecipeSource(slab, recipe if len(recipe) <= INLINE_BYTES else None)

    def bring(self, gang: Gang, recipe: bytes) -> None:
        """Leave ``recipe`` where its ranks will look for it; nothing where it is inline."""
        if self.inline is not None:
            return
        tokens = gang.call(_NodeOf(self.slab), DOING)
        for start in range(0, len(recipe), PIECE_BYTES):
            write = _WritePiece(self.slab, recipe[start : start + PIECE_BYTES], start == 0)
            first = [tokens.index(token) == rank for rank, token in enumerate(tokens)]
            gang.call_each([write if writes else _Nothing() for writes in first], DOING)

    def remove(self, gang: Gang) -> None:
        """Every rank has built its replica: nobody reads the file any more."""
        if self.inline is None:
            gang.call(_Remove(self.slab), DOING)

    def load(self) -> Recipe:
        """Unpickle the recipe, with all that it holds."""
        if self.inline is not None:
            return _checked(pickle.loads(self.inline))
        with open(_path(self.slab), "rb", opener=open_private) as file:
            return _checked(pickle.load(file))


@dataclass(frozen=True)
class _NodeOf:
    """The command whose result is the token of a rank's node, where the slab root is made."""

    slab: SlabConfig

    def __call__(self, member: RankContext) -> str:
        root = open_root(self.slab, create=True)
        assert root is not None
        return root.token


@dataclass(frozen=True)
class _WritePiece:
    """The command that adds a piece to the file, which the ``first`` one begins anew."""

    slab: SlabConfig
    piece: bytes = field(repr=False)
    first: bool

    def __call__(self, member: RankContext) -> None:
        path = _path(self.slab)
        if self.first:
            path.unlink(missing_ok=True)
        try:
            with open(path, "xb" if self.first else "ab", opener=open_private) as file:
                file.write(self.piece)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise SlabFullError(
                f"no room for the model in {path.parent}. Free space there, or point "
                "spark.sparkdl.slab.dir at a larger directory."
            ) from None


@dataclass(frozen=True)
class _Remove:
    """The command after which the file is not there."""

    slab: SlabConfig

    def __call__(self, member: RankContext) -> None:
        with contextlib.suppress(OSError):
            _path(self.slab).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Nothing:
    """The command for a rank that has nothing to do."""

    def __call__(self, member: RankContext) -> None:
        pass


def _path(slab: SlabConfig) -> Path:
    """On a disk, where there is one: it is read by one rank at a time, and soon not needed any more."""
    root = open_root(slab)
    assert root is not None
    return root.directories[-1] / RECIPE


def _checked(recipe: Any) -> Recipe:
    assert isinstance(recipe, Recipe)
    return recipe

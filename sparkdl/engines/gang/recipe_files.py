"""The transfer of the pickled recipe to the ranks: in their configuration, or as a file on each node.

A recipe that contains a module or weights is as large as these. In the configuration, every rank would
receive all of it and hold it in memory before it may build its model
(:mod:`sparkdl.engines.gang.build_lock`). So one rank of each node writes a large recipe to a disk, in
pieces.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.errors import SlabFullError
from sparkdl.gang.rank_group import RankGroup
from sparkdl.gang.rank_task import RankContext
from sparkdl.model.recipe import Recipe
from sparkdl.replica.run import RECIPE
from sparkdl.slab.root import SlabConfig, open_private, open_root

INLINE_BYTES = 1 << 20
"""The size up to which a recipe is sent inside the configuration of the ranks."""
PIECE_BYTES = 32 << 20
DOING = "sending the model to the ranks"


@dataclass(frozen=True)
class RecipeSource:
    """A place where a rank finds the recipe: ``inline`` or, if that is None, the file on its node."""

    slab: SlabConfig
    inline: bytes | None = field(repr=False)

    @staticmethod
    def of(slab: SlabConfig, recipe: bytes) -> RecipeSource:
        return RecipeSource(slab, recipe if len(recipe) <= INLINE_BYTES else None)

    def bring(self, gang: RankGroup, recipe: bytes) -> None:
        """Write ``recipe`` to a file on each node of the ranks, unless it is inline."""
        if self.inline is not None:
            return
        node_ids = gang.call(_NodeOf(self.slab), DOING)
        for start in range(0, len(recipe), PIECE_BYTES):
            write = _WritePiece(self.slab, recipe[start : start + PIECE_BYTES], start == 0)
            first = [node_ids.index(node_id) == rank for rank, node_id in enumerate(node_ids)]
            gang.call_each([write if writes else _Nothing() for writes in first], DOING)

    def remove(self, gang: RankGroup) -> None:
        """Delete the files. Call this after every rank has built its replica."""
        if self.inline is None:
            gang.call(_Remove(self.slab), DOING)

    def load(self) -> Recipe:
        """Unpickle the recipe, with everything that it contains."""
        if self.inline is not None:
            return _checked(pickle.loads(self.inline))
        with open(_path(self.slab), "rb", opener=open_private) as file:
            return _checked(pickle.load(file))


@dataclass(frozen=True)
class _NodeOf:
    """The command that creates the slab root and returns the id of the rank's node."""

    slab: SlabConfig

    def __call__(self, member: RankContext) -> str:
        root = open_root(self.slab, create=True)
        assert root is not None
        return root.node_id


@dataclass(frozen=True)
class _WritePiece:
    """The command that appends a piece to the file. The ``first`` piece starts a new file."""

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
    """The command that deletes the file."""

    slab: SlabConfig

    def __call__(self, member: RankContext) -> None:
        with contextlib.suppress(OSError):
            _path(self.slab).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Nothing:
    """The command that does nothing."""

    def __call__(self, member: RankContext) -> None:
        pass


def _path(slab: SlabConfig) -> Path:
    """Return the file's path, on a disk if there is one.

    One rank at a time reads it, and it is soon deleted, so it should not take up memory.
    """
    root = open_root(slab)
    assert root is not None
    return root.directories[-1] / RECIPE


def _checked(recipe: Any) -> Recipe:
    assert isinstance(recipe, Recipe)
    return recipe

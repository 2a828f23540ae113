"""The ranks of a node build a model that is cut one after another.

Each of them reads the recipe, with a module or weights that it may hold, builds the whole model, and
lets go of what others have of it. All at once they would need the memory of as many models as there are
ranks; in turn, of one and of what they keep.

The bits are those of a model that is built whole. A model built on the device "meta", of which each
rank then makes only its shards, would not have them: a seeded build draws the values of all tensors
from one sequence of random numbers, in the order in which constructors and initialisers
(``torch.nn.init``, ``reset_parameters``, what the user wrote) happen to draw, and draws again over
some. On "meta" nothing is drawn, and what would have been is not recorded.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class Turn:
    """This rank's, from when the block is entered until it :meth:`ends`, at the block's end at the
    latest. Ranks must not wait for each other meanwhile. ``folder``: one that all of the node see."""

    def __init__(self, folder: Path) -> None:
        self._path, self._file = folder / "building", -1

    def __enter__(self) -> Turn:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException:  # it was interrupted
            self.ends()
            raise
        return self

    def ends(self) -> None:
        """What others have is let go of."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ends()

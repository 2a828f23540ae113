"""The ranks of a node build a model that is cut one after another.

Each of them builds the whole model and lets go of what others have of it. All at once they would need
the memory of as many models as there are ranks; in turn, of one and of what they keep. The bits are
those of a model that is built whole.
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

"""A lock that lets one rank of a node at a time build a model that is to be split.

Each rank reads the recipe, which may contain a module or weights, builds the whole model, and frees
the parts that other ranks hold. If all ranks did this at once, a node would need memory for as many
models as it has ranks. In turn, it needs memory for one model and for the parts that the ranks
keep.

The result is bit for bit that of a model that is built whole. Building the model on the device
"meta" and materializing only each rank's shards would not give these bits. A seeded build draws the
values of all tensors from one sequence of random numbers, in the order in which constructors and
initialisers (``torch.nn.init``, ``reset_parameters``, user code) happen to draw, and some tensors
are drawn more than once. On "meta" nothing is drawn, and nothing records what would have been.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class BuildLock:
    """A context manager that holds the lock of this node.

    It holds it from the beginning of the block until :meth:`release` is called, or until the end of
    the block. A rank that holds it must not wait for another one.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._file = folder / "building", -1

    def __enter__(self) -> BuildLock:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except BaseException:  # such as an interrupt
            self.release()
            raise
        return self

    def release(self) -> None:
        """Release the lock, once this rank has freed the parts of the model that other ranks hold."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __exit__(self, *exc_info: object) -> None:
        self.release()

"""How many threads torch computes with: their number changes the bits of a sum."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Threads:
    """``before``: how many there were when the first of the ``open`` blocks began."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open, self.before = 0, 0


_THREADS = _Threads()


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """``count`` of them inside the block, which is in no other one; afterwards as many as before.

    Each thread of Python's has its own number, and one that begins takes the last that any has set: so
    it may not be asked what there was before, where fits run in several.
    """
    own = _THREADS
    with own.lock:
        if not own.open:
            own.before = torch.get_num_threads()
        own.open += 1
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with own.lock:
            own.open -= 1
            torch.set_num_threads(own.before)

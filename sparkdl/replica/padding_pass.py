"""Whether this process has no samples now, and only keeps the other ranks company: as torch sums in a
pass, it goes forward and backward when they do, with rows that count for nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_idle = False


def idle() -> bool:
    """Whether what goes through counts for nothing."""
    return _idle


@contextlib.contextmanager
def padding_pass(idle: bool = True) -> Iterator[None]:
    """Inside the block, where ``idle``, what goes through counts for nothing."""
    global _idle
    before, _idle = _idle, idle
    try:
        yield
    finally:
        _idle = before

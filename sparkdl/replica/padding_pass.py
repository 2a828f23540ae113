"""The mark of a pass that a rank without samples makes only to keep pace with the other ranks.

torch communicates between ranks during a pass. So a rank without samples goes forward and backward
when the others do, with rows that count for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_idle = False


def idle() -> bool:
    """Return whether the current pass counts for nothing."""
    return _idle


@contextlib.contextmanager
def padding_pass(idle: bool = True) -> Iterator[None]:
    """Mark the passes inside the block as counting for nothing, if ``idle``."""
    global _idle
    before, _idle = _idle, idle
    try:
        yield
    finally:
        _idle = before

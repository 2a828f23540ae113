"""Random draws inside models: from the generators of ``torch`` (CPU), ``numpy`` and ``random``."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch


class _Generators:
    """Those of this process. ``depth``: how many blocks that seed them are open; ``lent``: whether
    nobody wants them back as they were before the outermost of these."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth, self.lent = 0, False


_GENERATORS = _Generators()
"""There is one of each in a process, and a driver may fit in several threads."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed ``torch`` (CPU), ``numpy`` and ``random`` inside the block; restore them after it. Other
    threads wait for its end."""
    own = _GENERATORS
    with own.lock:
        kept = None if own.lent and not own.depth else _states()
        own.depth += 1
        try:
            # torch.manual_seed takes a hundred times longer: for each kind of accelerator that is not
            # in use it keeps the stack as text, in case the call fails once it is
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            own.depth -= 1
            if kept is not None:
                _restore(kept)


@contextlib.contextmanager
def generators_lent() -> Iterator[None]:
    """Blocks of :func:`seeded` in this one leave the generators as they are at their end, unless they
    are in one another: to keep and to restore them takes ten times as long as to seed them. They are
    restored once, at the end of this block."""
    own = _GENERATORS
    with own.lock:
        kept, own.lent = _states(), True
    try:
        yield
    finally:
        with own.lock:
            own.lent = False
            _restore(kept)


_States = tuple[torch.Tensor, object, object]


def _states() -> _States:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _restore(states: _States) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # type: ignore[arg-type]
    random.setstate(states[2])  # type: ignore[arg-type]

"""The synchronous model, which is the default."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.consistency.base import Consistency


@dataclass(frozen=True, kw_only=True)
class Synchronous(Consistency):
    """Replicas compute on the newest version, as one process does.

    Every step waits for all replicas. The result is that of one process with the same global batch.
    """

"""The stale-synchronous model: gradients of weights that are some versions old."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkdl.consistency.base import MOST, Consistency, Dispatch
from sparkdl.errors import shown
from sparkdl.plain import make_plain


@dataclass(frozen=True, kw_only=True)
class StaleSynchronous(Consistency):
    """Replicas compute on the version of the weights that is ``staleness`` steps old.

    This is bounded staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server", 2013), at its bound: in each step the gradients of all replicas are
    those of one version, ``staleness`` steps behind the weights that they are applied to. In the
    first steps of a run, and after a checkpoint or a snapshot, which holds one version, they are
    less far behind. The history has the staleness of each step, and ``fit(replay=history)`` repeats
    it.

    Attributes:
        staleness: The number of steps, at least 0. With 0 the result has the bits of
            :class:`sparkdl.Synchronous`.
    """

    staleness: int = 1

    def __post_init__(self) -> None:
        make_plain(self)

    @property
    def keep(self) -> int:  # type: ignore[override]
        """Return the number of versions that stay readable."""
        return self.staleness + 1

    def dispatch(self, readable: range) -> Dispatch:
        """Choose the oldest version that may be read."""
        return Dispatch(version=max(readable[0], readable[-1] - self.staleness))

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`."""
        if not isinstance(self.staleness, int) or isinstance(self.staleness, bool):
            yield f"staleness={shown(self.staleness)}: give a whole number of at least 0."
        elif not 0 <= self.staleness < MOST:
            yield f"staleness={self.staleness}: give a whole number from 0 to {MOST - 1}."

"""Consistency models: the version of the weights that replicas compute the next global batch on.

Version 0 is the state that was loaded. Every update makes the next version from the newest one, with
the gradients of all replicas. A model decides how old the weights may be that these gradients were
computed on. Where the weights of one version are kept without those before it (a checkpoint, a
snapshot), older versions end: the next iteration computes on the newest one.

The engine records the staleness of each update in its result, and repeats an iteration with the
staleness that was recorded. Therefore a replay has the same bits, whatever the model would decide
then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The decision on an iteration: all replicas compute their mini-batches on ``version``."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """An update that makes version ``base + 1``; one iteration of the loop.

    Attributes:
        version: The version that its gradients are computed on.
        base: The version that they are applied to.
    """

    version: int
    base: int

    @property
    def staleness(self) -> int:
        """Return the number of versions by which the gradients are behind."""
        return self.base - self.version


class Consistency(Protocol):
    """A rule for the versions that replicas compute on.

    Attributes:
        keep: The number of versions that stay readable, at least 1. Each more keeps the weights and
            the optimizer state once more in the slabs of a node.
    """

    keep: int

    def dispatch(self, readable: range) -> Dispatch:
        """Return the decision on the next iteration.

        It must depend on ``readable`` and on earlier decisions alone, because an iteration whose
        tasks find themselves on other nodes is submitted again.

        Args:
            readable: The versions that replicas can compute on. The last one is the newest; there
                are fewer than :attr:`keep` when a run begins, or goes on from a kept state.
        """


@dataclass(frozen=True)
class Synchronous:
    """The model in which replicas compute on the newest version, as one process does."""

    keep: int = 1

    def dispatch(self, readable: range) -> Dispatch:
        """Choose the newest version."""
        return Dispatch(version=readable[-1])

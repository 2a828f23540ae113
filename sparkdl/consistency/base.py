"""The seam of consistency models: the version of the weights that replicas compute a batch on.

Version 0 is the state that was loaded. Every update makes the next version from the newest one, with
the gradients of all replicas. A model decides how old the weights may be that these gradients were
computed on. Where the weights of one version are kept without those before it (a checkpoint, a
snapshot), older versions end: the next iteration computes on the newest one.

The engine records the decisions on each iteration in its result: the staleness of the update, and
the micro-batches of replicas that stopped early. It repeats an iteration with what was recorded.
Therefore a replay has the same bits, whatever the model would decide then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from sparkdl.errors import ParameterError, shown
from sparkdl.replica.iteration import STALENESS, Decisions

MOST = 1 << 16
"""The first staleness that cannot be recorded."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The decision on an iteration: all replicas compute their mini-batches on ``version``."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """An update that makes version ``base + 1``; one iteration of the loop."""

    version: int  # that its gradients are computed on
    base: int  # that they are applied to

    @property
    def staleness(self) -> int:
        """Return the number of versions by which the gradients are behind."""
        return self.base - self.version

    @property
    def decisions(self) -> Decisions:
        """Return what is recorded of it."""
        return {STALENESS: self.staleness} if self.staleness else {}


def largest_staleness(recorded: Mapping[int, Decisions]) -> int:
    """Return the largest staleness of recorded iterations."""
    return max((decisions.get(STALENESS, 0) for decisions in recorded.values()), default=0)


class Consistency:
    """A rule for the versions that replicas compute on. Subclasses are frozen dataclasses.

    Attributes:
        keep: The number of versions that stay readable, at least 1. Each more keeps the weights and
            the optimizer state once more in the slabs of a node.
        inner_steps: The number of optimizer steps that a replica takes by itself in an iteration.
        outer_optimizer: The optimizer that is given the distance which the replicas' own steps have
            moved the weights, as if it were their gradient. None: replicas send gradients.
        topology: The name of the topology over which replicas average weights of their own. None:
            the weights of all are the same.
        may_drop: The share of the rows of an iteration that slow replicas may leave out, see
            :mod:`sparkdl.consistency.stragglers`.
    """

    keep: int = 1
    inner_steps: int = 1
    outer_optimizer: Callable[..., Any] | None = None
    topology: str | None = None
    may_drop: float = 0.0

    def dispatch(self, readable: range) -> Dispatch:
        """Return the decision on the next iteration: the newest version, unless a model overrides it.

        It must depend on ``readable`` and on earlier decisions alone, because an iteration whose
        tasks find themselves on other nodes is submitted again.

        Args:
            readable: The versions that replicas can compute on. The last one is the newest; there
                are fewer than :attr:`keep` when a run begins, or goes on from a kept state.
        """
        return Dispatch(version=readable[-1])

    def problems(self) -> Iterator[str]:
        """Yield the problems of the model's own options."""
        if not isinstance(self.keep, int) or self.keep < 1:
            yield f"keep={shown(self.keep)}: give a whole number of at least 1."

    def problems_with(self, trainer: Any) -> Iterator[str]:
        """Yield the problems of this model with other fields of the user's ``trainer``.

        By default those of a model that computes on older versions.
        """
        if self.keep == 1:
            return
        what = (
            f"consistency={shown(self)}"
            if is_dataclass(self)
            else f"consistency={type(self).__name__}"
        )
        if trainer.engine == "gang":
            yield (
                f'{what} with engine="gang": its ranks have one version of the weights, which each '
                'update overwrites. Use engine="shuffle".'
            )
        yield from problems_of_delay(what, trainer)


def problems_of_delay(what: str, trainer: Any) -> Iterator[str]:
    """Yield the problems of applying gradients to newer weights with fields of ``trainer``."""
    if trainer.local_steps != 1:
        yield (
            f"{what} with local_steps={shown(trainer.local_steps)}: after local steps the optimizer "
            "state is replaced by the replicas' mean, which would undo the steps in between. "
            "Leave one of the two out."
        )
    if trainer.compression is not None:
        yield (
            f"{what} with compression: it delays parts of the gradients too, and no bound on "
            "their age would hold. Leave one of the two out."
        )


def next_update(model: Consistency, readable: range, repeated: Decisions | None) -> Update:
    """Return the update to make: as stale as it is recorded, else as the model says."""
    newest = readable[-1]
    if repeated is not None:
        recorded = repeated.get(STALENESS, 0)
        if newest - recorded not in readable:
            raise ParameterError(
                f"replay: the history has an update with gradients {recorded} versions old, and this "
                f"run has {len(readable) - 1} older versions at that iteration, because a checkpoint "
                "ends those before it. Replay with the same checkpoint= as the recorded run, or "
                "without any."
            )
        return Update(version=newest - recorded, base=newest)
    chosen = model.dispatch(readable)
    if not isinstance(chosen, Dispatch):
        raise ParameterError(
            f"{type(model).__name__}.dispatch returned an object of type {type(chosen).__name__}: "
            "return sparkdl.consistency.base.Dispatch(version=...) with one of the versions that it "
            "is given."
        )
    if chosen.version not in readable:
        raise ParameterError(
            f"{type(model).__name__}.dispatch returned version {chosen.version}, but {readable} are "
            "readable: return one of them, or raise its keep."
        )
    return Update(version=chosen.version, base=newest)

"""The synchronous model, which is the default.

The stale-synchronous model: gradients of weights that are some versions old.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparkdl.consistency.base import (
    FEWEST_PARTS,
    MOST,
    Consistency,
    Dispatch,
    conflicts,
    share_problems,
)
from sparkdl.errors import known_arguments, shown
from sparkdl.plain import is_whole, make_plain


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Synchronous(Consistency):
    """Replicas compute on the newest version, as one process does.

    Every step waits for all replicas. The result is that of one process with the same global batch.

    With ``drop_stragglers`` a step does not wait for slow replicas: a replica leaves out the
    micro-batches (:attr:`sparkdl.Trainer.accumulate`) that it would do after a limit, and its
    gradient counts for the rows that it did. The limit is learned from the times of the replicas. If
    more than this fraction of the rows would be left out, the step is repeated with all of them. The
    history has what each replica did (:attr:`sparkdl.History.micro_batches`), and
    ``fit(replay=history)`` repeats it.

    Attributes:
        drop_stragglers: The largest share of the rows of a step to leave out, above 0 and at most
            0.5, such as 0.25 for one of four replicas. None: none are.
    """

    drop_stragglers: float | None = None

    def __post_init__(self) -> None:
        make_plain(self)

    @property
    def may_drop(self) -> float:  # type: ignore[override]
        """Return the share of the rows that may be left out."""
        return self.drop_stragglers or 0.0

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`, also for the method below."""
        yield from share_problems(self.drop_stragglers, "step")

    def problems_with(self, trainer: Any) -> Iterator[str]:
        if self.drop_stragglers is None:
            return
        what, steps = f"consistency={shown(self)}", trainer.accumulate
        reasons = {
            "engine=gang": "its ranks sum gradients while they compute them, and wait for one another. "
            'Use engine="shuffle".',
            "local_steps": "a replica that left out steps would have other optimizer state than the "
            "rest. Leave one of the two out.",
        }
        yield from conflicts(what, trainer, reasons)
        if trainer.local_steps == 1 and isinstance(steps, int) and steps < FEWEST_PARTS:
            yield (
                f"{what} with accumulate={steps}: a replica stops between micro-batches, so it needs "
                f"several. Use accumulate={FEWEST_PARTS} or more."
            )


@known_arguments
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
        if not (is_whole(self.staleness, 0) and self.staleness < MOST):
            yield f"staleness={shown(self.staleness)}: give a whole number from 0 to {MOST - 1}."

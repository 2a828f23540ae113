"""The seam of consistency models: the version of the weights that replicas compute a batch on.

Version 0 is the state that was loaded. Every update makes the next version from the newest one, with
the gradients of all replicas. A model decides how old the weights may be that these gradients were
computed on. Where the weights of one version are kept without those before it (a checkpoint, a
snapshot), older versions end: the next iteration computes on the newest one.

The engine records the decisions on each iteration in its result: the staleness of the update, and
the micro-batches of replicas that stopped early. It repeats an iteration with what was recorded.
Therefore a replay has the same bits, whatever the model would decide then.

A limit for slow replicas, learned from the times that replicas took.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar

from sparkdl.errors import ParameterError, in_quotes, shown
from sparkdl.plain import is_number
from sparkdl.replica.iteration import (
    INNER_STEPS,
    MICRO_BATCHES,
    STALENESS,
    Decisions,
    IterationRows,
    Limit,
    ReplicaReport,
    seconds_of_parts,
)

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
            :mod:`sparkdl.consistency.base`.
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
        if self.keep > 1:
            what = f"consistency={shown(self) if is_dataclass(self) else type(self).__name__}"
            yield from conflicts(what, trainer, {**_ONE_VERSION, **DELAY})


_ONE_VERSION = {
    "engine=gang": "its ranks have one version of the weights, which each update overwrites. Use "
    'engine="shuffle".'
}
DELAY = {
    "local_steps": "after local steps the optimizer state is replaced by the replicas' mean, which "
    "would undo the steps in between. Leave one of the two out.",
    "compression": "it delays parts of the gradients too, and no bound on their age would hold. "
    "Leave one of the two out.",
}
"""The fields that do not go with gradients that are applied to newer weights."""


def conflicts(what: str, trainer: Any, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield why fields of ``trainer`` do not go with ``what``.

    A reason is for a field that is not its default, or for one value: ``"engine=gang"``.
    """
    for key, why in reasons.items():
        name, _, wrong = key.partition("=")
        value, default = getattr(trainer, name), type(trainer).__dataclass_fields__[name].default
        if value == wrong if wrong else value != default:
            text = f"={in_quotes(value)}" if isinstance(value, (int, float, str)) else ""
            yield f"{what} with {name}{text}: {why}"


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


Result = TypeVar("Result")
WINDOW, MEASURED = 15, 3
"""The number of iterations that the limit is learned from, and the fewest that give one."""
FEWEST_PARTS = 4
"""The fewest micro-batches, or steps of a replica's own, with which dropping helps: a replica stops
between two of them."""


class StragglerLimit:
    """The limit of an engine's iterations, and what it is learned from.

    The limit is the median, over the last iterations, of the time within which all replicas but the
    ``fraction`` were done. The time of a replica that stopped early is what it would have taken for
    all of its rows, so that dropping does not lower the limit. Times of machines are no
    function of the data: what came of the limit is therefore recorded, and repeated as recorded.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._largest, self._fell_short = 0, False

    def run(
        self,
        step: IterationRows,
        once: Callable[[IterationRows], tuple[Result, Sequence[ReplicaReport]]],
    ) -> Result:
        """Run an iteration within the limit, and again without one if too little was done.

        ``once`` runs it with its ``limit``; its update must not count if the iteration
        :meth:`~sparkdl.replica.iteration.IterationRows.falls_short`.
        """
        if step.decisions is not None or not self._fraction:
            return once(replace(step, limit=_recorded(step)))[0]
        limited = replace(step, limit=self._limit(step))
        result, reports = once(limited)
        finite = not any(report.not_finite for report in reports)
        if finite and limited.falls_short(report.passed for report in reports):
            if self._fell_short:  # twice in a row: all have become slower
                self._window.clear()
            self._fell_short = True
            result, reports = once(replace(step, limit=None))
        else:
            self._fell_short = False
        self._learn(step, reports)
        return result

    def _limit(self, step: IterationRows) -> Limit | None:
        """Return the limit; None while too little is known, and for a short batch at an epoch's end."""
        if len(self._window) < MEASURED or not self._is_full(step):
            return None
        may_miss = int(self._fraction * step.size)
        return Limit(seconds=statistics.median(self._window), may_miss=may_miss)

    def _learn(self, step: IterationRows, reports: Sequence[ReplicaReport]) -> None:
        if not self._is_full(step):
            return
        times = sorted(map(_whole_seconds, reports))
        within = math.ceil((1 - self._fraction) * len(times) - 1e-9)
        self._window.append(times[max(0, within - 1)])

    def _is_full(self, step: IterationRows) -> bool:
        self._largest = max(self._largest, step.size)
        return 2 * step.size > self._largest


def _whole_seconds(report: ReplicaReport) -> float:
    """Return the seconds that a replica took, or would have taken for all of its rows."""
    seconds, passed = report.seconds, report.passed
    more = passed.of / passed.parts - 1 if passed.parts else 0.0
    return sum(seconds.values()) + seconds_of_parts(seconds) * more


def share_problems(drop_stragglers: object, unit: str) -> Iterator[str]:
    """Yield the problem of an option ``drop_stragglers`` that is no share of the rows of a ``unit``."""
    given = drop_stragglers
    if given is None:
        return
    if not (is_number(given) and 0 < given <= 0.5):
        yield (
            f"drop_stragglers={shown(given)}: give the share of the rows that a {unit} may leave "
            "out, above 0 and at most 0.5, or None."
        )


def check_replicas(recorded: int, replicas: int) -> None:
    """Raise :class:`sparkdl.ParameterError` if a history has more replicas than the run."""
    if recorded > replicas:
        raise ParameterError(
            f"replay: the history has {recorded} replicas or more, and this run has {replicas}: "
            "train with the replicas= of the recorded run."
        )


def _recorded(step: IterationRows) -> Limit | None:
    """Return a limit that repeats what replicas did the first time; None if they did everything."""
    found = {
        int(name.removeprefix(prefix)): count
        for name, count in (step.decisions or {}).items()
        for prefix in (MICRO_BATCHES, INNER_STEPS)
        if name.startswith(prefix) and count
    }
    if not found:
        return None
    check_replicas(max(found) + 1, len(step.rows))
    unknown = [n for n, (start, stop) in enumerate(step.rows) if stop > start and n not in found]
    if unknown:
        raise ParameterError(
            f"replay: iteration {step.index + 1} of the history has no replica {unknown[0]}, and this "
            f"run has {len(step.rows)}: train with the replicas= of the recorded run."
        )
    return Limit(parts=tuple(found.get(replica, 0) for replica in range(len(step.rows))))

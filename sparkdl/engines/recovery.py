"""When the state is lost with its executors: restore it and repeat what was done since.

[Note: snapshots and replay] An iteration is a function of the state before it and of what the loop
asks for; so a run that is set back to an earlier state and asked for the same again comes to the same
bits. The points to go back to are the last snapshot (Spark keeps it on two executors), else the last
checkpoint, else the beginning. What the loop asked for since the beginning is remembered, some 30 to
60 bytes an iteration. The loop, its callbacks and the history see nothing of it: every iteration
is reported once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.epoch import EpochPlan
from sparkdl.engines.replay_log import ReplayLog
from sparkdl.errors import (
    CheckpointError,
    StalledError,
    StateLostError,
    TrainingError,
    UserError,
)
from sparkdl.loop.engine import (
    CURRENT,
    Engine,
    IterationResult,
    PendingStateWork,
    ReadResiduals,
    ReadState,
    StateWorkResult,
)
from sparkdl.replica.iteration import Iteration
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState

MAX_LOSSES = 16
"""How often the state may be lost before an iteration is done: then something is wrong for good."""
TRIES = 2
"""How often a point is tried that cannot be read: an executor may be lost meanwhile."""
SHARE = 0.05
"""Of the time, that snapshots may take."""

logger = logging.getLogger("sparkdl")
Result = TypeVar("Result")


class RestorableEngine(Engine, Protocol):
    """An engine whose state can be lost, and put back."""

    def take_snapshot(self) -> Any:
        """A copy of the state that outlives any one executor."""

    def drop(self, snapshot: Any) -> None:
        """It is not needed any more."""

    def forget(self) -> None:
        """What there is of the state is given up; ``start`` or ``restore`` comes next."""

    @property
    def capacity_note(self) -> str:
        """What else is to be said of how it goes on, if anything."""

    def restore(self, snapshot: Any) -> None:
        """Go on from it. Raises :class:`sparkdl.TrainingError` where it is lost too."""


@dataclass(frozen=True, eq=False)
class RestorePoint:
    """A state to go back to: ``done`` entries of the log lead to it. ``name`` for messages."""

    name: str
    done: int
    load: Callable[[], None]


class RecoveringEngine:
    """An engine that goes on when the state of ``engine`` is lost.

    ``seconds``: a snapshot is taken after an iteration that ends so long after the last one, if
    snapshots take no more than :data:`SHARE` of the time; 0: after every iteration; None: never.
    """

    def __init__(self, engine: RestorableEngine, seconds: float | None) -> None:
        self._engine, self._seconds = engine, seconds
        self.plan: EpochPlan = engine.plan
        self.recoveries = 0
        self._begun = -1  # the last iteration that the engine knows of, beyond those that are done
        self._log = ReplayLog()
        self._starts: list[Callable[[], None]] = []
        self._beginning = RestorePoint("the beginning", 0, self._start_again)
        self._checkpoint: RestorePoint | None = None
        self._snapshot: tuple[RestorePoint, Any] | None = None
        self._due = time.monotonic() + (seconds or 0.0)

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        """See :class:`sparkdl.loop.engine.Engine`; so for what follows."""
        if which == CURRENT:
            self._starts.clear()
        self._begin(lambda: self._engine.load(read, reported, which))

    def load_residuals(
        self, read: ReadResiduals, reported: tuple[type[Exception], ...] = ()
    ) -> None:
        self._begin(lambda: self._engine.load_residuals(read, reported))

    @property
    def begins_ahead(self) -> bool:
        return self._engine.begins_ahead

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """A snapshot that comes to be due while iterations follow one another is taken after these."""
        if self._is_due:
            then = [each for each in then if each.index <= self._begun]
        result = self.with_recovery(lambda: self._engine.run(iteration, then))
        self._begun = then[-1].index if then else -1
        self._log.append(iteration)
        if then or not self._is_due:
            return result
        cost = self.with_recovery(self._take_snapshot)
        return replace(result, seconds={**result.seconds, "snapshot": cost}, ended=None)

    @property
    def _is_due(self) -> bool:
        """Whether a snapshot is."""
        return self._seconds is not None and time.monotonic() >= self._due

    def score(self) -> list[Any]:
        return self.with_recovery(lambda: self._engine.score())

    def keep_best(self) -> None:
        self.with_recovery(self._engine.keep_best)
        self._log.append(None)

    def weights(self, which: str = CURRENT) -> torch.Tensor:
        return self.with_recovery(lambda: self._engine.weights(which))

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        return self.with_recovery(lambda: self._engine.map_slices(use, which))

    def map_residuals(self, use: Callable[[int, ByParameter], Any]) -> list[Any]:
        return self.with_recovery(lambda: self._engine.map_residuals(use))

    def later(self, begin: Callable[[Any], PendingStateWork]) -> PendingStateWork:
        """What ``begin`` begins with the engine."""
        return _Surely(self, self.with_recovery(lambda: begin(self._engine)))

    @property
    def done(self) -> int:
        """How much has been asked for so far."""
        return len(self._log)

    def checkpointed(self, done: int, iteration: int, load: Callable[[Engine], None]) -> None:
        """There is a checkpoint, which ``load`` reads, of the state when so much was :attr:`done`."""
        name = f"the checkpoint after iteration {iteration}"
        self._checkpoint = RestorePoint(name, done, lambda: load(self._engine))

    def _begin(self, start: Callable[[], None]) -> None:
        self.with_recovery(start)
        self._starts.append(start)

    def _take_snapshot(self) -> float:
        """Take one, instead of the one before; seconds. One that cannot be taken stops no training."""
        started = time.monotonic()
        before, snapshot = self._snapshot, None
        try:
            snapshot = self._engine.take_snapshot()
        except (StateLostError, StalledError):
            raise
        except TrainingError as error:
            logger.warning("no snapshot could be taken: %s", str(error).partition("\n")[0])
        cost = time.monotonic() - started
        assert self._seconds is not None
        self._due = time.monotonic() + (max(self._seconds, cost / SHARE) if self._seconds else 0.0)
        if snapshot is not None:
            taken = snapshot
            name = f"the snapshot after iteration {self._log.iterations}"
            point = RestorePoint(name, len(self._log), lambda: self._engine.restore(taken))
            self._snapshot = point, taken
            if before is not None:
                self._engine.drop(before[1])
        return cost

    def with_recovery(self, action: Callable[[], Result]) -> Result:
        """``action()``, again where the state was lost."""
        for _ in range(MAX_LOSSES):
            try:
                return action()
            except StateLostError as lost:
                self._recover(lost)
        return action()

    def _recover(self, lost: StateLostError) -> None:
        """Bring the state back to where it stood, and say so in one line."""
        started, tries = time.monotonic(), dict[RestorePoint, int]()
        for _ in range(MAX_LOSSES):
            point = self._latest()
            tries[point] = tries.get(point, 0) + 1
            try:
                self._engine.forget()
                point.load()
            except StalledError:  # so would every other point, after as long a wait
                raise
            except UserError as error:  # no other point would change it
                raise _beyond_recovery(lost, error) from None
            except (TrainingError, CheckpointError) as error:
                if tries[point] >= TRIES and point is not self._beginning:
                    self._give_up(point, error)
                elif tries[point] >= TRIES and not isinstance(error, StateLostError):
                    raise _beyond_recovery(lost, error) from None
                continue
            try:
                self._repeat(point.done)
            except StateLostError:  # again, while it was being brought back
                continue
            self.recoveries += 1
            self._due = time.monotonic()  # of the snapshot that it came from, a copy may be gone
            repeated = sum(asked is not None for asked in self._log.since(point.done))
            logger.warning(
                "%s. Went on from %s and repeated %d iteration%s: %.1f s.%s",
                str(lost).partition("\n")[0].rstrip("."),
                point.name,
                repeated,
                "" if repeated == 1 else "s",
                time.monotonic() - started,
                f" {self._engine.capacity_note}." if self._engine.capacity_note else "",
            )
            return
        raise _beyond_recovery(lost, lost)

    def _latest(self) -> RestorePoint:
        """The point that leaves least to be repeated."""
        points = [self._snapshot[0]] if self._snapshot else []
        points += [self._checkpoint] if self._checkpoint else []
        return max([*points, self._beginning], key=lambda point: point.done)

    def _give_up(self, point: RestorePoint, error: Exception) -> None:
        """The point is of no use."""
        reason = str(error).partition("\n")[0].rstrip(".")
        logger.warning("%s cannot be read (%s).", point.name.capitalize(), reason)
        if self._snapshot is not None and point is self._snapshot[0]:
            self._engine.drop(self._snapshot[1])
            self._snapshot = None
        else:
            self._checkpoint = None

    def _start_again(self) -> None:
        for start in self._starts:
            start()

    def _repeat(self, done: int) -> None:
        """What was asked for after the first ``done`` entries."""
        for asked in self._log.since(done):
            if asked is not None:
                self._engine.run(asked)
            else:
                self._engine.keep_best()


@dataclass(frozen=True)
class _Surely:
    """Work in the background that outlives losses of the state, if only as work that was lost."""

    engine: RecoveringEngine
    work: PendingStateWork

    @property
    def ready(self) -> bool:
        return self.work.ready

    def used(self) -> StateWorkResult | None:
        return self.engine.with_recovery(self.work.used)


def _beyond_recovery(lost: StateLostError, error: Exception) -> StateLostError:
    why = "" if error is lost else f" It could not be brought back: {error}"
    return StateLostError(
        f"{lost}{why}\nFit again, with resume= from a checkpoint, or from the initial weights."
    )

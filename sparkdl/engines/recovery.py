"""Recovery from losing the state together with its executors: restore it and repeat what followed.

[Note: snapshots and replay] An iteration is a function of the state before it, of the loop's
request, and of the decisions of the consistency model, which the log has. A run that is
reset to an earlier state and receives the same requests therefore reaches the same bits. It can be
reset to the last snapshot (Spark keeps it on two executors), otherwise to the last checkpoint,
otherwise to the beginning. The log holds all requests since the beginning, at some 50 to 100 bytes
per iteration. The loop, its callbacks and the history notice nothing: every iteration is reported
once.

A compact log of the loop's requests to an engine, from which they can be repeated.
"""

from __future__ import annotations

import logging
import pickle
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.data.epoch import EpochPlan
from sparkdl.errors import (
    CheckpointError,
    StalledError,
    StateLostError,
    TrainingError,
    UserError,
    counted,
)
from sparkdl.loop.advance import IterationResult
from sparkdl.loop.engine import (
    CURRENT,
    PendingStateWork,
    ReadResiduals,
    ReadState,
    Recovery,
    RestorableEngine,
    StateAccess,
    StateWorkResult,
)
from sparkdl.replica.iteration import Decisions, Iteration
from sparkdl.slices.spec import SliceSpec, SliceState

Hyperparameters: TypeAlias = tuple[Mapping[str, Any], ...] | None


class ReplayLog:
    """A log of iterations and of requests to keep the best weights.

    An entry takes some 50 bytes, and some 50 more where a schedule changes a hyperparameter. It
    includes what was decided on the iteration that was committed, so that what is repeated has the
    same bits.

    Attributes:
        iterations: The number of iterations done, including those before this run.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self._starts, self._pickles = array("q"), bytearray()  # of the entries, and of what follows
        self._last, self._place = b"", 0  # hyperparameters and names of decisions, which may repeat

    def __len__(self) -> int:
        return len(self._starts)

    def append(self, asked: Iteration | None, decisions: Decisions | None = None) -> None:
        """Append an iteration, or None for a request to keep the best weights."""
        entry = None
        if asked is not None:
            decided = {name: number for name, number in (decisions or {}).items() if number}
            last = pickle.dumps((asked.hyperparameters, *decided), 3)  # no frames, as of 4
            if last != self._last:
                self._last, self._place = last, len(self._pickles)
                self._pickles += last
            request = (asked.index, asked.epoch, asked.batch, asked.loss_scale, asked.histograms)
            entry = self._place, request, *decided.values()
            self.iterations = asked.index + 1
        self._starts.append(len(self._pickles))
        self._pickles += pickle.dumps(entry, 3)

    def since(self, start: int) -> Iterator[Iteration | None]:
        """Yield the entries from number ``start`` on, None for a request to keep the best weights."""
        for n in range(start, len(self)):
            entry = self._read(self._starts[n])
            if entry is None:
                yield None
                continue
            place, (index, epoch, batch, scale, histograms), *numbers = entry
            hyperparameters, *names = self._read(place)
            yield Iteration(
                index=index,
                epoch=epoch,
                batch=batch,
                hyperparameters=hyperparameters,
                description=f"sparkdl: epoch {epoch + 1} · iteration {index + 1} · again",
                loss_scale=scale,
                histograms=histograms,
                decisions=dict(zip(names, numbers, strict=True)),
            )

    def _read(self, place: int) -> Any:
        return pickle.loads(memoryview(self._pickles)[place:])


MAX_LOSSES = 16
"""The number of times the state may be lost within one request; more points to a permanent fault."""
TRIES = 2
"""The number of tries to read a restore point, because an executor may be lost during the first."""
SHARE = 0.05
"""The largest share of the time that snapshots may take."""

logger = logging.getLogger("sparkdl")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class RestorePoint:
    """A state that the engine can be reset to."""

    name: str
    done: int  # the number of log entries that lead to this state
    load: Callable[[], None]


class RecoveringEngine:
    """An engine that wraps another one and continues when that one loses its state.

    A snapshot follows the first iteration that ends ``seconds`` after the last one, as long as
    snapshots take no more than :data:`SHARE` of the time. 0: after every iteration; None: never.
    """

    def __init__(self, engine: RestorableEngine, seconds: float | None) -> None:
        self._engine, self._seconds = engine, seconds
        self.plan: EpochPlan = engine.plan
        self.recoveries: Sequence[Recovery] = []
        self._begun = -1  # the index of the last iteration that was announced ahead, or -1
        self._log = ReplayLog()
        self._starts: list[Callable[[], None]] = []
        self._beginning = RestorePoint("the beginning", 0, self._start_again)
        self._checkpoint: RestorePoint | None = None
        self._snapshot: tuple[RestorePoint, Any] | None = None
        self._due = time.monotonic() + (seconds or 0.0)

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        """Load the state; see :class:`sparkdl.loop.engine.StateAccess`, also for the methods below."""
        if which == CURRENT:
            self._starts.clear()
        self._begin(lambda: self._engine.load(read, which))

    def load_residuals(self, read: ReadResiduals) -> None:
        self._begin(lambda: self._engine.load_residuals(read))

    @property
    def begins_ahead(self) -> bool:
        return self._engine.begins_ahead

    def run(self, iteration: Iteration, then: Sequence[Iteration] = ()) -> IterationResult:
        """Run an iteration, then take a snapshot if one is due.

        A snapshot that falls due within a series of iterations begun ahead is taken after that
        series.
        """
        if self._is_due:
            then = [each for each in then if each.index <= self._begun]
        result = self.with_recovery(lambda: self._engine.run(iteration, then))
        self._begun = then[-1].index if then else -1
        self._log.append(iteration, result.decisions)
        if then or not self._is_due:
            return result
        cost = self.with_recovery(self._take_snapshot)
        return replace(result, seconds={**result.seconds, "snapshot": cost}, ended=None)

    @property
    def _is_due(self) -> bool:
        """Return whether a snapshot is due."""
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
        """Start background work with ``begin(engine)``, and return it with recovery from losses."""
        return _RecoveringWork(self, self.with_recovery(lambda: begin(self._engine)))

    @property
    def done(self) -> int:
        """Return the number of requests in the log so far."""
        return len(self._log)

    def checkpointed(self, done: int, iteration: int, load: Callable[[StateAccess], None]) -> None:
        """Note a checkpoint that recovery may go back to, taken at this value of :attr:`done`."""
        name = f"the checkpoint after iteration {iteration}"
        self._checkpoint = RestorePoint(name, done, lambda: load(self._engine))

    def _begin(self, start: Callable[[], None]) -> None:
        self.with_recovery(start)
        self._starts.append(start)

    def _take_snapshot(self) -> float:
        """Take a snapshot that replaces the last one, and return the seconds it took.

        A snapshot that cannot be taken is logged and does not stop training.
        """
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
        """Return ``action()``; recover and call it again whenever the state was lost."""
        losses = iter(range(MAX_LOSSES))
        while True:
            try:
                return action()
            except StateLostError as lost:
                self._recover(lost, losses)

    def _recover(self, lost: StateLostError, losses: Iterator[int]) -> None:
        """Restore the state to where it stood, and log one line about it."""
        started, tries = time.monotonic(), dict[RestorePoint, int]()
        for _ in losses:
            point = self._latest()
            tries[point] = tries.get(point, 0) + 1
            try:
                self._engine.forget()
                point.load()
            except StalledError:  # every other point would stall too, after an equally long wait
                raise
            except UserError as error:  # no other point would avoid it
                raise _beyond_recovery(lost, error) from None
            except (TrainingError, CheckpointError) as error:
                if tries[point] >= TRIES and point is not self._beginning:
                    self._give_up(point, error)
                elif tries[point] >= TRIES and not isinstance(error, StateLostError):
                    raise _beyond_recovery(lost, error) from None
                continue
            try:
                self._repeat(point.done)
            except StateLostError:  # lost again during the replay
                continue
            self._due = time.monotonic()  # one of the two copies of the snapshot may be lost
            repeated = sum(asked is not None for asked in self._log.since(point.done))
            took = time.monotonic() - started
            text = (
                f"{str(lost).partition(chr(10))[0].rstrip('.')}. Continued from {point.name} and "
                f"repeated {counted(repeated, 'iteration')}: {took:.1f} s."
            )
            if self._engine.capacity_note:
                text += f" {self._engine.capacity_note}."
            self.recoveries = [*self.recoveries, Recovery(text, took)]
            logger.warning("%s", text)
            return
        raise _beyond_recovery(lost, lost)

    def _latest(self) -> RestorePoint:
        """Return the restore point that leaves the fewest requests to repeat."""
        points = [self._snapshot[0]] if self._snapshot else []
        points += [self._checkpoint] if self._checkpoint else []
        return max([*points, self._beginning], key=lambda point: point.done)

    def _give_up(self, point: RestorePoint, error: Exception) -> None:
        """Discard a restore point that cannot be read."""
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
        """Repeat the requests after the first ``done`` log entries."""
        for asked in self._log.since(done):
            if asked is not None:
                self._engine.run(asked)
            else:
                self._engine.keep_best()


class _RecoveringWork(NamedTuple):
    """Background work that survives losses of the state, possibly only to report itself as lost."""

    engine: RecoveringEngine
    work: PendingStateWork

    @property
    def ready(self) -> bool:
        return self.work.ready

    def used(self) -> StateWorkResult | None:
        return self.engine.with_recovery(self.work.used)


def _beyond_recovery(lost: StateLostError, error: Exception) -> StateLostError:
    why = "" if error is lost else f" It could not be restored: {error}"
    return StateLostError(
        f"{lost}{why}\nFit again, with resume= from a checkpoint, or from the initial weights."
    )

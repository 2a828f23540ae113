"""Writing checkpoints during training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.checkpoint.config import Checkpoint
from sparkdl.checkpoint.manifest import OF_STATE, Best, Manifest, RunIdentity, SliceFile
from sparkdl.checkpoint.store import CheckpointStore, TryFolder, WriteResiduals, WriteSlice
from sparkdl.errors import CheckpointError, TrainingError
from sparkdl.loop.engine import (
    BEST,
    CURRENT,
    PendingStateWork,
    StateAccess,
    StateWork,
    StateWorkResult,
)
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.slices.slice_file import PackSlice, unpack

logger = logging.getLogger("sparkdl")
TAIL = 10_000
"""The number of iterations of the history that a checkpoint of an endless run contains."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint of ``state`` that is being written."""

    directory: str
    state: TrainState
    history: bytes
    committed: Callable[[str, Manifest], None] | None  # called when it is complete
    best: Best | None  # without its files
    work: PendingStateWork | None = None  # None: training waits


class Checkpointer:
    """The periodic task of the loop that writes a checkpoint when it is due."""

    hook = "on_checkpoint"

    def __init__(
        self,
        settings: Checkpoint,
        access: StateAccess,
        identity: RunIdentity,
        history: History,
        noting: Callable[[], Callable[[str, Manifest], None]] | None = None,
        background: Callable[[StateWork], PendingStateWork] | None = None,
        *,
        model: Mapping[str, Any],
        begun: TrainState,
        endless: bool = False,
    ) -> None:
        """Set up the writing of checkpoints; without ``background`` training waits for it.

        ``noting`` is called when a checkpoint begins, and what it returns when the checkpoint is
        complete. ``endless``: another pass follows, so the end of this one is not the end of the
        run.
        """
        self._access, self._identity = access, identity
        self.every, self._keep = settings.every, settings.keep
        self._history = history
        self._store = CheckpointStore(settings.path)
        self._noting, self._background = noting, background
        self._begun: OpenCheckpoint | None = None
        self._endless, self._model = endless, model
        own = begun.checkpoint is not None and self._store.holds(begun.checkpoint)
        self._last = begun.iteration if own else 0  # the iteration of the last checkpoint
        self._warned = False  # whether it was logged that older checkpoints stay

    def check(self) -> None:
        """Let every owner write where a checkpoint will be, so that a path that is not shared fails
        early.

        The folder is created by the driver, whose umask may close it to the user of the executors,
        even if its parent is open.
        """
        directory = self._store.begin(0)
        try:
            probes = self._access.map_slices(TryFolder(directory))
            self._store.check_probes(directory, probes)
        finally:
            self._store.discard(directory)

    def __call__(self, previous: TrainState, state: TrainState) -> TrainState:
        due, begun = self.every(previous, state), self._begun
        if begun is not None and (due or (begun.work is not None and begun.work.ready)):
            state = self._settled(begun, state, again=not due)
        if due and self._background is not None:
            with _explained(state):
                self._begun = self._begin(state)
        elif due:
            state = replace(state, checkpoint=self.written(state))
        return state

    def finish(self, state: TrainState) -> TrainState:
        """Complete a checkpoint in progress; otherwise write one of the last state if there is none
        yet."""
        if self._begun is not None:
            return self._settled(self._begun, state, again=True)
        ends = not self._endless or self._history.stopped is not None or state.batch is not None
        if ends and self._last != state.iteration:
            state = replace(state, checkpoint=self.written(state))
        return state

    def written(self, state: TrainState, here: bool = False) -> str:
        """Write a checkpoint while training waits, and return its URI.

        With ``here`` this process writes it, into a folder that only this process can access; it
        saves the model, and has no residuals.
        """
        with _explained(state):
            begun = self._opened(state)
            uses, residuals = self._uses(begun)
            if here:
                used = StateWorkResult(
                    tuple(self._written_here(use, which) for use, which in uses), []
                )
            else:
                states = tuple(self._access.map_slices(use, which) for use, which in uses)
                used = StateWorkResult(states, self._access.map_residuals(residuals))
            return self._complete(begun, used)

    def _written_here(self, use: WriteSlice, which: str) -> list[SliceFile]:
        packed = self._access.map_slices(PackSlice(), which)
        return [use.packed(n, unpack(data), data) for n, data in enumerate(packed)]

    def _settled(self, begun: OpenCheckpoint, state: TrainState, again: bool) -> TrainState:
        """Complete ``begun``. If its content was lost with its ranks, write one of ``state``
        instead, if ``again``."""
        assert begun.work is not None
        self._begun = None
        with _explained(begun.state):
            used = begun.work.used()
            if used is not None:
                return replace(state, checkpoint=self._complete(begun, used))
        return replace(state, checkpoint=self.written(state)) if again else state

    def _begin(self, state: TrainState) -> OpenCheckpoint:
        """Begin to write a checkpoint while training continues."""
        assert self._background is not None
        begun = self._opened(state)
        return replace(begun, work=self._background(StateWork(*self._uses(begun))))

    def _opened(self, state: TrainState) -> OpenCheckpoint:
        metric, best = self._identity.metric, None
        if metric is not None and (of := state.best) is not None:
            value = of.metrics[metric]
            best = Best(iteration=of.iteration, epoch=of.epoch, metric=metric, value=value)
        history = self._history.tail(TAIL) if self._endless else self._history
        committed = self._noting() if self._noting is not None else None
        directory = self._store.begin(state.iteration)
        return OpenCheckpoint(directory, state, history.to_bytes(), committed, best)

    def _uses(
        self, begun: OpenCheckpoint
    ) -> tuple[tuple[tuple[WriteSlice, str], ...], WriteResiduals]:
        """Return the functions with which owners and replicas write."""
        states: list[tuple[WriteSlice, str]] = [(WriteSlice(begun.directory, "slice"), CURRENT)]
        if begun.best is not None:
            states.append((WriteSlice(begun.directory, "best"), BEST))
        return tuple(states), WriteResiduals(begun.directory)

    def _complete(self, begun: OpenCheckpoint, used: StateWorkResult) -> str:
        """Commit the checkpoint, prune older ones, and return its URI."""
        manifest = self._manifest(begun, used)
        self._store.commit(begun.directory, manifest, begun.history)
        if begun.committed is not None:
            begun.committed(begun.directory, manifest)
        self._last = begun.state.iteration
        self._prune()
        return begun.directory

    def _prune(self) -> None:
        """Delete older checkpoints. If that fails the new one is complete all the same, and the run
        continues."""
        try:
            self._store.prune(self._keep)
        except CheckpointError as error:
            if not self._warned:
                logger.warning(
                    "older checkpoints in %s cannot be deleted and are kept: %s", self._store, error
                )
            self._warned = True

    def _manifest(self, begun: OpenCheckpoint, used: StateWorkResult) -> Manifest:
        state, run, best = begun.state, self._identity, begun.best
        files: list[SliceFile] = used.states[0]
        return Manifest(
            **{name: getattr(state, name) for name in OF_STATE},
            **run.constants,
            slices=len(files),
            layout=run.model,
            data=run.data,
            optimizers=run.optimizers,
            frozen=run.frozen,
            files=tuple(sorted(files, key=lambda file: file.index)),
            residuals=tuple(used.residuals),
            validations=tuple(replace(v, arrays={}) for v in state.validations),
            best=None if best is None else replace(best, files=tuple(used.states[1])),
            config=dict(run.config),
            model=self._model,
            extra={
                "loss_scale_age": state.loss_scale_age,
                "scales_loss": run.options.scales_loss,
                "higher_is_better": dict(state.higher_is_better),
                "compression": run.compression,
                **({"plan": plan} if (plan := self._history.plan_record) else {}),
                **({} if state.batch is None else {"batch": state.batch}),
            },
        )


@contextlib.contextmanager
def _explained(state: TrainState) -> Iterator[None]:
    """Convert failures in writing the checkpoint of ``state`` to :class:`sparkdl.CheckpointError`."""
    try:
        yield
    except (CheckpointError, TrainingError) as error:
        raise CheckpointError(
            f"after iteration {state.iteration} no checkpoint could be written: {error}"
        ) from None

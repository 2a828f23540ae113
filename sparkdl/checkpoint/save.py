"""Checkpoints inside training: writing them from the loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.checkpoint.config import Checkpoint
from sparkdl.checkpoint.identity import DataIdentity, ModelIdentity
from sparkdl.checkpoint.manifest import Best, Manifest, SliceFile
from sparkdl.checkpoint.slice_io import WriteResiduals, try_probe, write_packed, write_slice
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.errors import CheckpointError, TrainingError
from sparkdl.loop.engine import BEST, CURRENT, Engine, PendingStateWork, StateWork, StateWorkResult
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.model.options import TrainingOptions
from sparkdl.slices.slice_file import PackSlice
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState

logger = logging.getLogger("sparkdl")
TAIL = 10_000
"""Of so many iterations a checkpoint of an endless run holds the history."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Describe a run as its checkpoints do.

    Attributes:
        model: Names, shapes and dtypes of the model's tensors.
        data: Rows and checksums of the training partitions.
        constants: What divides the rows into batches: replicas, batch_size, local_steps, seed.
        optimizers: Class names of the optimizers.
        options: How gradients are made and applied.
        frozen: Digest of the parameters that are not trained.
        metric: Name of the metric by which the best weights are kept; None where they are not.
        compression: The hook that compresses gradients, in words.
        config: The trainer's fields as text, for people who read a manifest.
    """

    model: ModelIdentity
    data: DataIdentity
    constants: Mapping[str, Any]
    optimizers: tuple[str, ...]
    options: TrainingOptions
    frozen: str = ""
    metric: str | None = None
    compression: str = "None"
    config: Mapping[str, str] = field(default_factory=dict)

    def batches_as_in(self, manifest: Manifest) -> bool:
        """Whether an epoch's batches are of the same numbers of rows as in a checkpoint."""
        constants = all(getattr(manifest, name) == own for name, own in self.constants.items())
        return constants and self.data.rows == manifest.data.rows


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint of ``state``, under way: what will be in it beside the files."""

    directory: str
    state: TrainState
    history: bytes
    committed: Callable[[str, Manifest], None] | None
    best: bool
    work: PendingStateWork | None = None


class Checkpointer:
    """The loop's stage: write a checkpoint where it is due."""

    hook = "on_checkpoint"

    def __init__(
        self,
        settings: Checkpoint,
        engine: Engine,
        identity: RunIdentity,
        history: History,
        noting: Callable[[], Callable[[str, Manifest], None]] | None = None,
        background: Callable[[StateWork], PendingStateWork] | None = None,
        *,
        told: Mapping[str, Any],
        begun: TrainState,
        endless: bool = False,
    ) -> None:
        """``noting`` is called when a checkpoint begins; what it gives is told the URI and the manifest
        when it is complete. ``background``: writes while training goes on. ``told``: what a
        manifest tells of the model. ``begun``: where the run goes
        on. ``endless``: another pass will follow, so that the end of this one is not the run's, and the
        history has no end that is known."""
        self._engine, self._identity = engine, identity
        self.every, self._keep = settings.every, settings.keep
        self._history = history
        self._store = CheckpointStore(settings.path)
        self._noting, self._background = noting, background
        self._begun: OpenCheckpoint | None = None
        self._endless, self._model = endless, told
        own = begun.checkpoint is not None and self._store.holds(begun.checkpoint)
        self._last = begun.iteration if own else 0  # the iteration of the last one
        self._told = False  # that older ones stay

    def check(self) -> None:
        """Let every owner write where a checkpoint will be: a path that they do not share fails here.

        It is a folder of the driver's, whose umask may close it to the user of the executors, however
        open the one that it is in. Raises :class:`sparkdl.CheckpointError`.
        """
        directory = self._store.begin(0)
        try:
            probes = self._engine.map_slices(TryFolder(directory))
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
        """Complete the one that is under way; leave one of the end, where there is none yet."""
        if self._begun is not None:
            return self._settled(self._begun, state, again=True)
        ends = not self._endless or self._history.stopped is not None
        if ends and self._last != state.iteration:
            state = replace(state, checkpoint=self.written(state))
        return state

    def written(self, state: TrainState, here: bool = False) -> str:
        """Write one, while training waits; its URI. ``here``: by this process, in a folder that only it
        has; it is for the model's sake, and has nothing of what replicas keep."""
        with _explained(state):
            begun = self._opened(state)
            uses, residuals = self._uses(begun)
            if here:
                used = StateWorkResult(
                    tuple(self._written_here(use, which) for use, which in uses), []
                )
            else:
                states = tuple(self._engine.map_slices(use, which) for use, which in uses)
                used = StateWorkResult(states, self._engine.map_residuals(residuals))
            return self._complete(begun, used)

    def _written_here(self, use: WriteSlice, which: str) -> list[SliceFile]:
        bounds = self._engine.map_slices(_bounds, which)
        packed = self._engine.map_slices(PackSlice(), which)
        return [
            write_packed(use.directory, n, own, data, use.kind)
            for n, (own, data) in enumerate(zip(bounds, packed, strict=True))
        ]

    def _settled(self, begun: OpenCheckpoint, state: TrainState, again: bool) -> TrainState:
        """Complete ``begun``. Where it is lost with its ranks, write one of ``state`` instead, if
        ``again``."""
        assert begun.work is not None
        self._begun = None
        with _explained(begun.state):
            used = begun.work.used()
            if used is not None:
                return replace(state, checkpoint=self._complete(begun, used))
        return replace(state, checkpoint=self.written(state)) if again else state

    def _begin(self, state: TrainState) -> OpenCheckpoint:
        """Begin to write one, while training goes on."""
        assert self._background is not None
        begun = self._opened(state)
        return replace(begun, work=self._background(StateWork(*self._uses(begun))))

    def _opened(self, state: TrainState) -> OpenCheckpoint:
        return OpenCheckpoint(
            self._store.begin(state.iteration),
            state,
            (self._history.tail(TAIL) if self._endless else self._history).to_bytes(),
            self._noting() if self._noting is not None else None,
            state.best is not None and self._identity.metric is not None,
        )

    def _uses(
        self, begun: OpenCheckpoint
    ) -> tuple[tuple[tuple[WriteSlice, str], ...], WriteResiduals]:
        """What owners and replicas write."""
        states: list[tuple[WriteSlice, str]] = [(WriteSlice(begun.directory, "slice"), CURRENT)]
        if begun.best:
            states.append((WriteSlice(begun.directory, "best"), BEST))
        return tuple(states), WriteResiduals(begun.directory)

    def _complete(self, begun: OpenCheckpoint, used: StateWorkResult) -> str:
        """Commit it and prune; its URI."""
        manifest = self._manifest(begun, used)
        self._store.commit(begun.directory, manifest, begun.history)
        if begun.committed is not None:
            begun.committed(begun.directory, manifest)
        self._last = begun.state.iteration
        self._prune()
        return begun.directory

    def _prune(self) -> None:
        """Where that fails the checkpoint is whole all the same: the run goes on."""
        try:
            self._store.prune(self._keep)
        except CheckpointError as error:
            if not self._told:
                logger.warning(
                    "older checkpoints in %s cannot be deleted, and stay: %s", self._store, error
                )
            self._told = True

    def _best(self, begun: OpenCheckpoint, used: StateWorkResult) -> Best | None:
        metric, best = self._identity.metric, begun.state.best
        if not begun.best or metric is None or best is None:
            return None
        return Best(
            iteration=best.iteration,
            epoch=best.epoch,
            metric=metric,
            value=best.metrics[metric],
            files=tuple(used.states[1]),
        )

    def _manifest(self, begun: OpenCheckpoint, used: StateWorkResult) -> Manifest:
        state, own = begun.state, self._identity.constants
        files: list[SliceFile] = used.states[0]
        return Manifest(
            iteration=state.iteration,
            epoch=state.epoch,
            position=state.position,
            samples=state.samples,
            seconds=state.seconds,
            replicas=own["replicas"],
            slices=len(files),
            batch_size=own["batch_size"],
            local_steps=own["local_steps"],
            seed=own["seed"],
            layout=self._identity.model,
            data=self._identity.data,
            optimizers=self._identity.optimizers,
            frozen=self._identity.frozen,
            files=tuple(sorted(files, key=lambda file: file.index)),
            residuals=tuple(used.residuals),
            loss_scale=state.loss_scale,
            skipped=state.skipped,
            validations=state.validations,
            best=self._best(begun, used),
            config=dict(self._identity.config),
            model=self._model,
            extra={
                "loss_scale_age": state.loss_scale_age,
                "scales_loss": self._identity.options.scales_loss,
                "higher_is_better": dict(state.higher_is_better),
                "compression": self._identity.compression,
            },
        )


@contextlib.contextmanager
def _explained(state: TrainState) -> Iterator[None]:
    """What fails in writing the checkpoint of ``state`` is a :class:`sparkdl.CheckpointError`."""
    try:
        yield
    except (CheckpointError, TrainingError) as error:
        raise CheckpointError(
            f"after iteration {state.iteration} no checkpoint could be written: {error}"
        ) from None


@dataclass(frozen=True)
class TryFolder:
    """Run on the owner: see whether it can write into the folder of a checkpoint."""

    directory: str

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> str | CheckpointError:
        return try_probe(self.directory)


def _bounds(index: int, plan: SliceSpec, state: SliceState) -> tuple[int, int]:
    """Run on the owner: which elements of the flat vector are its slice."""
    return plan.start, plan.stop


@dataclass(frozen=True)
class WriteSlice:
    """Run on the owner: write its slice into the checkpoint."""

    directory: str
    kind: str

    def __call__(self, index: int, plan: SliceSpec, state: SliceState) -> SliceFile:
        return write_slice(self.directory, index, plan, state, self.kind)

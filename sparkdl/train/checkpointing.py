"""Checkpoints inside training: writing them from the loop, and going on from one."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.data.handle import SampleHandle
from sparkdl.errors import CheckpointError, DamagedCheckpoint, ParameterError
from sparkdl.replica.flat import Layout
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.state import SliceState
from sparkdl.train.checkpoint import Checkpoint
from sparkdl.train.checkpoint.config import describe_trainer
from sparkdl.train.checkpoint.identity import DataIdentity, ModelIdentity
from sparkdl.train.checkpoint.manifest import Best, Manifest, SliceFile
from sparkdl.train.checkpoint.store import CheckpointStore
from sparkdl.train.checkpoint.tasks import read_slice_files, write_slice
from sparkdl.train.engine import BEST, Engine
from sparkdl.train.history import History
from sparkdl.train.state import TrainState
from sparkdl.train.validation import best_of

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer

LATEST = "latest"
logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Identity:
    """What a run is of: the model's layout, the training data, and the constants of its batches."""

    model: ModelIdentity
    data: DataIdentity
    constants: Mapping[str, Any]
    optimizers: tuple[str, ...]

    @staticmethod
    def of(
        trainer: Trainer,
        layout: Layout,
        handles: Sequence[SampleHandle],
        optimizers: Sequence[str],
    ) -> Identity:
        constants = {
            "replicas": len(handles),
            "batch_size": trainer.batch_size,
            "local_steps": trainer.local_steps,
            "seed": trainer.seed,
        }
        return Identity(
            ModelIdentity.of(layout), DataIdentity.of(handles), constants, tuple(optimizers)
        )


class Checkpointer:
    """The loop's stage: write a checkpoint where it is due."""

    hook = "on_checkpoint"

    def __init__(
        self, trainer: Trainer, engine: Engine, identity: Identity, history: History
    ) -> None:
        assert trainer.checkpoint is not None
        self._trainer, self._engine, self._identity = trainer, engine, identity
        self._settings: Checkpoint = trainer.checkpoint
        self._history = history
        self._store = CheckpointStore(trainer.checkpoint.path)
        self._config = describe_trainer(trainer)

    def __call__(self, previous: TrainState, state: TrainState) -> TrainState:
        if not self._settings.every(previous, state):
            return state
        directory = self._store.begin(state.iteration)
        files = self._engine.with_states(WriteSlice(directory, "slice"))
        manifest = self._manifest(state, files, self._best(directory, state))
        self._store.commit(directory, manifest, self._history.to_json_bytes())
        self._store.prune(self._settings.keep)
        return replace(state, checkpoint=directory)

    def _best(self, directory: str, state: TrainState) -> Best | None:
        validation = self._trainer.validation
        if validation is None or validation.best is None:
            return None
        best = best_of(state, validation.best)
        if best is None:
            return None
        return Best(
            iteration=best.iteration,
            epoch=best.epoch,
            metric=validation.best,
            value=best.metrics[validation.best],
            files=tuple(self._engine.with_states(WriteSlice(directory, "best"), BEST)),
        )

    def _manifest(self, state: TrainState, files: Sequence[SliceFile], best: Any) -> Manifest:
        own = self._identity.constants
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
            files=tuple(sorted(files, key=lambda file: file.index)),
            loss_scale=state.loss_scale,
            skipped=state.skipped,
            validations=state.validations,
            best=best,
            config=self._config,
            extra={
                "loss_scale_age": state.loss_scale_age,
                "higher_is_better": dict(state.higher_is_better),
                "iterations_per_epoch": state.iterations_per_epoch,
            },
        )


@dataclass(frozen=True)
class WriteSlice:
    """Run on the owner: write its slice into the checkpoint."""

    directory: str
    kind: str

    def __call__(self, index: int, plan: SlicePlan, state: SliceState) -> SliceFile:
        return write_slice(self.directory, index, plan, state, self.kind)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was chosen: where it is, what it says, and its history."""

    uri: str
    manifest: Manifest
    history: History

    @property
    def state(self) -> TrainState:
        """Where its run stood."""
        manifest = self.manifest
        records = list(self.history)
        last = records[-1] if records else {}
        return TrainState(
            iteration=manifest.iteration,
            epoch=manifest.epoch,
            position=manifest.position,
            samples=manifest.samples,
            seconds=manifest.seconds,
            loss=last.get("loss", float("nan")),
            loss_scale=manifest.loss_scale,
            loss_scale_age=int(manifest.extra.get("loss_scale_age", 0)),
            skipped=manifest.skipped,
            validations=manifest.validations,
            higher_is_better=dict(manifest.extra.get("higher_is_better", {})),
            iterations_per_epoch=int(manifest.extra.get("iterations_per_epoch", 0)),
            checkpoint=self.uri,
        )

    def load(self, engine: Engine) -> None:
        """Read the state into the engine. Raises :class:`sparkdl.DamagedCheckpoint`."""
        engine.start(self._reader(self.manifest.files), (DamagedCheckpoint,))
        if self.manifest.best is not None and self.manifest.best.files:
            engine.start(self._reader(self.manifest.best.files), (DamagedCheckpoint,), BEST)

    def _reader(self, files: Sequence[SliceFile]) -> Any:
        return functools.partial(_read, self.uri, tuple(files))


def _read(uri: str, files: tuple[SliceFile, ...], plan: SlicePlan, dtype: Any) -> SliceState:
    return read_slice_files(uri, files, plan, dtype)


class Resuming:
    """The checkpoints that a run may go on from, the newest first.

    ``latest``: there need not be one. Raises :class:`sparkdl.ParameterError` for "latest" without a
    ``checkpoint``.
    """

    def __init__(self, trainer: Trainer, resume: str | os.PathLike[str]) -> None:
        self.latest = resume == LATEST
        if self.latest and trainer.checkpoint is None:
            raise ParameterError(
                'resume="latest" means the latest of checkpoint=sparkdl.Checkpoint(path), which the '
                "trainer does not have. Give it, or the path of a checkpoint."
            )
        path = trainer.checkpoint.path if self.latest and trainer.checkpoint else resume
        self._store = CheckpointStore(path) if self.latest else CheckpointStore.open(path)
        self._found = list(self._store.candidates())

    @property
    def replicas(self) -> int | None:
        """M of the newest."""
        return self._found[0][1].replicas if self._found else None

    def restore(self, engine: Engine, identity: Identity | None) -> Restored | None:
        """Load the newest that is whole into ``engine``; None where there is none and need not be.

        ``identity``: of the run that goes on, None where only the state is wanted. Raises
        :class:`sparkdl.CheckpointError` for a checkpoint of another model or other data, or where
        none is whole.
        """
        for uri, manifest in self._found:
            if identity is not None:
                differences = manifest.differences(
                    identity.model, identity.data, identity.constants
                )
                if differences:
                    raise CheckpointError(
                        f"the checkpoint {uri} is of another run: {'; '.join(differences)}. Give "
                        "what it was made with, or fit without resume= (in another folder)."
                    )
            try:
                history = History.from_json_bytes(self._store.read_history(uri, manifest))
                restored = Restored(uri, manifest, history)
                restored.load(engine)
            except DamagedCheckpoint as error:
                self._store.skip(uri, str(error))
                continue
            self._tell()
            return restored
        self._tell()
        if self.latest and not self._store.skipped:
            return None
        raise self._store.none_usable()

    def _tell(self) -> None:
        for skipped in self._store.skipped:
            logger.warning("checkpoint %s is skipped: %s", skipped.uri, skipped.reason)

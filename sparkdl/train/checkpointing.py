"""Checkpoints inside training: writing them from the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.data.handle import SampleHandle
from sparkdl.errors import CheckpointError, TrainingError
from sparkdl.replica.flat import Layout
from sparkdl.sync.plan import SlicePlan
from sparkdl.sync.state import SliceState
from sparkdl.train.checkpoint import Checkpoint
from sparkdl.train.checkpoint.config import describe, describe_trainer
from sparkdl.train.checkpoint.files import Folder
from sparkdl.train.checkpoint.identity import DataIdentity, ModelIdentity
from sparkdl.train.checkpoint.manifest import Best, Manifest, ReplicaFile, SliceFile
from sparkdl.train.checkpoint.residuals import WriteResiduals
from sparkdl.train.checkpoint.store import CheckpointStore
from sparkdl.train.checkpoint.tasks import try_probe, write_slice
from sparkdl.train.engine import BEST, Engine
from sparkdl.train.history import History
from sparkdl.train.state import TrainState

if TYPE_CHECKING:
    from sparkdl.train.trainer import Trainer


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
        self,
        trainer: Trainer,
        engine: Engine,
        identity: Identity,
        history: History,
        committed: Callable[[str, Manifest], None] | None = None,
    ) -> None:
        """``committed`` is told the URI and the manifest of each checkpoint."""
        assert trainer.checkpoint is not None
        self._trainer, self._engine, self._identity = trainer, engine, identity
        self._settings: Checkpoint = trainer.checkpoint
        self._history = history
        self._store = CheckpointStore(trainer.checkpoint.path)
        self._config = describe_trainer(trainer)
        self._committed = committed

    def check(self) -> None:
        """Let every owner write into the folder: a path that they do not share fails here.

        Raises :class:`sparkdl.CheckpointError`.
        """
        self._store.check_probes(self._engine.with_states(TryFolder(str(self._settings.path))))

    def __call__(self, previous: TrainState, state: TrainState) -> TrainState:
        if not self._settings.every(previous, state):
            return state
        try:
            return replace(state, checkpoint=self._write(state))
        except (CheckpointError, TrainingError) as error:
            raise CheckpointError(
                f"after iteration {state.iteration} no checkpoint could be written: {error}"
            ) from None

    def _write(self, state: TrainState) -> str:
        """Write a checkpoint and prune; its URI."""
        directory = self._store.begin(state.iteration)
        files = self._engine.with_states(WriteSlice(directory, "slice"))
        residuals = self._engine.with_residuals(WriteResiduals(directory))
        manifest = self._manifest(state, files, residuals, self._best(directory, state))
        self._store.commit(directory, manifest, self._history.to_json_bytes())
        if self._committed is not None:
            self._committed(directory, manifest)
        self._store.prune(self._settings.keep)
        return directory

    def _best(self, directory: str, state: TrainState) -> Best | None:
        validation, best = self._trainer.validation, state.best
        if best is None or validation is None or validation.best is None:
            return None
        return Best(
            iteration=best.iteration,
            epoch=best.epoch,
            metric=validation.best,
            value=best.metrics[validation.best],
            files=tuple(self._engine.with_states(WriteSlice(directory, "best"), BEST)),
        )

    def _manifest(
        self,
        state: TrainState,
        files: Sequence[SliceFile],
        residuals: Sequence[ReplicaFile],
        best: Any,
    ) -> Manifest:
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
            residuals=tuple(residuals),
            loss_scale=state.loss_scale,
            skipped=state.skipped,
            validations=state.validations,
            best=best,
            config=self._config,
            extra={
                "loss_scale_age": state.loss_scale_age,
                "scales_loss": self._trainer.policy.scales_loss,
                "higher_is_better": dict(state.higher_is_better),
                "compression": describe(self._trainer.compression),
            },
        )


@dataclass(frozen=True)
class TryFolder:
    """Run on the owner: see whether it can write into the folder of the checkpoints."""

    path: str

    def __call__(self, index: int, plan: SlicePlan, state: SliceState) -> str | CheckpointError:
        return try_probe(Folder.of(self.path).uri)


@dataclass(frozen=True)
class WriteSlice:
    """Run on the owner: write its slice into the checkpoint."""

    directory: str
    kind: str

    def __call__(self, index: int, plan: SlicePlan, state: SliceState) -> SliceFile:
        return write_slice(self.directory, index, plan, state, self.kind)

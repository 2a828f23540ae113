"""Continuing from a checkpoint: choose one, check that it belongs to the run, and load its state."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.checkpoint.config import Checkpoint
from sparkdl.checkpoint.files import Folder
from sparkdl.checkpoint.manifest import OF_STATE, Manifest, RunIdentity, SliceFile, first_few
from sparkdl.checkpoint.store import CheckpointStore, ReadResiduals, read_slice_files
from sparkdl.errors import DamagedCheckpoint, ParameterError
from sparkdl.loop.advance import first_state
from sparkdl.loop.engine import BEST, StateAccess
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated
from sparkdl.slices.slice_file import WithoutAverage

LATEST = "latest"
_ANY_DATA = " To continue with this data anyway, pass any_data=True."
logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class RestoredRun:
    """A chosen checkpoint with its manifest and its history, of which ``run`` goes on."""

    run: RunIdentity
    uri: str
    manifest: Manifest
    history: History
    anew: bool = False  # a pass begins, and its replicas start without residuals

    @property
    def midway(self) -> bool:
        """Return whether the batches of an epoch have the same numbers of rows as in the checkpoint."""
        constants = self.run.constants.items()
        same = all(getattr(self.manifest, name) == own for name, own in constants)
        return same and self.run.data.rows == self.manifest.data.rows

    @property
    def state(self) -> TrainState:
        """Return the state of the run in the checkpoint."""
        manifest, options = self.manifest, self.run.options
        records = self.history.last(1)
        last = records[-1] if records else {}
        state = TrainState(
            **{name: getattr(manifest, name) for name in OF_STATE},
            loss=last.get("loss", math.nan),
            gradient_norm=last.get("gradient_norm"),
            loss_scale_age=int(manifest.extra.get("loss_scale_age", 0)),
            validations=manifest.validations,
            best=self.best,
            higher_is_better=dict(manifest.extra.get("higher_is_better", {})),
            checkpoint=self.uri,
            batch=manifest.extra.get("batch"),
        )
        if options.scales_loss == manifest.extra.get("scales_loss", state.loss_scale != 1.0):
            return state
        first = first_state(options)  # another precision than the checkpoint's
        return replace(state, loss_scale=first.loss_scale, loss_scale_age=first.loss_scale_age)

    @property
    def best(self) -> Validated | None:
        """Return the validation whose weights are in the checkpoint, if they are the best by the
        run's metric."""
        best = self.manifest.best
        if best is None or not best.files or best.metric != self.run.metric:
            return None
        validations = reversed(self.manifest.validations)
        return next((v for v in validations if v.iteration == best.iteration), None)

    def load(self, access: StateAccess) -> None:
        """Load the checkpoint into the state; raise DamagedCheckpoint if a file is damaged."""
        access.load(self._reader(self.manifest.files))
        if self.best is not None and self.manifest.best is not None:
            access.load(self._reader(self.manifest.best.files), BEST)
        if not self.anew:
            self._load_residuals(access)

    def _load_residuals(self, access: StateAccess) -> None:
        """Load the residuals of the replicas, of use only to the same hook on the same rows."""
        before = self.manifest.extra.get("compression", "None")
        same_rows = self.midway and self.run.data == self.manifest.data
        if same_rows and before == self.run.compression:
            access.load_residuals(ReadResiduals(self.uri, self.manifest.residuals))
        elif same_rows or self.manifest.residuals:
            why = "its rows, or their division among replicas, are others here"
            if before != self.run.compression:
                why = f"compression is {self.run.compression} and was {before}"
            logger.warning(
                "%s in the checkpoint %s: what its replicas held (parts of gradients that were not "
                "sent yet, or states and weights of their own) is lost",
                why,
                Folder(self.uri),
            )

    def _reader(self, files: Sequence[SliceFile]) -> Any:
        read = functools.partial(read_slice_files, self.uri, files)
        return WithoutAverage(read) if self.run.options.ema is None else read


def history_in(checkpoint: str) -> History:
    """Return the history of a checkpoint whose name is that in :attr:`TrainState.checkpoint`."""
    store = CheckpointStore.open(checkpoint)
    uri, manifest = next(store.candidates())
    return History.from_bytes(store.read_history(uri, manifest))


class ResumeCandidates:
    """The checkpoints from which a run may continue, the newest first.

    ``resume`` is "latest", for the run's own checkpoints, or the path of a checkpoint or of a
    folder of them. ``any_data``: only the state is wanted, whatever data it was trained on. In
    ``passes`` over a stream a run goes on within ``batch`` alone, and else begins with new rows.
    """

    def __init__(
        self,
        settings: Checkpoint | None,
        resume: str | os.PathLike[str],
        any_data: bool = False,
        passes: bool = False,
        batch: int | None = None,
    ) -> None:
        self._latest = resume == LATEST
        if self._latest and settings is None:
            raise ParameterError(
                'resume="latest" means the latest checkpoint in '
                "Trainer(checkpoint=sparkdl.Checkpoint(path)), which this trainer does not have. "
                "Set checkpoint=, or pass the path of a checkpoint."
            )
        path = settings.path if self._latest and settings else resume
        self._store = CheckpointStore(path) if self._latest else CheckpointStore.open(path)
        self._found = list(self._store.candidates())
        self._any_data, self._passes, self._batch = any_data, passes, batch

    @property
    def replicas(self) -> int | None:
        """Return M of the newest checkpoint, or None if there is none."""
        return self._found[0][1].replicas if self._found else None

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """Return the plan in the newest checkpoint, if its run had one."""
        plan = self._found[0][1].extra.get("plan") if self._found else None
        return plan if isinstance(plan, Mapping) else None

    def restore(self, access: StateAccess, identity: RunIdentity) -> RestoredRun | None:
        """Load the newest undamaged checkpoint into ``access``.

        Return None for "latest" if no checkpoint has been completed yet.
        """
        for uri, manifest in self._found:
            self._check(uri, manifest, identity)
            try:
                restored = self._restored(uri, manifest, identity)
                restored.load(access)
            except DamagedCheckpoint as error:
                self._store.skip(uri, str(error))
                continue
            self._tell()
            return restored
        self._tell()
        if self._latest and all(skipped.incomplete for skipped in self._store.skipped):
            return None
        raise self._store.none_usable()

    def _restored(self, uri: str, manifest: Manifest, identity: RunIdentity) -> RestoredRun:
        """Return the run that the manifest and the history describe; raise DamagedCheckpoint if
        they make no sense."""
        data = self._store.read_history(uri, manifest)
        try:
            history = History.from_bytes(data)
            under_way = self._batch is not None and manifest.extra.get("batch") == self._batch
            found = RestoredRun(identity, uri, manifest, history, self._passes and not under_way)
            _ = found.state
        except (ValueError, TypeError, OverflowError) as error:
            raise DamagedCheckpoint(f"it does not describe the state of a run: {error}") from error
        return found

    def _check(self, uri: str, manifest: Manifest, identity: RunIdentity) -> None:
        """Raise ParameterError for a checkpoint of another run."""
        of_model = first_few(identity.model.differences(manifest.layout))
        optimizers = [*_other_optimizers(identity.optimizers, manifest.optimizers)]
        trains = not of_model and not optimizers and manifest.frozen in ("", identity.frozen)
        if not self._any_data:
            of_model = manifest.differences(identity.model, identity.data, identity.constants)
        differences = of_model + optimizers
        if manifest.frozen and not differences and identity.frozen != manifest.frozen:
            differences.append(
                "the parameters that are frozen hold other values here, and a checkpoint contains "
                "only trained parameters: start with the same values, for example "
                "weights=start.module.state_dict() if the run began with fit(start=start)"
            )
        if differences:
            raise ParameterError(
                f"the checkpoint {Folder(uri)} belongs to another run: {'; '.join(differences)}. "
                "Use what it was made with, or fit without resume= (in another folder)."
                + (_ANY_DATA if trains else "")
            )

    def _tell(self) -> None:
        for skipped in self._store.skipped:
            logger.warning("checkpoint %s is skipped: %s", skipped.uri, skipped.reason)


def _other_optimizers(here: Sequence[str], stored: Sequence[str]) -> Iterator[str]:
    """Yield a phrase if the optimizers differ, because one cannot use the state of another."""
    if stored and tuple(here) != tuple(stored):
        yield f"the optimizer is {' and '.join(here)} here and {' and '.join(stored)} in the checkpoint"

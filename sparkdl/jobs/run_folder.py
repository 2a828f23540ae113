"""The folder of a run: what is written into it, resumed from it, and loaded from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import sparkdl
from sparkdl import (
    Callback,
    CheckpointError,
    ParameterError,
    TrainedModel,
    Trainer,
    TrainState,
    UserError,
    __version__,
)
from sparkdl.codec.describe import REDACTED, is_secret, without_credentials
from sparkdl.codec.files import path_here
from sparkdl.jobs.components import Component, import_from_here, ship
from sparkdl.jobs.config import Config, read_yaml

LATEST = "latest"


class RunFolder(Callback):
    """A new folder ``<runs>/<name>-<YYYYmmdd-HHMMSS>``; an existing one is never written to.

    It is a callback of the training, so it knows how far that is, and whether there is anything to
    lose.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = TrainState()
        self.trained = False
        """True if an iteration has ended, or if the training was complete when it was resumed."""

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        if state.checkpoint is not None:
            place = without_credentials(state.checkpoint)
            print(f"on from iteration {state.iteration:,}: {place}", flush=True)

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self.state, self.trained = state, True

    on_fit_end = on_iteration_end

    @staticmethod
    @contextlib.contextmanager
    def create(runs: str, name: str) -> Iterator[RunFolder]:
        """Make the folder, and remove it if a mistake of the user ends the block.

        If something was trained by then, all of it stays, and a message says so.
        """
        if not re.fullmatch(r"[\w][\w.+-]*", name):
            raise ParameterError(f'name: "{name}" cannot be part of a folder name.')
        stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, number = path_here(runs) / stamp, 1
        while True:
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                if not Path(runs).is_dir():
                    raise
                number += 1
                path = Path(runs) / f"{stamp}-{number}"
        folder = RunFolder(path)
        try:
            yield folder
        except (UserError, CheckpointError):
            if folder.trained:
                print(f"what was trained is in {path}", file=sys.stderr)
            else:
                shutil.rmtree(path)
            raise

    def write_config(self, config: Config) -> None:
        """Write ``config.yaml``, which can be run again: every key, with secrets redacted."""
        import pyspark
        import torch

        (self.path / "config.yaml").write_text(
            f"# sparkdl {__version__}, pyspark {pyspark.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}\n"
            + yaml.safe_dump(
                redacted(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True
            ),
            encoding="utf-8",
        )

    def write_training(self, trained: TrainedModel, report: str = "report.html") -> None:
        """Write ``model/``, and ``best/`` and ``ema/`` if there are any, the history and its report."""
        for suffix in ("json", "csv"):
            trained.history.save(self.path / f"history.{suffix}")
        for name, one in models_of(trained).items():
            one.save(self.path / name)
        trained.report(self.path / report, self.path.name)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        (self.path / "summary.json").write_text(
            json.dumps(summary, indent=1) + "\n", encoding="utf-8"
        )


def models_of(trained: TrainedModel) -> dict[str, TrainedModel]:
    """Return the models by their folders' names: the last, the best, and the moving average."""
    found = {"model": trained, "best": trained.best, "ema": trained.ema}
    return {name: one for name, one in found.items() if one is not None}


def redacted(value: Any, key: str = "") -> Any:
    """Return ``value`` with secrets hidden: values under keys that name secrets, credentials in texts.

    See :mod:`sparkdl.codec.describe`. ``key`` is the place of the value, with all keys on the way."""
    if isinstance(value, dict):
        if key == ".data.columns":  # a column may well be named "tokens"
            return {k: redacted(v, "") for k, v in value.items()}
        return {k: v if k == "class_path" else redacted(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(v, key) for v in value]
    if is_secret(key, value):
        return REDACTED
    return without_credentials(value) if isinstance(value, str) else value


def find_model(path: str | Path) -> tuple[Path, Path | None]:
    """Return (model folder, run folder or None) of a run folder or a model folder."""
    given = Path(path)
    for model in (given, given / "model"):
        if (model / "model.json").is_file():
            run = Path(os.path.normpath(model / os.pardir))
            return model, (run if (run / "config.yaml").is_file() else None)
    if not given.exists():
        raise FileNotFoundError(f"there is no folder {given}.")
    if (given / "config.yaml").is_file():
        raise FileNotFoundError(
            f"the run {given} has no model: it has not ended. If it has written a checkpoint, "
            f"sparkdl train --resume {given} continues from there."
        )
    raise FileNotFoundError(f"{given} is neither a run folder nor a model (no model.json in it).")


def resume_point(resume: str, config: Config) -> str | None:
    """Return the value for ``Trainer.fit(resume=...)``; None if ``latest`` finds no checkpoint.

    ``resume`` is a run folder, a folder of checkpoints, one checkpoint, or "latest": the newest at
    ``checkpoint.path``, or else of the newest run of this name that has one. Raises ParameterError.
    """
    if resume != LATEST:
        return _of_folder(Path(resume), config) or resume
    if config.checkpoint is not None and config.checkpoint.path is not None:
        return LATEST
    for folder in reversed(_runs(Path(config.runs), config.name)):
        if _has_checkpoint(folder):
            return str(folder / "checkpoints")
    return None


def _has_checkpoint(folder: Path) -> bool:
    """Return whether a run folder has a complete checkpoint."""
    return any(folder.glob("checkpoints/*/manifest.json"))


def _of_folder(folder: Path, config: Config) -> str | None:
    """Return the checkpoints of a run folder; None if ``folder`` is none."""
    if not (folder / "config.yaml").is_file():
        return None
    told = (read_yaml(folder / "config.yaml").get("checkpoint") or {}).get("path")
    if told and REDACTED in told:
        told = config.checkpoint and config.checkpoint.path
        if not told:
            raise ParameterError(
                f"--resume: {folder}/config.yaml has checkpoint.path without its secrets: give it "
                "again, with --checkpoint.path=..."
            )
    if told:
        return str(told)
    if not _has_checkpoint(folder):
        raise ParameterError(
            f"--resume: {folder} has no checkpoint: it ended before the first one, or has no "
            "checkpoint section. Train anew, for instance with --checkpoint.every_epochs 1."
        )
    return str(folder / "checkpoints")


def _runs(runs: Path, name: str) -> list[Path]:
    """Return the run folders of a name, the oldest first."""
    found = []
    for folder in runs.glob(f"{name}-*"):
        stamp = re.fullmatch(r"(\d{8}-\d{6})(?:-(\d+))?", folder.name[len(name) + 1 :])
        if stamp:
            found.append((stamp[1], int(stamp[2] or 1), folder))
    return [folder for *_, folder in sorted(found)]


@dataclass(frozen=True)
class Saved:
    """A loaded model, the folder for results about it, and the metrics and columns of its run."""

    trained: TrainedModel
    folder: Path
    metrics: list[Any] = field(default_factory=list)
    select: list[str] | None = None


def load_saved(
    path: str, trust: bool = False, loss: str | None = None, needs_loss: bool = False
) -> Saved:
    """Load the model at ``path``.

    Without ``trust``, only code of modules of ``torch.nn`` runs, and of functions that are annotated
    to build a module. Raises :class:`sparkdl.UserError`."""
    model, run = find_model(path)
    config = read_yaml(run / "config.yaml") if run else {}
    import_from_here()
    if trust and config.get("model"):
        Component.of(config["model"]).bound()  # its file may be in a place only the run knows
    found = _loss(config, loss, trust, run) if needs_loss else None
    try:
        trained = sparkdl.load(model, loss=found, trust=trust)
    except sparkdl.TrustError as error:
        raise sparkdl.TrustError(f"{error} Here, that is --trust.") from None
    for module in trained.module.modules():
        ship(type(module).__module__)
    # best/ and ema/ of a run are written into themselves, what is of its model into the run
    folder = run if run is not None and model.name == "model" else model
    select = (config.get("data") or {}).get("select")
    return Saved(trained, folder, _metrics(config, trust), select)


def _metrics(config: dict[str, Any], trust: bool) -> list[Any]:
    """Return the metrics of the run; components, which are code of the folder, only with trust."""
    found = config.get("metrics") or []
    return [
        Component.of(m).made() if isinstance(m, dict) else m
        for m in found
        if trust or isinstance(m, str)
    ]


def _loss(
    config: dict[str, Any], given: str | None, trust: bool, run: Path | None
) -> Callable[..., Any] | None:
    if given:
        return Component(given).instance()
    if not config.get("loss"):
        return None
    loss = Component.of(config["loss"])
    if not trust and not loss.is_torch_loss():
        raise sparkdl.TrustError(
            f'{run}/config.yaml names the loss "{loss.class_path}", which is not of torch.nn. Pass '
            f"--loss {loss.class_path} if that is yours, or --trust if you trust the folder."
        )
    return loss.instance()

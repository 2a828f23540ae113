"""The folder of a run: its configuration, history, curves and models."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jobs.sections import Config
from sparkdl import (
    Callback,
    CheckpointError,
    History,
    ParameterError,
    TrainedModel,
    Trainer,
    TrainState,
    UserError,
    __version__,
)
from sparkdl.codec.describe import REDACTED, is_secret, without_credentials


class RunFolder(Callback):
    """A new folder ``<runs>/<name>-<YYYYmmdd-HHMMSS>``; an existing one is never written to.

    It is a callback of the training, so it knows whether there is anything to lose.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trained = False
        """True if an iteration has ended, or if the training was complete when it was resumed."""

    def on_iteration_end(self, trainer: Trainer, state: TrainState) -> None:
        self.trained = True

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
        path, number = Path(runs) / stamp, 1
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

        command = shlex.join(_without_secrets(sys.argv)).replace("\n", "\n# ")
        (self.path / "config.yaml").write_text(
            f"# Written by {command}\n"
            f"# sparkdl {__version__}, pyspark {pyspark.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}\n"
            + yaml.safe_dump(redacted(config.content()), sort_keys=False, allow_unicode=True),
            encoding="utf-8",
        )

    def write_training(self, trained: TrainedModel) -> None:
        """Write ``model/``, and ``best/`` and ``ema/`` if there are any, the history and its curves."""
        for suffix in ("json", "csv"):
            trained.history.save(self.path / f"history.{suffix}")
        for name, one in models_of(trained).items():
            one.save(self.path / name)
        draw_curves(trained.history, self.path / "curves.png")

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
        return {k: v if k == "use" else redacted(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(v, key) for v in value]
    if is_secret(key, value):
        return REDACTED
    return without_credentials(value) if isinstance(value, str) else value


def _without_secrets(arguments: list[str]) -> list[str]:
    shown = []
    for argument in arguments:
        key, equals, value = argument.removeprefix("--set=").partition("=")
        hidden = equals and is_secret(key, value)
        shown.append(f"{key}={REDACTED}" if hidden else without_credentials(argument))
    return shown


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
            f"the run {given} has no model: it has not ended. If it has written a checkpoint, train.py "
            f"--resume {given} continues from there."
        )
    raise FileNotFoundError(f"{given} is neither a run folder nor a model (no model.json in it).")


def draw_curves(history: History, path: Path) -> None:
    """Draw ``curves.png``, without messages of matplotlib about its fonts."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from sparkdl.summaries import plot_history

    plot_history(history, path)

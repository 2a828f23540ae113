"""The folder of a run: what is written into it, resumed from it, and loaded from it."""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyspark
import torch
import yaml

import sparkdl
from sparkdl import Callback, ParameterError, TrainedModel, TrainState
from sparkdl.codec.describe import REDACTED, is_secret, without_credentials
from sparkdl.codec.files import path_here
from sparkdl.jobs.building import bound, find_model, instance, is_torch_loss, metrics_of, ship

LATEST = "latest"


class RunFolder(Callback):
    """A new folder ``<runs>/<name>-<YYYYmmdd-HHMMSS>``, and how far the training in it is.

    If a mistake of the user ends the block, the folder is removed, unless something was trained.
    """

    def __init__(self, runs: str, name: str, config: dict[str, Any]) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", str(name)):
            raise ParameterError(f'name: "{name}" cannot be part of a folder name.')
        while True:
            self.path = path_here(runs) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
            try:
                self.path.mkdir(parents=True)
                break
            except FileExistsError:  # of a run of the same second
                time.sleep(0.1)
        self.state = TrainState()
        self.trained = False
        """True if an iteration has ended, or if the training was complete when it was resumed."""
        versions = {"sparkdl": sparkdl, "pyspark": pyspark, "torch": torch}
        head = ", ".join(f"{one} {made.__version__}" for one, made in versions.items())
        text = yaml.safe_dump(redacted(config), sort_keys=False, allow_unicode=True)
        text = f"# {head}, Python {platform.python_version()}\n{text}"
        (self.path / "config.yaml").write_text(text, encoding="utf-8")

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        if state.checkpoint is not None:
            place = without_credentials(state.checkpoint)
            print(f"on from iteration {state.iteration:,}: {place}", flush=True)

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        self.state, self.trained = state, True

    on_fit_end = on_iteration_end

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, (sparkdl.UserError, sparkdl.CheckpointError)):
            if self.trained:
                print(f"what was trained is in {self.path}", file=sys.stderr)
            else:
                shutil.rmtree(self.path)

    def write(self, models: Mapping[str, TrainedModel], summary: Mapping[str, Any]) -> None:
        """Write models, the history and the report of the first, and ``summary.json``."""
        for name, one in models.items():
            one.save(self.path / name)
        if models:
            model = models["model"]
            for suffix in ("json", "csv"):
                model.history.save(self.path / f"history.{suffix}")
            search = (self.path / "report.html").exists()
            model.report(self.path / ("best.html" if search else "report.html"), self.path.name)
        text = json.dumps(summary, indent=1) + "\n"
        (self.path / "summary.json").write_text(text, encoding="utf-8")


def models_of(trained: TrainedModel) -> dict[str, TrainedModel]:
    """Return the models by their folders' names: the last, the best, and the moving average."""
    models = {"model": trained, "best": trained.best, "ema": trained.ema}
    return {name: one for name, one in models.items() if one is not None}


def redacted(value: Any, key: str = "") -> Any:
    """Return ``value`` with secrets hidden: values under keys that name secrets, credentials in texts.

    ``key`` is the place of the value, with all keys on the way."""
    if isinstance(value, dict):
        columns = key == ".data.columns"  # one of them may well be named "tokens"
        hidden = {k: redacted(v, "" if columns else f"{key}.{k}") for k, v in value.items()}
        return hidden | {k: v for k, v in value.items() if k == "class_path"}
    if isinstance(value, (list, tuple)):
        return [redacted(v, key) for v in value]
    if is_secret(key, value):
        return REDACTED
    return without_credentials(value) if isinstance(value, str) else value


def config_in(folder: Path) -> dict[str, Any]:
    """Return the configuration in a run folder; an empty one if the folder is none."""
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def resume_point(resume: str, config: dict[str, Any]) -> str | None:
    """Return the value for ``Trainer.fit(resume=...)``; None if ``latest`` finds no checkpoint.

    ``resume`` is a run folder, a folder of checkpoints, one checkpoint, or "latest": the newest at
    ``checkpoint.path``, or else of the newest run of this name that has one.
    """
    path = (config["checkpoint"] or {}).get("path")
    if resume == LATEST and not path:
        day, second = "[0-9]" * 8, "[0-9]" * 6
        pattern = f"{config['name']}-{day}-{second}/checkpoints/*/manifest.json"
        return max((str(at.parents[1]) for at in Path(config["runs"]).glob(pattern)), default=None)
    if resume == LATEST or not (Path(resume) / "config.yaml").is_file():
        return resume
    of_run = (config_in(Path(resume)).get("checkpoint") or {}).get("path")
    of_run = path if REDACTED in str(of_run) else of_run
    return str(of_run or Path(resume) / "checkpoints")


class Saved(NamedTuple):
    """A loaded model, the folder for results about it, and the metrics and columns of its run."""

    trained: TrainedModel
    folder: Path
    metrics: Any
    select: list[str] | None


def load_saved(path: str, trust: bool, loss: str | None = None, evaluates: bool = False) -> Saved:
    """Load the model at ``path``, with the loss that is given, or that of its run.

    Without ``trust``, only code of modules of ``torch.nn`` runs, and of functions that are annotated
    to build a module."""
    model = find_model(path)
    run = model.parent
    config = config_in(run)
    if trust and config.get("model"):
        bound(config["model"])  # its file may be in a place only the run knows
    spec = (loss or config.get("loss")) if evaluates else None
    if spec and not (loss or trust or is_torch_loss(spec)):
        raise sparkdl.TrustError(
            f"{run}/config.yaml names a loss that is not of torch.nn, {spec}. Give it as --loss if it "
            "is yours, or --trust if you trust the folder."
        )
    trained = sparkdl.load(model, loss=instance(spec) if spec else None, trust=trust)
    for module in trained.module.modules():
        ship(type(module))
    specs = [one for one in config.get("metrics") or [] if trust or isinstance(one, str)]
    # best/ and ema/ of a run are written into themselves, what is of its model into the run
    folder = run if config and model.name == "model" else model
    return Saved(trained, folder, metrics_of(specs), (config.get("data") or {}).get("select"))

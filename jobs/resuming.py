"""The checkpoints that ``--resume`` goes on from: those of a run folder, or of the latest one."""

from __future__ import annotations

import re
from pathlib import Path

from jobs.config import read_yaml
from jobs.sections import Config
from sparkdl import ParameterError
from sparkdl.codec.describe import REDACTED

LATEST = "latest"


def config_file(config: str | None, resume: str | None) -> Path:
    """Return the given file, or else that of the run folder to resume. Raises ParameterError."""
    if config is not None:
        return Path(config)
    if resume is not None and (Path(resume) / "config.yaml").is_file():
        return Path(resume) / "config.yaml"
    if resume is not None:
        raise ParameterError(
            f"--resume: {resume} is not a run folder (there is no config.yaml in it). Give one such as "
            "runs/digits-20261124-105124; for a checkpoint or latest, give --config FILE too."
        )
    raise ParameterError("give --config FILE; only --resume with a run folder goes without.")


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
        if has_checkpoint(folder):
            return str(folder / "checkpoints")
    return None


def has_checkpoint(folder: Path) -> bool:
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
                "again, with --set checkpoint.path=..."
            )
    if told:
        return str(told)
    if not has_checkpoint(folder):
        raise ParameterError(
            f"--resume: {folder} has no checkpoint: it ended before the first one, or has no "
            "checkpoint section. Train anew, for instance with --set checkpoint.every_epochs=1."
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

"""The smallest configuration of a job, others made of it, and what its command line says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from sparkdl.jobs import config

SMALLEST: dict[str, Any] = {
    "data": {"train": "a.parquet"},
    "model": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 2}},
    "loss": "torch.nn.CrossEntropyLoss",
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
}


def smallest(**changes: Any) -> dict[str, Any]:
    return {**SMALLEST, **changes}


def parse(content: dict[str, Any] | Path, *arguments: str) -> dict[str, Any]:
    """Return the configuration of a file, or of what one would hold, and of arguments after it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        if not isinstance(content, Path):
            file.write(yaml.safe_dump(content))
            file.flush()
        path = content if isinstance(content, Path) else file.name
        keys, _ = config.parse("train", [f"--config={path}", *arguments], ["config FILE"], {})
        return keys

"""The smallest configuration of a job, others made of it, and what its command line says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sparkdl.jobs.config import Config, config_of, new_parser

SMALLEST: dict[str, Any] = {
    "data": {"train": "a.parquet"},
    "model": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 2}},
    "loss": "torch.nn.CrossEntropyLoss",
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
}


def smallest(**changes: Any) -> dict[str, Any]:
    return {**SMALLEST, **changes}


def parse(content: dict[str, Any] | Path, *arguments: str) -> Config:
    """Return the configuration of a file, or of what one would hold, and of arguments after it."""
    parser = new_parser(parser_mode="omegaconf")
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config, None)
    text = str(content) if isinstance(content, Path) else yaml.safe_dump(content)
    return config_of(parser.instantiate(parser.parse_args(["--config", text, *arguments])))

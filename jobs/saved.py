"""The saved model of a job: found in a run folder, loaded, ready to travel."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sparkdl
from jobs.components import Component, import_from_here, ship
from jobs.config import read_yaml
from jobs.run_folder import find_model


@dataclass(frozen=True)
class Saved:
    """A loaded model, the folder for results about it, and the metrics of its run."""

    trained: sparkdl.TrainedModel
    folder: Path
    metrics: list[Any] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that evaluating and predicting share."""
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a run folder, or a model")
    parser.add_argument("--data", required=True, metavar="PATH", help="what to read")
    parser.add_argument("--format", default="parquet", metavar="NAME", help="default: parquet")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE",
        help="an option of spark.read; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--master", default="local[2]", help="without spark-submit --master; default: local[2]"
    )
    parser.add_argument(
        "--trust", action="store_true",
        help="let the folder run code of its choice: its pickle, any function that it names",
    )  # fmt: skip


def load(
    path: str, trust: bool = False, loss: str | None = None, needs_loss: bool = False
) -> Saved:
    """Load the model at ``path``.

    Without ``trust``, only code of modules of ``torch.nn`` runs, and of functions that are annotated
    to build a module. Raises :class:`sparkdl.UserError`."""
    model, run = find_model(path)
    config = read_yaml(run / "config.yaml") if run else {}
    import_from_here()
    if trust and config.get("model"):
        Component.of(config["model"]).resolve()  # its file may be in a place only the run knows
    found = _loss(config, loss, trust, run) if needs_loss else None
    try:
        trained = sparkdl.load(model, loss=found, trust=trust)
    except sparkdl.TrustError as error:
        raise sparkdl.TrustError(f"{error} For this script, that is --trust.") from None
    for module in trained.module.modules():
        ship(type(module).__module__)
    # best/ and ema/ of a run are written into themselves, what is of its model into the run
    folder = run if run is not None and model.name == "model" else model
    return Saved(trained, folder, _metrics(config, trust))


def _metrics(config: dict[str, Any], trust: bool) -> list[Any]:
    """Return the metrics of the run; components, which are code of the folder, only with trust."""
    found = config.get("metrics") or []
    return [
        Component.of(m).make() if isinstance(m, dict) else m
        for m in found
        if trust or isinstance(m, str)
    ]


def _loss(
    config: dict[str, Any], given: str | None, trust: bool, run: Path | None
) -> Callable[..., Any] | None:
    if given:
        return Component(given).resolve_instance()
    if not config.get("loss"):
        return None
    loss = Component.of(config["loss"])
    if not trust and not loss.is_torch_loss():
        raise sparkdl.TrustError(
            f'{run}/config.yaml names the loss "{loss.use}", which is not of torch.nn. Pass '
            f"--loss {loss.use} if that is yours, or --trust if you trust the folder."
        )
    return loss.resolve_instance()

"""The trainer and the search that a configuration describes, built before any data is read.

All mistakes of a configuration are reported in one error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparkdl
from sparkdl.data.columns.base import specs_to_json
from sparkdl.errors import ParameterError, raise_all
from sparkdl.jobs.components import Component
from sparkdl.jobs.config import CheckpointSection, Config, Spec, ValidationSection
from sparkdl.jobs.run_folder import find_model
from sparkdl.metrics.named import resolve

_OF_JOBS = {
    *("train", "test", "format", "options", "select", "prepare"),
    *("epochs", "max_iterations", "max_seconds", "min_loss", "histograms"),
}
"""Keys of the sections data and trainer that are no fields of :class:`sparkdl.Trainer`."""


class _Problems(list[str]):
    """The mistakes so far."""

    def of(self, key: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``make`` returns, or None and note its mistake under ``key``."""
        try:
            return make(*arguments)
        except (ParameterError, FileNotFoundError) as error:
            self.append(f"{key}: {error}")
        return None


def trainer_of(config: Config) -> sparkdl.Trainer:
    """Return the trainer that ``config`` describes, except for what is known later.

    The validation has no data, checkpoints without a path of their own have a relative one, and
    schedule and summaries are missing. Raises ParameterError.
    """
    problems = _Problems()
    fields = {**vars(config.data), **vars(config.trainer)}
    fields = {name: value for name, value in fields.items() if name not in _OF_JOBS}
    names = ("model", "loss", "step", "optimizer", "callbacks", "validation", "checkpoint")
    fields |= {name: getattr(config, name) for name in names}
    keys = {name: f"data.{name}" for name in vars(config.data)}
    keys |= {name: f"trainer.{name}" for name in vars(config.trainer)}
    for name, make in _MAKERS.items():
        if fields[name] is not None:
            fields[name] = problems.of(keys.get(name, name), make, fields[name])
    if config.data.prepare is not None:
        problems.of("data.prepare", _bound, config.data.prepare)
    problems.of("schedule", schedule_of, config.schedule, 1)
    problems.of("metrics", lambda: resolve(metrics_of(config.metrics)))
    if config.loss is None and config.step is None:
        problems.append("loss: name a loss, or give step: with a training step.")
    stop, every = _stop(config, problems), config.trainer.histograms
    due = None if every is None else problems.of("trainer.histograms", sparkdl.every, every)
    raise_all(ParameterError, problems)
    trainer = sparkdl.Trainer(**fields, stop=stop, histograms=due)
    problems.of("data.columns", lambda: specs_to_json(trainer.columns))  # as it will be saved
    raise_all(ParameterError, problems)
    return trainer


def _optimizer(spec: Any) -> Any:
    """Return the optimizer's recipe, or those of submodules, tried on a parameter of their own."""
    if isinstance(spec, Mapping) and "class_path" not in spec:
        return {submodule: _optimizer(one) for submodule, one in spec.items()}
    recipe = Component.of(spec).bound()
    kind = recipe.func if isinstance(recipe, functools.partial) else recipe
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        try:
            recipe([nn.Parameter(torch.zeros(1, 1))])
        except ValueError as error:
            raise ParameterError(f"{kind.__name__}: {error}.") from error
    return recipe


def _word_or(make: Callable[[Component], Any]) -> Callable[[Any], Any]:
    """Return a maker that leaves words such as ``ddp`` as they are."""

    def maker(spec: Any) -> Any:
        if isinstance(spec, list):
            return [maker(each) for each in spec]
        return spec if isinstance(spec, str) else make(Component.of(spec))

    return maker


def _each(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker for lists and mappings of what ``make`` takes."""

    def maker(specs: Any) -> Any:
        if not isinstance(specs, Mapping):
            return [make(spec) for spec in specs]
        problems = _Problems()
        values = {name: problems.of(name, make, spec) for name, spec in specs.items()}
        raise_all(ParameterError, problems)
        return values

    return maker


def _bound(spec: Spec) -> Any:
    return Component.of(spec).bound()


def _instance(spec: Spec) -> Any:
    return Component.of(spec).instance()


def _made(spec: Spec) -> Any:
    return Component.of(spec).made()


metrics_of = _word_or(Component.made)
"""Return the metrics: names as they are, and components as the metrics that they make."""


def validation_of(section: ValidationSection) -> sparkdl.Validation:
    """Return the validation without its data. Raises ParameterError."""
    problems = []
    if (section.data is None) == (section.share is None):
        problems.append("give either data, a path, or share, a part of the training data.")
    if section.share is not None and not 0 < section.share < 1:
        problems.append(f"share={section.share}: give a number between 0 and 1, such as 0.1.")
    raise_all(ParameterError, problems)
    return sparkdl.Validation(
        None,  # type: ignore[arg-type]  # known later
        metrics=metrics_of(section.metrics),
        every=_every(section),
        best=section.best,
        batch_size=section.batch_size,
    )


def checkpoint_of(
    section: CheckpointSection | None, folder: Path = Path()
) -> sparkdl.Checkpoint | None:
    """Return the checkpoints, at their own path or in the run ``folder``. Raises ParameterError."""
    if section is None:
        return None
    path = section.path or folder / "checkpoints"
    return sparkdl.Checkpoint(path, every=_every(section), keep=section.keep)


def _weights_file(path: str) -> str:
    """Return the safetensors file: ``path`` itself, or the file of the model that is saved there."""
    return str(find_model(path)[0] / "model.safetensors") if Path(path).is_dir() else path


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "model": _bound,
    "loss": _instance,
    "step": _instance,
    "optimizer": _optimizer,
    "augment": _bound,
    "columns": _each(_made),
    "consistency": _made,
    "sampling": _made,
    "compression": _instance,
    "strategy": _word_or(Component.made),
    "buffers": _each(_word_or(Component.bound)),
    "callbacks": _each(_made),
    "weights": _weights_file,
    "validation": validation_of,
    "checkpoint": checkpoint_of,
}
"""How a field of the trainer is made of what the file says; all others are as they stand."""


def _stop(config: Config, problems: _Problems) -> sparkdl.Trigger:
    """Return the trigger that ends training: the epochs, or another limit that comes first."""
    length, early = config.trainer, config.early_stopping
    limits: list[tuple[str, Any, Callable[[Any], sparkdl.Trigger]]] = [
        ("trainer.epochs", length.epochs, sparkdl.max_epoch),
        ("trainer.max_iterations", length.max_iterations, sparkdl.max_iteration),
        ("trainer.max_seconds", length.max_seconds, sparkdl.max_time),
        ("trainer.min_loss", length.min_loss, sparkdl.min_loss),
    ]
    if early is not None:
        until = functools.partial(sparkdl.plateau, early.metric, min_delta=early.min_delta)
        score = functools.partial(sparkdl.max_score, early.metric)
        limits.append(("early_stopping.patience", early.patience, until))
        limits.append(("early_stopping.target", early.target, score))
        if config.validation is None:
            problems.append("early_stopping needs a validation: set validation.share or .data.")
        if early.patience is None and early.target is None:
            problems.append("early_stopping never stops: give patience, target or both.")
    stops = [problems.of(key, make, value) for key, value, make in limits if value is not None]
    return _any([stop for stop in stops if stop is not None])


def _every(section: ValidationSection | CheckpointSection) -> sparkdl.Trigger:
    """Return a trigger for when an ``every_`` key is due; each epoch if none is given."""
    kinds: dict[str, Callable[[Any], sparkdl.Trigger]] = {
        "every_epochs": sparkdl.every_epoch,
        "every_iterations": sparkdl.every,
        "every_seconds": sparkdl.every_seconds,
    }
    values = {name: getattr(section, name, None) for name in kinds}
    return _any([kinds[name](value) for name, value in values.items() if value is not None])


def _any(triggers: list[sparkdl.Trigger]) -> sparkdl.Trigger:
    """Return a trigger for when any of them is true; without any, for each epoch."""
    return functools.reduce(lambda a, b: a | b, triggers) if triggers else sparkdl.every_epoch()


def schedule_of(spec: Spec | None, iterations: int) -> Any:
    """Return the scheduler's class with its arguments; "iterations" becomes their number."""
    if spec is None:
        return None
    component = Component.of(spec)
    arguments = {k: iterations if v == "iterations" else v for k, v in component.init_args.items()}
    return Component(component.class_path, arguments).bound()


def iterations_of(config: Config, trainer: sparkdl.Trainer, count: int) -> int:
    """Return the largest number of iterations for ``count`` samples."""
    length, batch = config.trainer, trainer.batch_size * trainer.options.local_steps
    iterations = length.epochs * -(-count // batch)
    return max(1, min(iterations, length.max_iterations or iterations))


def search_of(config: Config) -> dict[str, Any]:
    """Return the arguments of ``sparkdl.tune.search`` except trainer, data and path.

    Raises ParameterError."""
    section = config.tune
    if not section.space:
        raise ParameterError("tune.space: name what varies, such as {model.width: [16, 32]}.")
    problems = _Problems()
    space = {
        name.removeprefix("trainer.").removeprefix("data."): domain
        if isinstance(domain, list)
        else problems.of(f"tune.space.{name}", _made, domain)
        for name, domain in section.space.items()
    }
    algorithm = problems.of("tune.algorithm", _word_or(Component.made), section.algorithm)
    raise_all(ParameterError, problems)
    others = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
    return {**others, "space": space, "algorithm": algorithm}

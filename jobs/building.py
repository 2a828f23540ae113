"""The trainer that a configuration describes, built before any data is read.

All mistakes of a configuration are reported in one error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sparkdl
from jobs.components import Component
from jobs.run_folder import find_model
from jobs.sections import CheckpointSection, Config, TrainingSection, ValidationSection
from sparkdl.data.columns.base import specs_to_json
from sparkdl.errors import raise_all
from sparkdl.metrics.named import resolve


@dataclass(frozen=True)
class EveryEpochs(sparkdl.Trigger):
    """A trigger that is true at each multiple of ``epochs`` epochs."""

    epochs: int

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise sparkdl.ParameterError(
                f"every_epochs={self.epochs}: give a whole number of at least 1."
            )

    def __call__(self, previous: sparkdl.TrainState, current: sparkdl.TrainState) -> bool:
        return current.epoch // self.epochs > previous.epoch // self.epochs


def trainer_of(config: Config) -> sparkdl.Trainer:
    """Return the trainer that ``config`` describes, except for what is known later.

    The validation has no data, checkpoints without a path of their own have a relative one, and
    schedule and summaries are missing. Raises :class:`sparkdl.ParameterError`.
    """
    problems: list[str] = []

    def of(key: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except (sparkdl.ParameterError, FileNotFoundError) as error:
            problems.append(f"{key}: {error}")
        return None

    data, training, gradients, care = config.data, config.training, config.gradients, config.care
    found = {
        "model": of("model", config.model.resolve),
        "loss": config.loss and of("loss", config.loss.resolve_instance),
        "step": config.step and of("step", config.step.resolve_instance),
        "optimizer": of("optimizer", functools.partial(_optimizer, config.optimizer)),
        "consistency": gradients.consistency
        and of("gradients.consistency", gradients.consistency.make),
        "compression": gradients.compression
        and of("gradients.compression", gradients.compression.resolve_instance),
        "strategy": of("training.strategy", training.strategy.make)
        if isinstance(training.strategy, Component)
        else training.strategy,
        "augment": data.augment and of("data.augment", data.augment.resolve),
        "columns": {
            name: of(f"data.columns.{name}", column.make) for name, column in data.columns.items()
        },
        "buffers": {
            name: of(f"care.buffers.{name}", rule.resolve) if isinstance(rule, Component) else rule
            for name, rule in care.buffers.items()
        },
        "weights": care.weights and of("care.weights", lambda: weights_file(care.weights)),
        "callbacks": [of("callbacks", callback.make) for callback in config.callbacks],
    }
    if config.schedule is not None:
        of("schedule", config.schedule.resolve)
    _check_counts(config, problems)
    of("metrics", lambda: resolve(metrics_of(config.metrics)))
    validation = config.validation and of("validation", lambda: validation_of(config.validation))
    checkpoint = config.checkpoint and of("checkpoint", lambda: checkpoint_of(config.checkpoint))
    raise_all(sparkdl.ParameterError, problems)
    every = config.summaries.histograms
    trainer = sparkdl.Trainer(
        **found,
        features=data.features,
        label=data.label,
        weight=data.weight,
        class_weights=data.class_weights,
        bucketing=data.bucketing,
        schedule_per=training.schedule_per,
        schedule_metric=training.schedule_metric,
        batch_size=training.batch_size,
        replicas=training.replicas,
        min_ranks=training.min_ranks,
        slices=training.slices,
        engine=training.engine,
        mesh=training.mesh,
        sync_batchnorm=training.sync_batchnorm,
        precision=training.precision,
        seed=training.seed,
        accumulate=gradients.accumulate,
        local_steps=gradients.local_steps,
        clip_norm=gradients.clip_norm,
        clip_value=gradients.clip_value,
        l1=gradients.l1,
        l2=gradients.l2,
        on_nan=gradients.on_nan,
        wire=gradients.wire,
        strict_weights=care.strict_weights,
        freeze=care.freeze,
        unfreeze=care.unfreeze,
        activation_checkpointing=care.activation_checkpointing,
        compile=care.compile,
        ema=care.ema,
        output=care.output,
        stop=stop_of(config),
        validation=validation,
        checkpoint=checkpoint,
        histograms=None if every is None else sparkdl.every(every),
    )
    of("data.columns", lambda: specs_to_json(trainer.columns))  # as the model will be saved
    raise_all(sparkdl.ParameterError, problems)
    return trainer


def _optimizer(optimizer: Component | dict[str, Component]) -> Any:
    if isinstance(optimizer, Component):
        return optimizer.resolve()
    return {submodule: one.resolve() for submodule, one in optimizer.items()}


def _check_counts(config: Config, problems: list[str]) -> None:
    counts: list[tuple[str, Any, tuple[str, ...]]] = [
        ("training", config.training, ("epochs", "max_iterations")),
        ("early_stopping", config.early_stopping, ("patience",)),
        ("summaries", config.summaries, ("histograms",)),
    ]
    for section, content, names in counts:
        for name in names:
            value = getattr(content, name, None)
            if value is not None and value < 1:
                problems.append(f"{section}.{name}={value}: give a whole number of at least 1.")
    if config.loss is None and config.step is None:
        problems.append("loss: give module:name of a loss, or step: with that of a training step.")
    if not config.optimizer:
        problems.append("optimizer: give module:name, or a mapping with it under use.")
    early = config.early_stopping
    if early and config.validation is None:
        problems.append("early_stopping needs a validation: set validation.share or .data.")
    if early and early.patience is None and early.target is None:
        problems.append("early_stopping never stops: give patience, target or both.")


def stop_of(config: Config) -> sparkdl.Trigger:
    """Return the trigger that ends training: the epochs, or another limit that comes first."""
    training, early = config.training, config.early_stopping
    stop = sparkdl.max_epoch(training.epochs)
    if training.max_iterations is not None:
        stop = stop | sparkdl.max_iteration(training.max_iterations)
    if training.max_seconds is not None:
        stop = stop | sparkdl.max_time(training.max_seconds)
    if training.min_loss is not None:
        stop = stop | sparkdl.min_loss(training.min_loss)
    if early is not None and early.patience is not None:
        stop = stop | sparkdl.plateau(early.metric, early.patience, early.min_delta)
    if early is not None and early.target is not None:
        stop = stop | sparkdl.max_score(early.metric, early.target)
    return stop


def every_of(section: ValidationSection | CheckpointSection) -> sparkdl.Trigger:
    """Return a trigger for when an ``every_`` key is due; each epoch if none is given."""
    kinds: dict[str, Callable[[Any], sparkdl.Trigger]] = {
        "every_epochs": EveryEpochs,
        "every_iterations": sparkdl.every,
        "every_seconds": sparkdl.every_seconds,
    }
    found = [
        make(getattr(section, name))
        for name, make in kinds.items()
        if getattr(section, name, None) is not None
    ]
    return functools.reduce(lambda a, b: a | b, found) if found else sparkdl.every_epoch()


def metrics_of(metrics: list[str | Component]) -> list[Any]:
    """Return the metrics: names as they are, and components as the metrics that they make."""
    return [m.make() if isinstance(m, Component) else m for m in metrics]


def validation_of(section: ValidationSection) -> sparkdl.Validation:
    """Return the validation without its data. Raises ParameterError."""
    problems = []
    if (section.data is None) == (section.share is None):
        problems.append("give either data, a path, or share, a part of the training data.")
    if section.share is not None and not 0 < section.share < 1:
        problems.append(f"share={section.share}: give a number between 0 and 1, such as 0.1.")
    raise_all(sparkdl.ParameterError, problems)
    return sparkdl.Validation(
        None,
        metrics=metrics_of(section.metrics),
        every=every_of(section),
        best=section.best,
        batch_size=section.batch_size,
    )


def checkpoint_of(section: CheckpointSection, folder: Path | None = None) -> sparkdl.Checkpoint:
    """Return the checkpoints, at their own path or in the run ``folder``. Raises ParameterError."""
    path = section.path or (folder or Path()) / "checkpoints"
    return sparkdl.Checkpoint(path, every=every_of(section), keep=section.keep)


def weights_file(path: str) -> str:
    """Return the safetensors file: ``path`` itself, or the file of the model that is saved there."""
    if not Path(path).is_dir():
        return path
    return str(find_model(path)[0] / "model.safetensors")


SECTIONS = ("training.", "gradients.", "care.", "data.")
"""Sections whose keys are arguments of the trainer by the same names."""


def search_of(config: Config) -> dict[str, Any]:
    """Return the arguments of ``sparkdl.tune.search`` except trainer, data and path.

    Raises ParameterError."""
    section = config.tune
    if section is None or not section.space:
        raise sparkdl.ParameterError(
            "tune.space: name what varies, such as {model.width: [16, 32]}."
        )
    problems, space = [], {}
    for name, domain in section.space.items():
        key = name
        for prefix in SECTIONS:
            key = key.removeprefix(prefix)
        try:
            space[key] = domain.make() if isinstance(domain, Component) else domain
        except sparkdl.ParameterError as error:
            problems.append(f"tune.space.{name}: {error}")
    algorithm = section.algorithm
    try:
        algorithm = algorithm.make() if isinstance(algorithm, Component) else algorithm
    except sparkdl.ParameterError as error:
        problems.append(f"tune.algorithm: {error}")
    raise_all(sparkdl.ParameterError, problems)
    return {
        "space": space,
        "metric": section.metric,
        "trials": section.trials,
        "algorithm": algorithm,
        "parallel": section.parallel,
        "seed": section.seed,
    }


def schedule_of(schedule: Component, iterations: int) -> Any:
    """Return the scheduler's class with its arguments; "iterations" becomes their number."""
    arguments = {k: iterations if v == "iterations" else v for k, v in schedule.arguments.items()}
    return Component(schedule.use, arguments).resolve()


def training_iterations(training: TrainingSection, batch: int, count: int) -> int:
    """Return the largest number of iterations for ``count`` samples in global batches of ``batch``."""
    iterations = training.epochs * -(-count // batch)
    return max(1, min(iterations, training.max_iterations or iterations))

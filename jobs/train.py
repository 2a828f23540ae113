"""Train a model as a YAML file says: ``spark-submit jobs/train.py --config conf/digits.yaml``.

Writes a new folder, ``runs/<name>-<time>``: config.yaml, history.json, loss.png, summary.json and
model/. Any key can be changed on the command line: ``--set training.epochs=5 --set model.width=16``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import `jobs` from anywhere

import sparkdl
from jobs import console, datasets
from jobs.components import Component
from jobs.config import Config, read_config
from jobs.run_folder import RunFolder
from sparkdl.errors import raise_all


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="train.py", description="Train a model as a YAML file says."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the file, such as training.epochs=5; may be repeated",
    )  # fmt: skip
    arguments = parser.parse_args()
    config = read_config(arguments.config, arguments.set)
    trainer = trainer_of(config)
    datasets.prepare(config.data)
    with console.session(f"train {config.name}", config.spark.master, config.spark.settings) as s:
        train(s, config, trainer)


def trainer_of(config: Config) -> sparkdl.Trainer:
    """The trainer that ``config`` describes, without its schedule, whose length the data sets."""
    found: dict[str, Any] = {}
    problems = []
    for name in ("model", "loss", "optimizer", "schedule"):
        component = getattr(config, name)
        if component is not None:
            try:
                resolve = component.resolve_loss if name == "loss" else component.resolve
                found[name] = resolve()
            except sparkdl.ParameterError as error:
                problems.append(f"{name}: {error}")
    training = config.training
    for name in ("epochs", "max_iterations"):
        value = getattr(training, name)
        if value is not None and value < 1:
            problems.append(f"training.{name}={value}: give a whole number of at least 1.")
    raise_all(sparkdl.ParameterError, problems)
    stop = sparkdl.max_epoch(training.epochs)
    if training.max_iterations is not None:
        stop = stop | sparkdl.max_iteration(training.max_iterations)
    return sparkdl.Trainer(
        model=found["model"],
        loss=found["loss"],
        optimizer=found["optimizer"],
        features=config.data.features,
        label=config.data.label,
        batch_size=training.batch_size,
        replicas=training.replicas,
        slices=training.slices,
        engine=training.engine,
        stop=stop,
        seed=training.seed,
    )


def train(spark: Any, config: Config, trainer: sparkdl.Trainer) -> None:
    """Train, write the run folder, evaluate, and say how it went."""
    data = config.data
    samples = datasets.read(spark, data.train, data.format, data.options)
    test = data.test and datasets.read(spark, data.test, data.format, data.options)
    count = samples.count()
    iterations = config.training.epochs * math.ceil(count / trainer.batch_size)
    iterations = max(1, min(iterations, config.training.max_iterations or iterations))
    trainer = dataclasses.replace(
        trainer,
        schedule=config.schedule and schedule_of(config.schedule, iterations),
        callbacks=[
            console.EpochLines(
                config.training.epochs, spark.conf.get("spark.sparkdl.progress", "auto")
            )
        ],
    )
    print(
        f"{config.name}: {count:,} samples, batches of {trainer.batch_size}, "
        f"{iterations:,} iterations on {spark.sparkContext.master}",
        flush=True,
    )
    with RunFolder.create(config.runs, config.name) as folder:
        folder.write_config(config)
        trained = trainer.fit(samples)
        folder.write_training(trained)
        summary = summarize(trained, count)
        if test:
            found = trained.evaluate(test, config.metrics)
            summary |= {f"test {name}": value for name, value in found.items()}
        folder.write_summary(summary)
    print(f"\n{console.table(summary)}\n\n{folder.path}")


def schedule_of(schedule: Component, iterations: int) -> Any:
    """A partial of the scheduler's class; the argument ``iterations`` becomes their number."""
    arguments = {k: iterations if v == "iterations" else v for k, v in schedule.arguments.items()}
    return functools.partial(Component(schedule.use).resolve(), **arguments)


def summarize(trained: sparkdl.TrainedModel, count: int) -> dict[str, Any]:
    """The figures of the table in the end."""
    last = list(trained.history)[-1]
    epochs = trained.history.epochs()
    return {
        "samples": count,
        "parameters": sum(p.numel() for p in trained.module.parameters()),
        "epochs": len(epochs),
        "iterations": len(trained.history),
        "seconds": last["seconds"],
        "samples/s": last["samples"] / last["seconds"],
        "train loss": epochs[-1]["loss"],
    }


if __name__ == "__main__":
    console.run(main)

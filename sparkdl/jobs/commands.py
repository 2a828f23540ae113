"""The subcommands of ``sparkdl``, with a checked configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pyspark.errors import AnalysisException

import sparkdl
from sparkdl import summaries
from sparkdl.data.schema import quoted
from sparkdl.jobs import building, console, datasets
from sparkdl.jobs.config import Config, flat
from sparkdl.jobs.run_folder import LATEST, RunFolder, Saved, load_saved, models_of, resume_point
from sparkdl.loop.interrupt import INTERRUPTED

SHOWN = 10
"""The largest number of trials in the table on the console."""


def train(config: Config, arguments: Any) -> None:
    """Train, write the run folder, evaluate, and print the results."""
    trainer = building.trainer_of(config)
    resume = arguments.resume and resume_point(arguments.resume, config)
    with _session(f"train {config.name}", config) as spark:
        if arguments.dry_run:
            dry_run(spark, config, trainer)
            return
        if arguments.resume == LATEST and resume is None:
            print(f"no run of {config.name} to continue: starting from the beginning")
        _train(spark, config, trainer, resume)


def _train(spark: Any, config: Config, trainer: sparkdl.Trainer, resume: str | None) -> None:
    samples, held = datasets.read_samples(spark, config)
    test = datasets.read_test(spark, config.data)
    count = samples.count()
    iterations = building.iterations_of(config, trainer, count)
    print(
        f"{config.name}: {count:,} samples{f' and {held.count():,} to validate on' if held else ''}"
        f", batches of {trainer.batch_size}, {iterations:,} iterations "
        f"on {spark.sparkContext.master}",
        flush=True,
    )
    with RunFolder.create(config.runs, config.name) as folder:
        folder.write_config(config)
        trainer = _complete(config, trainer, held, iterations, folder.path)
        shown = [folder, *_summaries(config, folder.path), *trainer.callbacks]
        with _columns_as_inputs(config, samples):
            trained = dataclasses.replace(trainer, callbacks=shown).fit(samples, resume=resume)
        interrupted = trained.history.stopped == INTERRUPTED
        if interrupted and not len(trained.history):
            raise KeyboardInterrupt
        folder.write_training(trained)
        summary = _summarize(trained, count, folder.state, config)
        folder.write_summary(summary)
        if interrupted:
            print(f"what was trained is in {folder.path}", file=sys.stderr)
            raise KeyboardInterrupt
        if test:
            metrics = building.metrics_of(config.metrics)
            for which, model in models_of(trained).items():
                prefix = "" if which == "model" else f"{which} "
                scores = model.evaluate(test, metrics)
                summary |= {f"{prefix}test {name}": value for name, value in scores.items()}
            folder.write_summary(summary)
    print(f"\n{console.table(summary)}\n\n{folder.path}")


def _complete(
    config: Config, trainer: sparkdl.Trainer, held: Any, iterations: int, folder: Path
) -> sparkdl.Trainer:
    """Return the trainer with what depends on the data and the run folder."""
    return dataclasses.replace(
        trainer,
        schedule=building.schedule_of(config.schedule, iterations),
        validation=trainer.validation and dataclasses.replace(trainer.validation, data=held),
        checkpoint=building.checkpoint_of(config.checkpoint, folder),
    )


@contextlib.contextmanager
def _columns_as_inputs(config: Config, samples: Any) -> Iterator[None]:
    """Add to a mistake of the model that columns of numbers may be meant as one input."""
    from pyspark.sql.types import NumericType

    names = config.data.features
    try:
        yield
    except sparkdl.ModelError as error:
        if not isinstance(names, list) or not all(
            isinstance(samples.schema[name].dataType, NumericType) for name in names
        ):
            raise
        raise sparkdl.ModelError(
            f"{error}\nEach column of data.features is an input of its own. One input of all of them: "
            f'data.select: ["array({", ".join(names)}) AS features", "{config.data.label}"], and '
            "data.features: features."
        ) from error.__cause__


class _BeforeTheFirst(sparkdl.Callback):
    """A callback that ends a fit when everything is ready for its first iteration."""

    def on_fit_start(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        raise sparkdl.StopTraining


def dry_run(spark: Any, config: Config, trainer: sparkdl.Trainer) -> None:
    """Do all of a training except iterations: data, model, sizes and one evaluation on executors."""
    samples, held = datasets.read_samples(spark, config)
    test = datasets.read_test(spark, config.data)
    count = samples.count()
    iterations = building.iterations_of(config, trainer, count)
    trainer = _complete(config, trainer, held, iterations, Path())
    ready = dataclasses.replace(trainer, checkpoint=None, callbacks=[_BeforeTheFirst()])
    with _columns_as_inputs(config, samples):
        model = ready.fit(samples)
    few = (test or held or samples).limit(trainer.batch_size)
    scores = model.evaluate(few, building.metrics_of(config.metrics) if test else [])
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
    inputs = {
        f"column {name}": str(samples.schema[name].dataType.simpleString())
        for name in (*trainer.feature_columns, *trainer.label_columns)
    }
    rows = {
        "samples": count,
        **({"to validate on": held.count()} if held else {}),
        **inputs,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "MB of weights": weights / 1e6,
        "engine": trainer.engine,
        "iterations": iterations,
        **{f"untrained {name}": value for name, value in scores.items()},
    }
    print(f"{console.table(rows)}\n\nready to train: nothing was trained, there is no run folder")


def _summaries(config: Config, folder: Path) -> list[sparkdl.Callback]:
    """Return the callbacks that ``config.summaries`` asks for."""
    section = config.summaries
    callbacks: list[sparkdl.Callback] = []
    if section.csv:
        callbacks.append(summaries.HistoryFile(folder / "history.csv"))
    if section.tensorboard:
        callbacks.append(summaries.TensorBoard(folder / "tensorboard"))
    if section.mlflow:
        callbacks.append(summaries.MLflow(folder.name))
    return callbacks


def _summarize(
    trained: sparkdl.TrainedModel, count: int, state: sparkdl.TrainState, config: Config
) -> dict[str, Any]:
    """Return the figures of the final table."""
    history, best = trained.history, state.best
    epochs, by = history.epochs(), config.validation and config.validation.best
    return {
        "samples": count,
        "parameters": sum(p.numel() for p in trained.module.parameters()),
        "epochs": len(epochs),
        "iterations": len(history),
        **history.end,
        "seconds": state.seconds,
        "samples/s": state.samples / state.seconds,
        "train loss": epochs[-1]["loss"],
        **{f"validation {name}": value for name, value in state.metrics.items()},
        **({"best epoch": best.epoch} if trained.best and by and best else {}),
    }


def plan(config: Config, arguments: Any) -> None:
    """Print what an iteration of the training takes in each way to run it."""
    trainer = building.trainer_of(config)
    with _session(f"plan {config.name}", config) as spark:
        samples, _ = datasets.read_samples(spark, config)
        ready = dataclasses.replace(trainer, validation=None, checkpoint=None)
        with _columns_as_inputs(config, samples):
            print(sparkdl.plan(ready, samples, trials=arguments.trials))


def tune(config: Config, arguments: Any) -> None:
    """Search, write the run folder, evaluate the best model, and print the results."""
    trainer, search = building.trainer_of(config), building.search_of(config)
    with _session(f"tune {config.name}", config) as spark:
        _tune(spark, config, trainer, search, arguments.resume)


def _tune(
    spark: Any, config: Config, trainer: sparkdl.Trainer, search: dict[str, Any], resume: str | None
) -> None:
    samples, held = datasets.read_samples(spark, config)
    iterations = building.iterations_of(config, trainer, samples.count())
    with RunFolder.create(config.runs, f"{config.name}-tune") as folder:
        folder.write_config(config)
        trainer = _complete(config, trainer, held, iterations, folder.path)
        if search["parallel"] != 1:  # trials that are not distributed have no checkpoints
            trainer = dataclasses.replace(trainer, checkpoint=None)
        trials = Path(resume or folder.path) / "trials"
        result = sparkdl.tune.search(trainer, samples, path=trials, **search)
        folder.trained = bool(result.trials)
        if result.trials:
            table = result.to_pandas()
            table.to_csv(folder.path / "trials.csv")
            result.report(folder.path / "report.html", folder.path.name)
            order = table.sort_values(search["metric"], ascending=not result.higher_is_better)
            print(order.head(SHOWN).to_string())
        summary: dict[str, Any] = {"trials": len(result.trials)}
        if result.best is not None:
            folder.write_training(result.best_model, "best.html")
            summary |= {"best trial": result.best.number, **result.best.arguments}
            summary |= {f"validation {name}": v for name, v in result.best.metrics.items()}
        folder.write_summary(summary)
        if result.stopped is not None:
            print(f"the finished trials are in {folder.path}", file=sys.stderr)
            raise KeyboardInterrupt
        test = datasets.read_test(spark, config.data)
        if test and result.best is not None:
            scores = result.best_model.evaluate(test, building.metrics_of(config.metrics))
            summary |= {f"test {name}": value for name, value in scores.items()}
            folder.write_summary(summary)
    print(f"\n{console.table(summary)}\n\n{folder.path}")


def evaluate(arguments: Any) -> None:
    """Print the loss and the metrics of a saved model, and write them into its folder."""
    saved = load_saved(arguments.model, arguments.trust, arguments.loss, needs_loss=True)
    metrics = saved.metrics if arguments.metrics is None else arguments.metrics
    with console.session("evaluate", arguments.master) as spark:
        data = _read_of(spark, arguments, saved)
        scores = saved.trained.evaluate(data, building.metrics_of(metrics))
        count = data.count()
    path = saved.folder / "evaluation.json"
    stamp = {"data": arguments.data, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    rows = {"samples": count, **scores}
    print(console.table(rows), flush=True)
    path.write_text(json.dumps(stamp | rows, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")


def predict(arguments: Any) -> None:
    """Write the data with a column of predictions, and print a few rows."""
    saved = load_saved(arguments.model, arguments.trust)
    with console.session("predict", arguments.master) as spark:
        data = _read_of(spark, arguments, saved)
        predicted = saved.trained.transform(
            data,
            prediction_col=arguments.column,
            postprocess=functools.partial(torch.argmax, dim=1) if arguments.argmax else None,
        )
        mode = "overwrite" if arguments.overwrite else "errorifexists"
        if arguments.overwrite:
            datasets.check_apart(data, arguments.output, saved.folder)
        try:
            datasets.write(predicted, arguments.output, arguments.output_format, mode)
        except AnalysisException as error:
            if error.getCondition() != "PATH_ALREADY_EXISTS":
                raise
            raise sparkdl.ParameterError(
                f"{arguments.output} already exists: give --overwrite, or another --output."
            ) from None
        written = datasets.read(spark, "--output", arguments.output, arguments.output_format, {})
        shown = [quoted(c) for c in written.columns if c not in saved.trained.features]
        print(f"{written.count():,} rows with the column {arguments.column}; the first of them:\n")
        written.select(shown).show(5, truncate=60)
    print(arguments.output)


def _read_of(spark: Any, arguments: Any, saved: Saved) -> Any:
    options = flat(arguments.options)
    data = datasets.read(
        spark, "--data", arguments.data, arguments.format, options, arguments.select
    )
    columns = set(data.columns)
    missing = [n for n in saved.trained.features if not columns & {n, n.partition(".")[0]}]
    if missing and saved.select:
        given = shlex.quote(json.dumps(saved.select, ensure_ascii=False))
        raise sparkdl.ParameterError(
            f'--data: {arguments.data} has no column "{missing[0]}", which the run made of others: '
            f"give --select {given}"
        )
    return data


def _session(app: str, config: Config) -> contextlib.AbstractContextManager[Any]:
    datasets.prepare(config.data)
    return console.session(app, config.spark.master, config.spark.settings)

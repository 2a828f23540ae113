"""The subcommands of ``sparkdl``, with checked keys: session, data, the work, and its results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException
from pyspark.sql import DataFrame, SparkSession, functions

import sparkdl
from sparkdl import summaries
from sparkdl.codec.files import path_here
from sparkdl.data.arrow_tasks import content_hash
from sparkdl.data.schema import quoted
from sparkdl.errors import ParameterError
from sparkdl.infer.remote import HadoopFolder
from sparkdl.jobs import building
from sparkdl.jobs.building import checkpoint_of, metrics_of, place_of, schedule_of, trainer_of
from sparkdl.jobs.config import flat
from sparkdl.jobs.run_folder import RunFolder, Saved, load_saved, models_of, resume_point
from sparkdl.loop.interrupt import INTERRUPTED
from sparkdl.spark.executors import check_python
from sparkdl.spark.failures import of_query, reading_explained

_SHARES = 1 << 20
_SEED = "seed of jobs.datasets.split"
_FILES = ("avro", "csv", "json", "orc", "parquet", "text")
_DEFAULTS = {"csv": {"header": "true", "inferSchema": "true"}}
_interrupted = threading.Event()


def ended_by(error: BaseException) -> tuple[int, str | None]:
    """Return the exit status and the message; no message if the traceback says more.

    The status is 2 for a mistake of the user, 130 after an interrupt, or 1 for a fault."""
    if isinstance(error, KeyboardInterrupt) or _interrupted.is_set():
        return 130, "interrupted."  # in the midst of a call Py4J makes another error of it
    if isinstance(error, (sparkdl.UserError, sparkdl.CheckpointError, OSError)):
        place = place_of(error.__cause__)
        return 2, f"{error}{'' if place in str(error) else place}"
    if isinstance(error, (AnalysisException, IllegalArgumentException)):
        return 2, of_query(str(error)).split("\n", 1)[0]
    return 1, str(error) if isinstance(error, sparkdl.TrainingError) else None


@contextlib.contextmanager
def told(what: str, remedy: str = "") -> Iterator[None]:
    """Turn any exception of Java inside into a mistake of the user: ``what``, and its message."""
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        java = getattr(error, "java_exception", None)
        message = str(error) if java is None else java.getMessage() or java.toString()
        first = of_query(message.strip().splitlines()[0])
        raise ParameterError(f"{what}: {first}{remedy}") from None


@contextlib.contextmanager
def session(
    app: str, master: str | None = None, settings: Mapping[str, Any] | None = None
) -> Iterator[SparkSession]:
    """Open a session, stopped at the end; under ``spark-submit`` with its master."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        master = None
    given = {k: v for k, v in (settings or {}).items() if v is not None}
    with told("Spark cannot start"):
        spark = sparkdl.session(master, **{"spark.app.name": app, **given})
    # Ctrl-C reaches all processes of a terminal. Java ignores it, so that Python can end its work
    # (the iteration, the model), and Py4J does not log that a call was interrupted.
    jvm: Any = spark.sparkContext._jvm
    ignore, interrupt = jvm.sun.misc.SignalHandler.SIG_IGN, signal.getsignal(signal.SIGINT)
    jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal("INT"), ignore)

    def quiet(*arguments: Any) -> None:
        _interrupted.set()
        logging.disable(logging.ERROR)
        assert callable(interrupt)
        interrupt(*arguments)

    signal.signal(signal.SIGINT, quiet)
    try:
        check_python(spark.sparkContext)
        yield spark
    finally:
        with contextlib.suppress(Exception):  # what ended the job is told, the JVM's end, say
            spark.stop()


def read(spark: SparkSession, key: str, path: str, keys: Mapping[str, Any]) -> DataFrame:
    """Read the data at ``path``, which ``key`` names; a CSV has a header and typed columns."""
    format, prefix = keys["format"], "--" if key.startswith("--") else "data."
    options = {**_DEFAULTS.get(format, {}), **flat(keys.get("options") or {})}
    suffix = PurePosixPath(path).suffix.removeprefix(".")
    other = suffix in _FILES and suffix != format
    remedy = f" The name ends in .{suffix}: {prefix}format: {suffix}?" if other else ""
    with told(f"{key}: {path} cannot be read as {format}", remedy):
        data = spark.read.format(format).options(**options).load(path)
    if keys.get("select") is None:
        return data
    with told(f"{prefix}select"):
        return data.selectExpr(keys["select"])


def split(data: DataFrame, share: float, seed: int) -> tuple[DataFrame, DataFrame]:
    """Split off about ``share`` of the rows; return the remaining rows and these.

    A hash of their content and the seed selects the rows. The selection is therefore the same in
    every reading of the data, on any number of cores, and equal rows stay together.
    """
    seeded = data.select(functions.lit(seed).alias(_SEED), "*")
    held = functions.pmod(content_hash(seeded), functions.lit(_SHARES)) < round(share * _SHARES)
    return seeded.where(~held).drop(_SEED), seeded.where(held).drop(_SEED)


@dataclasses.dataclass(frozen=True)
class Job:
    """A configuration that was built, ready for a fit but for checkpoints, which need a folder."""

    config: dict[str, Any]
    trainer: sparkdl.Trainer
    samples: DataFrame
    held: DataFrame | None
    test: DataFrame | None
    count: int
    iterations: int

    def fit_in(self, folder: RunFolder) -> sparkdl.Trainer:
        """Return the trainer with its checkpoints and summaries in a folder."""
        section, added = self.config["checkpoint"], self.config["summaries"]
        makers = {
            "csv": lambda: summaries.HistoryFile(folder.path / "history.csv"),
            "tensorboard": lambda: summaries.TensorBoard(folder.path / "tensorboard"),
            "mlflow": lambda: summaries.MLflow(folder.path.name),
        }
        writers = [make() for name, make in makers.items() if added[name]]
        return dataclasses.replace(
            self.trainer,
            checkpoint=section and checkpoint_of(section, folder.path),
            callbacks=[folder, *writers, *self.trainer.callbacks],
        )


@contextlib.contextmanager
def opened(command: str, config: dict[str, Any]) -> Iterator[Job]:
    """Build the trainer, start the session of a job, and read its data."""
    trainer, keys, section = trainer_of(config), config["data"], config["validation"] or {}
    paths = [path_here(keys[name]) for name in ("train", "test") if keys["prepare"] and keys[name]]
    if not all(path.exists() for path in paths):
        building.bound(keys["prepare"])(*paths)
    with session(f"{command} {config['name']}", **config["spark"]) as spark:
        samples, held = read(spark, "data.train", keys["train"], keys), None
        if section.get("share"):
            samples, held = split(samples, section["share"], trainer.seed)
        elif section:
            held = read(spark, "validation.data", section["data"], keys)
        test = read(spark, "data.test", keys["test"], keys) if keys["test"] else None
        count = samples.count()
        an_epoch = -(-count // (trainer.batch_size * trainer.options.local_steps))
        iterations = trainer.stop.limit(max(1, an_epoch)) or 1
        schedule, validation = schedule_of(config["schedule"], iterations), trainer.validation
        if validation is not None and held is not None:
            validation = dataclasses.replace(validation, data=held)
        trainer = dataclasses.replace(
            trainer, schedule=schedule, validation=validation, checkpoint=None
        )
        yield Job(config, trainer, samples, held, test, count, iterations)


def train(config: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Train, write the run folder, evaluate, and print the results."""
    point = options["resume"] and resume_point(options["resume"], config)
    with opened("train", config) as job:
        if options["dry-run"]:
            dry_run(job)
            return
        if options["resume"] and point is None:
            print(f"no run of {config['name']} to continue: starting from the beginning")
        held = f" and {job.held.count():,} to validate on" if job.held else ""
        master = job.samples.sparkSession.sparkContext.master
        print(
            f"{config['name']}: {job.count:,} samples{held}, batches of {job.trainer.batch_size}, "
            f"{job.iterations:,} iterations on {master}",
            flush=True,
        )
        with RunFolder(config["runs"], config["name"], config) as folder:
            trained = job.fit_in(folder).fit(job.samples, resume=point)
            history, state = trained.history, folder.state
            interrupted = history.stopped == INTERRUPTED
            if interrupted and not len(history):
                raise KeyboardInterrupt
            summary = {
                "samples": job.count,
                "parameters": sum(p.numel() for p in trained.module.parameters()),
                "epochs": len(history.epochs()),
                "iterations": len(history),
                **history.end,
                "seconds": state.seconds,
                "samples/s": state.samples / state.seconds,
                "train loss": history.epochs()[-1]["loss"],
                **{f"validation {name}": value for name, value in state.metrics.items()},
                **({"best epoch": state.best.epoch} if trained.best and state.best else {}),
            }
            _finish(folder, job, summary, models_of(trained), interrupted)


def _finish(
    folder: RunFolder,
    job: Job,
    summary: dict[str, Any],
    models: Mapping[str, sparkdl.TrainedModel],
    interrupted: bool,
) -> None:
    """Write the models and the figures, also those of the test data, and print these."""
    folder.write(models, summary)
    if interrupted:
        print(f"what was trained is in {folder.path}", file=sys.stderr)
        raise KeyboardInterrupt
    if job.test is not None:
        for which, model in models.items():
            prefix = "test" if which == "model" else f"{which} test"
            scores = model.evaluate(job.test, metrics_of(job.config["metrics"]))
            summary |= {f"{prefix} {name}": value for name, value in scores.items()}
        folder.write({}, summary)
    print(f"\n{table(summary)}\n\n{folder.path}")


class _BeforeTheFirst(sparkdl.Callback):
    """A callback that ends a fit when everything is ready for its first iteration."""

    def on_fit_start(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        raise sparkdl.StopTraining


def dry_run(job: Job) -> None:
    """Do all of a training except iterations: data, model, sizes and one evaluation on executors."""
    trainer = dataclasses.replace(job.trainer, callbacks=[_BeforeTheFirst()])
    model = trainer.fit(job.samples)
    few = (job.test or job.held or job.samples).limit(trainer.batch_size)
    scores = model.evaluate(few, metrics_of(job.config["metrics"]) if job.test else ())
    parameters = list(model.module.parameters())
    columns = (*trainer.feature_columns, *trainer.label_columns)
    rows = {
        "samples": job.count,
        **({"to validate on": job.held.count()} if job.held else {}),
        **{f"column {name}": job.samples.schema[name].dataType.simpleString() for name in columns},
        "parameters": sum(p.numel() for p in parameters),
        "MB of weights": sum(p.numel() * p.element_size() for p in parameters) / 1e6,
        "engine": trainer.engine,
        "iterations": job.iterations,
        **{f"untrained {name}": value for name, value in scores.items()},
    }
    print(f"{table(rows)}\n\nready to train: nothing was trained, there is no run folder")


def plan(config: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Print what an iteration of the training takes in each way to run it."""
    with opened("plan", config) as job:
        ready = dataclasses.replace(job.trainer, validation=None)
        print(sparkdl.plan(ready, job.samples, trials=options["trials"]))


def tune(config: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Search, write the run folder, evaluate the best model, and print the results."""
    search = building.search_of(config)
    with (
        opened("tune", config) as job,
        RunFolder(config["runs"], f"{config['name']}-tune", config) as folder,
    ):
        trainer = job.trainer
        if search["parallel"] == 1 and (section := config["checkpoint"]):  # others have none
            trainer = dataclasses.replace(trainer, checkpoint=checkpoint_of(section, folder.path))
        trials = Path(options["resume"] or folder.path) / "trials"
        result = sparkdl.tune.search(trainer, job.samples, path=trials, **search)
        folder.trained = bool(result.trials)
        summary: dict[str, Any] = {"trials": len(result.trials)}
        best = result.best
        if result.trials:
            rows = result.to_pandas()
            rows.to_csv(folder.path / "trials.csv")
            result.report(folder.path / "report.html", folder.path.name)
            order = rows.sort_values(search["metric"], ascending=not result.higher_is_better)
            print(order.head(10).to_string())
        if best is not None:
            summary |= {"best trial": best.number, **best.arguments}
            summary |= {f"validation {name}": value for name, value in best.metrics.items()}
        models = {} if best is None else models_of(result.best_model)
        _finish(folder, job, summary, models, result.stopped is not None)


def evaluate(keys: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Print the loss and the metrics of a saved model, and write them into its folder."""
    saved = load_saved(keys["model"], options["trust"], keys["loss"], evaluates=True)
    metrics = saved.metrics if keys["metrics"] is None else metrics_of(keys["metrics"])
    with session("evaluate", keys["master"]) as spark:
        data = _read_of(spark, keys, saved)
        rows = {"samples": data.count(), **saved.trained.evaluate(data, metrics)}
    path = saved.folder / "evaluation.json"
    print(table(rows), flush=True)
    stamp = {"data": keys["data"], "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    path.write_text(json.dumps(stamp | rows, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")


def predict(keys: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Write the data with a column of predictions, and print a few rows."""
    saved = load_saved(keys["model"], options["trust"])
    output, column = keys["output"], keys["column"]
    with session("predict", keys["master"]) as spark:
        data = _read_of(spark, keys, saved)
        finish = functools.partial(torch.argmax, dim=1) if options["argmax"] else None
        predicted = saved.trained.transform(data, column, postprocess=finish)
        if options["overwrite"]:
            check_apart(data, output, saved.folder)
        write(predicted, output, keys["output_format"], options["overwrite"])
        written = read(spark, "--output", output, {"format": keys["output_format"]})
        shown = [quoted(name) for name in written.columns if name not in saved.trained.features]
        print(f"{written.count():,} rows with the column {column}; the first of them:\n")
        written.select(shown).show(5, truncate=60)
    print(output)


def _read_of(spark: SparkSession, keys: Mapping[str, Any], saved: Saved) -> DataFrame:
    """Read the data for a saved model, whose columns its run may have made of others."""
    data = read(spark, "--data", keys["data"], keys)
    columns = {*data.columns}
    missing = [n for n in saved.trained.features if not columns & {n, n.partition(".")[0]}]
    if missing and saved.select:
        given = shlex.quote(json.dumps(saved.select, ensure_ascii=False))
        raise ParameterError(
            f'--data: {keys["data"]} has no column "{missing[0]}", which the run made of others: '
            f"give --select {given}"
        )
    return data


def write(data: DataFrame, path: str, format: str, overwrite: bool) -> None:
    """Write ``data`` so that :func:`read` needs no options; files replace others when complete."""
    mode = "overwrite" if overwrite else "errorifexists"
    writer = data.write.mode(mode).format(format).options(**_DEFAULTS.get(format, {}))
    with contextlib.ExitStack() as block:
        if overwrite and format in _FILES:
            path = block.enter_context(_folder(data, path).replacing())
        block.enter_context(reading_explained("writing predictions"))
        try:
            writer.save(path)
        except (AnalysisException, IllegalArgumentException) as error:
            raise ParameterError(f"--output: {of_query(str(error))}") from None


def _folder(data: DataFrame, path: str) -> HadoopFolder:
    spark: Any = data.sparkSession
    return HadoopFolder.at(path, spark._jvm, spark._jsparkSession.sessionState().newHadoopConf())


def check_apart(data: DataFrame, output: str, run: Path) -> None:
    """Refuse an ``output`` that contains files of ``data``, or the folder of the run."""

    def place(uri: str) -> PurePosixPath:
        parts, path = urlsplit(uri), unquote(urlsplit(uri).path)
        path = os.path.realpath(path) if parts.scheme == "file" else path
        return PurePosixPath(f"//{parts.scheme}/{parts.netloc}/{path}")

    with told(f"--output: {output} cannot be written"):
        target = place(_folder(data, output).qualified())
    for file in [*data.inputFiles(), run.resolve().as_uri()]:
        if place(file).is_relative_to(target):
            raise ParameterError(
                f"--overwrite would delete {unquote(file)}: give another --output."
            )


def table(rows: Mapping[str, Any]) -> str:
    """Format names and values as two columns, with readable numbers."""
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}   {_readable(value)}" for name, value in rows.items())


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
